"""A batch: named columns with one entry per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from monolith.config import nearest_name
from monolith.errors import InvalidArgumentError
from monolith.features.ragged import Ragged

__all__ = ["Batch", "BatchColumn", "IdMatrix", "as_batch", "column_of", "nearest_column", "num_rows"]

BatchColumn = torch.Tensor | Ragged
"""Rows of one column: a tensor [rows, ...], or `Ragged` with as many rows."""
Batch = dict[str, BatchColumn]
"""Columns by name, all with the same number of rows. Labels, weights and request times are columns like any other."""
_COLUMNS = (torch.Tensor, Ragged)


class IdMatrix(Mapping[str, torch.Tensor]):
    """Columns of one id per row that are the rows of one matrix. A tensor for each is only made when somebody asks for it.

    Example:
        >>> columns = IdMatrix(("user", "item"), torch.tensor([[7, 8], [1, 2]]))
        >>> columns["item"], columns.rows
        (tensor([1, 2]), 2)
    """

    __slots__ = ("ids", "names")

    def __init__(self, names: tuple[str, ...], ids: torch.Tensor) -> None:
        self.names = names
        self.ids = ids
        """int64 [columns, rows], contiguous and in main memory. Nobody changes it."""

    @property
    def rows(self) -> int:
        """Rows of each column."""
        return self.ids.shape[1]

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self.ids[self.names.index(name)]
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def as_batch(columns: Mapping[str, object]) -> Batch:
    """Convert NumPy arrays and lists of numbers to tensors and `Ragged`. A batch that has none is returned as it is.

    Integers and booleans become int64, Python floats float32. NumPy floats keep their precision. Lists of lists become
    `Ragged`. A column of anything else stays as it is: it is an error only where a model reads it.

    Example:
        >>> batch = as_batch({"user": np.array([1, 2], dtype=np.int32), "tags": [[5], []], "label": [0.0, 1.0]})
        >>> batch["user"].dtype, batch["tags"].to_lists(), batch["label"]
        (torch.int64, [[5], []], tensor([0., 1.]))
    """
    if not isinstance(columns, Mapping):
        raise InvalidArgumentError(f"batch: expected a dict of columns by name, got {type(columns).__name__}")
    if isinstance(columns, dict) and all(isinstance(value, torch.Tensor | Ragged) for value in columns.values()):
        return cast("Batch", columns)
    return {name: _converted(value) for name, value in columns.items()}


def _converted(value: object) -> BatchColumn:
    """Return `value` as a column if it is numbers in a known form, otherwise `value` itself."""
    if isinstance(value, torch.Tensor | Ragged):
        return value
    if isinstance(value, list | tuple):
        return _ragged(value) if any(isinstance(row, list | tuple | np.ndarray) for row in value) else _tensor(value)
    return _tensor(value) if hasattr(value, "__array__") else cast("BatchColumn", value)


def _ragged(rows: Sequence[object]) -> BatchColumn:
    try:
        parts = [np.asarray(row) for row in rows]
        splits = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    except (TypeError, ValueError):
        return cast("BatchColumn", rows)
    # An empty row says nothing about the type of the others.
    filled = [part for part in parts if len(part)]
    if not filled:
        return Ragged(torch.empty(0, dtype=torch.int64), splits)
    values = np.concatenate(filled)
    tensor = _tensor(values if isinstance(rows[0], np.ndarray) else values.tolist())
    return Ragged(tensor, splits) if isinstance(tensor, torch.Tensor) else cast("BatchColumn", rows)


def _tensor(values: object) -> BatchColumn:
    try:
        # Without a value to tell its type, a list is one of ids.
        array = np.asarray(values) if not isinstance(values, list | tuple) or values else np.empty(0, dtype=np.int64)
    except ValueError:
        return cast("BatchColumn", values)
    if array.dtype.kind in "bi" or (array.dtype.kind == "u" and (not array.size or array.max() < 2**63)):
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind != "f":
        return cast("BatchColumn", values)
    # Python floats have no precision to keep: a model computes in float32.
    return torch.from_numpy(array.astype(np.float32 if isinstance(values, list | tuple) else array.dtype))


def num_rows(batch: Mapping[str, object], names: Iterable[str] | None = None) -> int:
    """Count the rows that all columns, or those of `names`, agree on. Columns that are not numbers do not count.

    Example:
        >>> num_rows({"user": torch.tensor([1, 2]), "tags": Ragged.from_lists([[1], []])})
        2
    """
    first, rows = "", 0
    # Called for every batch, with all of its columns: torch's own __len__ alone would take most of the time.
    for name in batch if names is None else names:
        column = batch.get(name)
        if not isinstance(column, _COLUMNS):
            if names is None:
                continue
            column = column_of(batch, name)
        elif isinstance(column, torch.Tensor) and column.ndim == 0:
            column_of(batch, name)  # raises
        length = column.shape[0] if isinstance(column, torch.Tensor) else len(column)
        if not first:
            first, rows = name, length
        elif length != rows:
            raise InvalidArgumentError(
                f"batch[{name!r}]: expected {rows} rows as in batch[{first!r}], got {length}; every column of a batch has "
                "one entry per row"
            )
    return rows


def column_of(batch: Mapping[str, object], name: str) -> BatchColumn:
    """Return the column `name`. The error for an unknown one suggests the nearest known name.

    Example:
        >>> column_of({"user": torch.tensor([1, 2])}, "user").tolist()
        [1, 2]
    """
    try:
        column = batch[name]
    except KeyError:
        raise InvalidArgumentError(f"batch[{name!r}]: there is no such column; {nearest_column(batch, name)}") from None
    if not isinstance(column, torch.Tensor | Ragged):
        column = _converted(column)
    if isinstance(column, Ragged) or (isinstance(column, torch.Tensor) and column.ndim > 0):
        return column
    raise InvalidArgumentError(
        f"batch[{name!r}]: expected one number per row as a tensor, NumPy array or list, or a list of numbers per row, got "
        f"{column!r:.80}; convert texts to ids with monolith.features.hash_strings"
    )


def nearest_column(batch: Mapping[str, object], name: str) -> str:
    """Return a hint for an error about a missing column: a similar name, or all names there are.

    Example:
        >>> nearest_column({"user": torch.tensor([1, 2])}, "uesr")
        "did you mean 'user'?"
    """
    near = nearest_name(name, batch)
    return f"did you mean {near!r}?" if near else f"it has {', '.join(map(repr, batch)) or 'no columns'}"
