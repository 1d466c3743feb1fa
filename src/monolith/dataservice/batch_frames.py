"""A batch as arrays of a frame, with the names and kinds of its columns in the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from monolith.config import Config
from monolith.errors import InvalidArgumentError, ProtocolError
from monolith.features import Batch, Ragged, num_rows
from monolith.transport.frames import BFLOAT16

__all__ = ["ColumnHead", "arrays_of", "batch_of"]

Stored = Literal["int64", "int32", "float32", "float64", "float16", "bfloat16", "uint8", "bool"]
_DTYPES: dict[torch.dtype, Stored] = {
    torch.int64: "int64",
    torch.int32: "int32",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


class ColumnHead(Config):
    """One column: a tensor is one array, a Ragged two, values and offsets."""

    name: Annotated[str, Field(min_length=1)]
    ragged: bool
    dtype: Stored
    """Of the values; a bool travels as uint8."""


def arrays_of(batch: Batch) -> tuple[list[ColumnHead], list[np.ndarray]]:
    """The columns of `batch` and their arrays; a column of another dtype is an error.

    Example:
        >>> heads, arrays = arrays_of({"user": torch.tensor([7, 8]), "tags": Ragged.from_lists([[1], []])})
        >>> [head.name for head in heads], [array.tolist() for array in arrays]
        (['user', 'tags'], [[7, 8], [1], [0, 1, 1]])
    """
    heads, arrays = [], []
    num_rows(batch)  # a batch whose columns do not fit together is an error of who made it
    for name, column in batch.items():
        values = column.values if isinstance(column, Ragged) else column
        if values.dtype not in _DTYPES:
            raise InvalidArgumentError(
                f"batch[{name!r}]: expected one of {', '.join(_DTYPES.values())}, got {values.dtype}; convert it first"
            )
        heads.append(ColumnHead(name=name, ragged=isinstance(column, Ragged), dtype=_DTYPES[values.dtype]))
        arrays.append(_array(values.detach().cpu().contiguous()))
        if isinstance(column, Ragged):
            arrays.append(column.offsets.numpy())
    return heads, arrays


def batch_of(heads: Sequence[ColumnHead], arrays: Sequence[np.ndarray]) -> Batch:
    """The batch that was sent, in memory of its own; `ProtocolError` if heads and arrays do not fit together."""
    batch: Batch = {}
    left = iter(arrays)
    try:
        for head in heads:
            values = _tensor(_next(left, head.name), head)
            batch[head.name] = Ragged(values, _next(left, head.name).copy()) if head.ragged else values
        num_rows(batch)
    except InvalidArgumentError as error:
        raise ProtocolError(f"batch: {error}") from None
    if len(batch) != len(heads) or next(left, None) is not None:
        raise ProtocolError(f"batch: expected the arrays of {len(heads)} columns of different names, got others")
    return batch


def _array(values: torch.Tensor) -> np.ndarray:
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(BFLOAT16)
    return (values.view(torch.uint8) if values.dtype == torch.bool else values).numpy()


def _tensor(array: np.ndarray, head: ColumnHead) -> torch.Tensor:
    stored = np.dtype("u1") if head.dtype == "bool" else BFLOAT16 if head.dtype == "bfloat16" else np.dtype(head.dtype)
    if array.dtype != stored:
        raise ProtocolError(f"batch[{head.name!r}]: expected {stored}, got {array.dtype}")
    if head.dtype == "bfloat16":
        return torch.from_numpy(array.view("<i2").copy()).view(torch.bfloat16)
    values = torch.from_numpy(array.copy())
    return values.bool() if head.dtype == "bool" else values


def _next(arrays: Iterator[np.ndarray], name: str) -> np.ndarray:
    array = next(arrays, None)
    if array is None:
        raise ProtocolError(f"batch[{name!r}]: its array is missing")
    return array
