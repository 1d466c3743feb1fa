"""`Column`: what to take out of a record or a table, and the shape it gets in the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from monolith import _core
from monolith.config import Config
from monolith.errors import InvalidArgumentError
from monolith.features import Ragged
from monolith.features.batch import Batch

__all__ = ["Column", "checked_columns", "nested_entries"]

_TYPES = {
    "int64": _core.ColumnType.INT64,
    "float32": _core.ColumnType.FLOAT32,
    "float64": _core.ColumnType.FLOAT64,
    "bytes": _core.ColumnType.BYTES,
}


class Column(Config):
    """One column of the batches of a source.

    In the batch a column is, with n rows:

    - `shape=(3,)`: a tensor [n, 3]; `shape=()`: a tensor [n];
    - no shape: `Ragged`, any number of values in each row;
    - `nested=True`: lists of lists, as two entries: `name` has the values of each row one after the other, `name.lengths`
      the lengths of the row's inner lists;
    - `dtype="bytes"`: one string in each row as `Ragged` of uint8, or with `nested=True` any number of strings.

    Example:
        >>> Column(name="user", field="user_id", shape=(), default=-1).output_names()
        ('user',)
        >>> Column(name="tags", dtype="bytes", nested=True).output_names()
        ('tags', 'tags.lengths')
    """

    name: str = Field(min_length=1)
    """Name in the batch."""
    dtype: Literal["int64", "float32", "float64", "bytes"] = "int64"
    """Type of the values; what cannot be read as this type without loss is a `SchemaError`."""
    shape: tuple[int, ...] | None = None
    """Shape of a row; None for rows of different lengths."""
    nested: bool = False
    """Rows are lists of lists (of strings: lists)."""
    field: str | None = None
    """Name in the source, if it is another one."""
    default: float | int | None = None
    """What a missing row of a column with a shape is filled with; None makes it a `SchemaError`."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.shape is not None and (self.nested or self.dtype == "bytes"):
            raise ValueError("nested columns and strings have rows of different lengths: leave out shape")
        if self.shape is not None and (any(size < 1 for size in self.shape) or math.prod(self.shape) > 2**24):
            raise ValueError(f"shape: expected positive sizes and at most {2**24} values in a row")
        if self.default is not None and self.shape is None:
            raise ValueError("default is for columns with a shape; a missing row of the others is empty")
        if isinstance(self.default, float) and self.dtype == "int64":
            raise ValueError("default: expected an integer, as dtype is int64")
        return self

    @property
    def source(self) -> str:
        """Name in the source."""
        return self.name if self.field is None else self.field

    def output_names(self) -> tuple[str, ...]:
        """The entries this column has in a batch."""
        return (self.name, f"{self.name}.lengths") if self.nested else (self.name,)

    def to_core(self, missing: float | None = None) -> _core.ColumnSpec:
        """The column as the core's parser wants it; `missing` is the default of columns that name none."""
        fill = missing if self.default is None else float(self.default)
        layout, width = _core.ColumnLayout.RAGGED, 1
        if self.nested:
            layout = _core.ColumnLayout.NESTED
        elif self.shape is not None or self.dtype == "bytes":
            layout, width = _core.ColumnLayout.FIXED, math.prod(self.shape or ())
        return _core.ColumnSpec(self.name, self.source, _TYPES[self.dtype], layout, width, fill)

    def entries(self, values: np.ndarray, splits: np.ndarray, lengths: np.ndarray, list_splits: np.ndarray) -> Batch:
        """Batch entries from the arrays of the core's parser."""
        if self.shape is not None:
            return {self.name: torch.from_numpy(values).reshape(-1, *self.shape)}
        ragged = Ragged(torch.from_numpy(values), splits)
        if not self.nested:
            return {self.name: ragged}
        return nested_entries(self, ragged, Ragged(torch.from_numpy(lengths), list_splits))


def nested_entries(column: Column, values: Ragged, lengths: Ragged) -> Batch:
    """The two entries of a nested column."""
    return dict(zip(column.output_names(), (values, lengths), strict=True))


def checked_columns(columns: Iterable[Column]) -> Sequence[Column]:
    """At least one column, all of them `Column`s, no entry of the batch named twice."""
    checked = tuple(columns)
    if not checked:
        raise InvalidArgumentError("columns: expected at least one Column, got none")
    names: set[str] = set()
    for column in checked:
        if not isinstance(column, Column):
            raise InvalidArgumentError(
                f"columns: expected Column, got {type(column).__name__} {column!r}; this source has no types of its own, write "
                f"Column(name={str(column)!r}, dtype=..., shape=()) for one value per row, without shape for lists"
            )
        for name in column.output_names():
            if name in names:
                raise InvalidArgumentError(f"columns: two of them are named {name!r}")
            names.add(name)
    return checked
