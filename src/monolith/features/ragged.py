"""`Ragged`: rows of different lengths, converted from and to lists, Arrow lists and nested tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from monolith import _core
from monolith.errors import InvalidArgumentError
from monolith.table.arrays import Ids, id_vector

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Ragged", "fused_value_rowids"]

_SHOWN = 5  # rows, and values of a row, that `repr` prints


class Ragged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`.

    `values` is a tensor [n, ...] and `offsets` int64 [rows + 1], from 0 to n, never decreasing. They are checked once,
    here, and must not be changed afterwards.

    Example:
        >>> ragged = Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 0, 1, 3]))
        >>> ragged.to_lists()
        [[], [1], [2, 3]]
        >>> ragged.value_rowids().tolist()
        [1, 2, 2]
    """

    __slots__ = ("_rowids", "_splits", "offsets", "values")

    def __init__(self, values: torch.Tensor | np.ndarray | Sequence[Any], offsets: Ids) -> None:
        self.values = torch.as_tensor(values)
        if self.values.ndim == 0:
            raise InvalidArgumentError("values: expected at least one dimension, got a scalar")
        self._splits = id_vector(offsets, "offsets")
        _core.check_row_splits(self._splits, len(self.values))
        self.offsets = torch.from_numpy(self._splits)
        self._rowids: torch.Tensor | None = None

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[Any]], *, dtype: torch.dtype = torch.int64) -> Ragged:
        """Build with one row per list.

        Example:
            >>> Ragged.from_lists([[], [1], [2, 3]]).offsets.tolist()
            [0, 0, 1, 3]
        """
        splits = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
        return cls(torch.tensor([value for row in rows for value in row], dtype=dtype), splits)

    def to_lists(self) -> list[list[Any]]:
        """Return one list per row."""
        values: list[Any] = self.values.tolist()
        splits = self._splits.tolist()
        return [values[begin:end] for begin, end in itertools.pairwise(splits)]

    @classmethod
    def from_arrow(cls, column: pa.Array | pa.ChunkedArray) -> Ragged:
        """Convert an Arrow column of lists of numbers. A null list is an empty row.

        The values are shared with Arrow, not copied, if the column is one chunk without null lists. They may not be written to.

        Example:
            >>> import pyarrow as pa
            >>> Ragged.from_arrow(pa.array([[1, 2], None, [3]])).to_lists()
            [[1, 2], [], [3]]
        """
        import pyarrow as pa

        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise InvalidArgumentError(f"column: expected lists of numbers, got {column.type}")
        if column.null_count:
            lengths = column.value_lengths().fill_null(0).to_numpy()
            splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            values = column.flatten()
        else:
            splits = column.offsets.to_numpy().astype(np.int64)
            values = column.values.slice(splits[0], splits[-1] - splits[0])
            splits -= splits[0]
        return cls(_numbers(values), splits)

    def to_arrow(self) -> pa.Array:
        """Return an Arrow array of large lists that shares the values: [n] as numbers, [n, d] as lists of fixed size.

        Example:
            >>> Ragged.from_lists([[1, 2], []]).to_arrow().to_pylist()
            [[1, 2], []]
        """
        import pyarrow as pa

        if self.values.ndim > 2:
            raise InvalidArgumentError(f"values: expected [n] or [n, d] for Arrow, got {list(self.values.shape)}")
        flat = pa.array(self.values.detach().cpu().reshape(-1).numpy())
        values = flat if self.values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, self.values.shape[1])
        return pa.LargeListArray.from_arrays(pa.array(self._splits), values)

    @classmethod
    def from_nested(cls, nested: torch.Tensor) -> Ragged:
        """Convert a nested tensor of layout `torch.jagged`, [rows, (n), ...], and share its values.

        Example:
            >>> rows = [torch.tensor([1, 2]), torch.tensor([3])]
            >>> Ragged.from_nested(torch.nested.nested_tensor(rows, layout=torch.jagged)).to_lists()
            [[1, 2], [3]]
        """
        if not (nested.is_nested and nested.layout == torch.jagged):
            raise InvalidArgumentError("nested: expected a nested tensor of layout torch.jagged")
        if nested._ragged_idx != 1:  # type: ignore[attr-defined]
            raise InvalidArgumentError(
                f"nested: expected [rows, (n), ...], ragged in dimension 1, got {list(nested.shape)}"
            )
        whole = nested.contiguous()
        return cls(whole.values(), whole.offsets().cpu())  # type: ignore[attr-defined]

    def to_nested(self) -> torch.Tensor:
        """Return a nested tensor of layout `torch.jagged` that shares the values. Differentiable.

        Example:
            >>> Ragged.from_lists([[1, 2], [3]]).to_nested().unbind()
            (tensor([1, 2]), tensor([3]))
        """
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets.to(self.values.device))

    def value_rowids(self) -> torch.Tensor:
        """Return the row of each value, int64 [n]. It is computed once, and later calls return the same tensor."""
        if self._rowids is None:
            self._rowids = torch.from_numpy(_core.value_rowids(self._splits, len(self.values)))
        return self._rowids

    def row_lengths(self) -> torch.Tensor:
        """Return the number of values in each row, int64 [rows]."""
        return self.offsets.diff()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._splits) - 1

    def __repr__(self) -> str:
        """Return the size and the first values: a batch has too many to print."""
        rows, count = len(self), len(self.values)
        begin = [
            self.values[a : min(b, a + _SHOWN)].tolist() for a, b in itertools.pairwise(self._splits[: _SHOWN + 1])
        ]
        shown = ", ".join(
            f"{values}"[:-1] + ", ...]" if length > _SHOWN else f"{values}"
            for values, length in zip(begin, np.diff(self._splits[: _SHOWN + 1]).tolist(), strict=True)
        )
        kind = f"{count} value{'' if count == 1 else 's'} of {str(self.values.dtype).removeprefix('torch.')}"
        kind += f" {list(self.values.shape[1:])}" if self.values.ndim > 1 else ""
        return f"Ragged({rows} row{'' if rows == 1 else 's'}, {kind}: [{shown}{', ...' if rows > _SHOWN else ''}])"


def fused_value_rowids(rt: Ragged) -> torch.Tensor:
    """`rt.value_rowids()` under the original's name: the same tensor on every call.

    Example:
        >>> fused_value_rowids(Ragged.from_lists([[], [1], [2, 3]])).tolist()
        [1, 2, 2]
    """
    if not isinstance(rt, Ragged):
        raise InvalidArgumentError(
            f"rt must be RaggedTensor (monolith.features.Ragged), got {type(rt).__name__}; "
            "build one with Ragged(values, offsets) or Ragged.from_lists(rows)"
        )
    return rt.value_rowids()


def _numbers(values: pa.Array) -> torch.Tensor:
    import pyarrow as pa

    if values.null_count:
        raise InvalidArgumentError(f"column: {values.null_count} values are null; drop or fill them first")
    if pa.types.is_boolean(values.type):
        return torch.from_numpy(values.to_numpy(zero_copy_only=False))
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise InvalidArgumentError(
            f"column: expected lists of numbers, got {values.type}; strings become ids by hash_strings"
        )
    # DLPack, because Arrow's memory is read-only: torch takes such NumPy arrays only under protest.
    return torch.utils.dlpack.from_dlpack(values) if len(values) else torch.from_numpy(values.to_numpy().copy())
