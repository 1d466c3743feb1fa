"""Whole rows as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Entries", "TableState"]


@dataclass(frozen=True, kw_only=True)
class TableState:
    """Saved with the rows, so that a restored table trains on to the same bits.

    Example:
        >>> import torch
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> config = TableConfig(name="item", segments=(Segment(dim=2),))
        >>> table, copy = EmbeddingTable(config), EmbeddingTable(config)
        >>> table.assign([1], torch.ones(1, 2), event_time=1_700_000_000)
        >>> copy.set_state(table.state())
        >>> copy.state()
        TableState(max_event_time=1700000000, updates=0, hashnet_scales=(1.0,))
    """

    max_event_time: int
    """The newest event time any write has carried, seconds."""
    updates: int
    """Gradient calls so far, modulo 2**32. Stochastic rounding is seeded with it."""
    hashnet_scales: tuple[float, ...]
    """The scale of `OneBit` reads, one per segment."""


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Whole rows: stored weights and every optimizer slot by name, as of one moment per row."""

    ids: torch.Tensor
    """int64 [n]."""
    found: torch.Tensor
    """bool [n]: whether the id has a row. The other fields are zero where it has none."""
    values: torch.Tensor
    """float32 [n, dim]: stored weights, before any read path."""
    slots: dict[str, torch.Tensor]
    """Optimizer state by `<segment>/<slot>`, e.g. `0/norm`: [n, width], float32 or int64."""
    times: torch.Tensor
    """int64 [n]: event time of the last write, seconds."""

    def to_numpy(self) -> dict[str, np.ndarray]:
        """The rows as NumPy arrays: `ids`, `values`, `times`, and each slot under its name."""
        columns = {"ids": self.ids, "values": self.values, "times": self.times, **self.slots}
        return {name: tensor.numpy() for name, tensor in columns.items()}

    def to_arrow(self) -> pa.Table:
        """Returns the rows as an Arrow table. Values and slots are fixed-size lists that share memory with the tensors."""
        import pyarrow as pa

        def column(array: np.ndarray) -> pa.Array:
            flat = pa.array(array.reshape(-1))
            return flat if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, array.shape[1])

        return pa.table({name: column(array) for name, array in self.to_numpy().items()})
