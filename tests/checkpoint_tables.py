"""What the tests of checkpoints share: small tables with everything in their rows, and what rows they hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from comparison import int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import Adagrad, Adam, AdmissionFilter
from monolith.table.optimizers import Optimizer


def table_config(name: str = "user", *, dim: int = 3, seed: int = 0, optimizer: Optimizer | None = None) -> TableConfig:
    """Two segments, slots of float32 and int64, half precision with stochastic rounding."""
    parts = (
        Segment(dim=dim, optimizer=optimizer or Adam(), precision="fp16"),
        Segment(dim=2, optimizer=Adagrad()),
    )
    return TableConfig(name=name, segments=parts, seed=seed)


def new_table(name: str = "user", *, admission: AdmissionFilter | None = None) -> EmbeddingTable:
    return EmbeddingTable(table_config(name), admission=admission)


def train(table: EmbeddingTable, ids: Iterable[int], *, step: int = 0) -> None:
    """One optimizer step with gradients that depend on id and step."""
    wanted = int64(ids)
    scale = ((wanted % 7) + step + 1).to(torch.float32)[:, None] * torch.linspace(0.1, 1.0, table.dim)
    table.apply_gradients(wanted, scale, step=step, event_time=step)


def rows_of(*tables: EmbeddingTable) -> dict[int, bytes]:
    """The whole row of every id, bit for bit, in all `tables` together; no id may be in two of them."""
    rows: dict[int, bytes] = {}
    for table in tables:
        for entries in table.iter_batches():
            columns = [entries.values, *entries.slots.values(), entries.times[:, None]]
            for place, id_ in enumerate(entries.ids.tolist()):
                assert id_ not in rows, f"id {id_} is in two shards"
                rows[id_] = b"".join(column[place].numpy().tobytes() for column in columns)
    return rows


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
