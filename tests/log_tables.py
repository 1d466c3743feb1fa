"""What the tests of the change log share: small tables, and a table rebuilt from a log."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from comparison import int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.log import LogReader, replay
from monolith.table import Adagrad, Adam


def table_config(name: str = "user", *, dim: int = 3) -> TableConfig:
    """Two segments, slots of float32 and int64, half precision: rows with everything in them."""
    parts = (Segment(dim=dim, optimizer=Adam(), precision="fp16"), Segment(dim=2, optimizer=Adagrad()))
    return TableConfig(name=name, segments=parts)


def new_table(name: str = "user", *, dim: int = 3) -> EmbeddingTable:
    return EmbeddingTable(table_config(name, dim=dim))


def train(table: EmbeddingTable, ids: Iterable[int], *, step: int = 0, event_time: int = 0) -> None:
    """One optimizer step with gradients that depend on id and step."""
    wanted = int64(ids)
    scale = ((wanted % 7) + step + 1).to(torch.float32)[:, None] * torch.linspace(0.1, 1.0, table.dim)
    table.apply_gradients(wanted, scale, step=step, event_time=event_time)


def rebuilt(folder: Path, to: int, *, name: str = "user", dim: int = 3) -> EmbeddingTable:
    """The table as the log alone says it was at `to`."""
    copy, reader = new_table(name, dim=dim), LogReader(folder)
    for info in reader.chain(to):
        replay(reader.read(info.sequence), {name: copy})
    return copy
