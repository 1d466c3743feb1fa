"""Whole rows as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Entries"]


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Whole rows: stored weights and every optimizer slot by name, as of one moment per row."""

    ids: torch.Tensor
    """int64 [n]."""
    found: torch.Tensor
    """bool [n]: whether the id has a row; the other fields are zero where it has none."""
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
        """The rows as an Arrow table; values and slots are fixed-size lists, sharing memory with the tensors."""
        import pyarrow as pa

        def column(array: np.ndarray) -> pa.Array:
            flat = pa.array(array.reshape(-1))
            return flat if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, array.shape[1])

        return pa.table({name: column(array) for name, array in self.to_numpy().items()})
