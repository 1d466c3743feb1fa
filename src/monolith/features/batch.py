"""A batch: named columns with one entry per row."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import torch

from monolith.errors import InvalidArgumentError
from monolith.features.ragged import Ragged

__all__ = ["Batch", "Column", "column_of", "nearest_column", "num_rows"]

Column = torch.Tensor | Ragged
"""Rows of one column: a tensor [rows, ...], or `Ragged` with as many rows."""
Batch = dict[str, Column]
"""Columns by name, all with the same number of rows; labels, weights and request times are columns like any other."""


def num_rows(batch: Mapping[str, Column], names: Iterable[str] | None = None) -> int:
    """The number of rows that all columns (or those of `names`) agree on; 0 without columns.

    Example:
        >>> num_rows({"user": torch.tensor([1, 2]), "tags": Ragged.from_lists([[1], []])})
        2
    """
    first, rows = "", 0
    for name in batch if names is None else names:
        length = len(column_of(batch, name))
        if not first:
            first, rows = name, length
        elif length != rows:
            raise InvalidArgumentError(
                f"batch[{name!r}]: expected {rows} rows as in batch[{first!r}], got {length}; every column of a batch has "
                "one entry per row"
            )
    return rows


def column_of(batch: Mapping[str, Column], name: str) -> Column:
    """The column `name`; an unknown one is an error that says the nearest known name.

    Example:
        >>> column_of({"user": torch.tensor([1, 2])}, "user").tolist()
        [1, 2]
    """
    try:
        column = batch[name]
    except KeyError:
        raise InvalidArgumentError(f"batch[{name!r}]: there is no such column; {nearest_column(batch, name)}") from None
    if isinstance(column, Ragged) or (isinstance(column, torch.Tensor) and column.ndim > 0):
        return column
    raise InvalidArgumentError(
        f"batch[{name!r}]: expected a tensor [rows, ...] or a Ragged, got {getattr(column, 'shape', type(column).__name__)}"
    )


def nearest_column(batch: Mapping[str, object], name: str) -> str:
    """For an error about a column that is not there: the name that may have been meant, or all there are.

    Example:
        >>> nearest_column({"user": torch.tensor([1, 2])}, "uesr")
        "did you mean 'user'?"
    """
    near = difflib.get_close_matches(name, list(batch), n=1)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, batch)) or 'no columns'}"
