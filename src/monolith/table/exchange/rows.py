"""Rows on their way into a table and out of it, as plain columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.entries import Entries

__all__ = ["RowColumns", "fresh_slots", "insert", "row_batches"]


@dataclass(frozen=True, kw_only=True)
class RowColumns:
    """Some rows of a table."""

    ids: np.ndarray
    """int64 [n]."""
    times: np.ndarray
    """int64 [n]: event time of the last write, seconds."""
    values: np.ndarray
    """float32 [n, dim]: stored weights."""
    slots: dict[str, np.ndarray]
    """Optimizer state by `<segment>/<slot>`: [n, width], float32 or int64."""

    def where(self, chosen: np.ndarray) -> RowColumns:
        """The rows for which `chosen`, bool [n], is true."""
        slots = {name: slot[chosen] for name, slot in self.slots.items()}
        return RowColumns(ids=self.ids[chosen], times=self.times[chosen], values=self.values[chosen], slots=slots)


def insert(table: EmbeddingTable, rows: RowColumns) -> None:
    """Give `table` these rows, weights, state and times; the last of equal ids wins."""
    if table.config.skip_zero_rows:
        rows = rows.where(np.any(rows.values, axis=1))
    entries = Entries(
        ids=torch.from_numpy(rows.ids),
        found=torch.ones(len(rows.ids), dtype=torch.bool),
        values=torch.from_numpy(rows.values),
        slots={name: torch.from_numpy(slot) for name, slot in rows.slots.items()},
        times=torch.from_numpy(rows.times),
    )
    table.insert_rows(rows.ids, rows.times, table.encode(entries))


def row_batches(table: EmbeddingTable, batch_size: int = 65536) -> Iterator[RowColumns]:
    """All rows of `table`, a batch at a time; safe beside training, each row whole."""
    for entries in table.iter_batches(batch_size):
        yield RowColumns(
            ids=entries.ids.numpy(),
            times=entries.times.numpy(),
            values=entries.values.numpy(),
            slots={name: slot.numpy() for name, slot in entries.slots.items()},
        )


def fresh_slots(config: TableConfig) -> dict[str, np.ndarray]:
    """Each slot of a row that has had no gradient: [1, width]. It is the same for all ids."""
    table = EmbeddingTable(config.model_copy(update={"initial_capacity": 0}))
    if config.mode == "training":
        table.reinitialize([0])
    return {name: slot.numpy()[:1] for name, slot in table.lookup_entry([0]).slots.items()}
