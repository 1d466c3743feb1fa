"""Filters on columns of text, and lists of values to filter by that are kept in files."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from pydantic import model_validator

from monolith.data.transforms.filters import RowFilter
from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.features import Batch, Ragged
from monolith.features.batch import column_of

__all__ = ["FilterByText", "read_filter_values", "texts_of"]

_COMPARISONS: dict[str, Callable[[bytes, bytes], bool]] = {
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "neq": operator.ne,
}
_AFFIXES: dict[str, Callable[[bytes, tuple[bytes, ...]], bool]] = {
    "startswith": bytes.startswith,
    "endswith": bytes.endswith,
}


class FilterByText(RowFilter):
    """Keeps rows by comparing a column of text with `operand`, byte by byte.

    "gt", "ge", "eq", "lt", "le", "neq" take one text, in the order of bytes; "between" (lo, hi) keeps lo <= text < hi;
    "in" and "not-in" take a tuple; "startswith" and "endswith" one text, or a tuple of which one must fit. A row without a
    text has the empty one.

    Example:
        >>> batch = {"device": Ragged.from_lists([list(b"ios 17"), list(b"android"), []], dtype=torch.uint8)}
        >>> [bytes(row) for row in FilterByText(column="device", op="startswith", operand="ios")(batch)["device"].to_lists()]
        [b'ios 17']
    """

    column: str
    """The column to compare: `Ragged` of uint8, one text in each row."""
    op: Literal["gt", "ge", "eq", "lt", "le", "neq", "between", "in", "not-in", "startswith", "endswith"]
    """How to compare."""
    operand: str | bytes | tuple[str | bytes, ...]
    """What to compare with; `str` means its UTF-8 bytes."""

    @model_validator(mode="after")
    def _operand_fits(self) -> FilterByText:
        count = len(self.operand) if isinstance(self.operand, tuple) else None
        if self.op not in _AFFIXES and (self.op in _COMPARISONS) != (count is None):
            raise ValueError(f"operand: {self.op!r} takes {'one text' if self.op in _COMPARISONS else 'a tuple'}")
        if self.op == "between" and count != 2:
            raise ValueError("operand: 'between' takes (lo, hi)")
        return self

    def mask(self, batch: Batch) -> torch.Tensor:
        """Which rows stay: bool [rows]."""
        column = column_of(batch, self.column)
        if not isinstance(column, Ragged) or column.values.dtype != torch.uint8:
            raise InvalidArgumentError(
                f"batch[{self.column!r}]: expected text, a Ragged of uint8, got {type(column).__name__} of "
                f"{column.values.dtype if isinstance(column, Ragged) else column.dtype}; FilterByValue compares numbers"
            )
        return torch.tensor([self._keeps(text) for text in texts_of(column)], dtype=torch.bool)

    @cached_property
    def _operands(self) -> tuple[bytes, ...]:
        given = self.operand if isinstance(self.operand, tuple) else (self.operand,)
        return tuple(text.encode() if isinstance(text, str) else text for text in given)

    @cached_property
    def _listed(self) -> frozenset[bytes]:
        return frozenset(self._operands)

    def _keeps(self, text: bytes) -> bool:
        if self.op in _COMPARISONS:
            return _COMPARISONS[self.op](text, self._operands[0])
        if self.op in _AFFIXES:
            return _AFFIXES[self.op](text, self._operands)
        if self.op == "between":
            return self._operands[0] <= text < self._operands[1]
        return (text in self._listed) == (self.op == "in")


def texts_of(column: Ragged) -> list[bytes]:
    """The text of each row of a `Ragged` of uint8.

    Example:
        >>> texts_of(Ragged.from_lists([[104, 105], []], dtype=torch.uint8))
        [b'hi', b'']
    """
    text, splits = column.values.numpy().tobytes(), column.offsets.tolist()
    return [text[start:end] for start, end in itertools.pairwise(splits)]


def read_filter_values(path: str | os.PathLike[str]) -> tuple[int, ...] | tuple[float, ...] | tuple[bytes, ...]:
    """The values of a file that holds one serialized FilterValues message, as operand of an "in" or "not-in" filter.

    Example:
        >>> import tempfile
        >>> from monolith.proto import item_pool_pb2
        >>> message = item_pool_pb2.FilterValues()
        >>> message.int64_list.value.extend([7, 9])
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(message.SerializeToString())
        ...     file.flush()
        ...     read_filter_values(file.name)
        (7, 9)
    """
    from google.protobuf.message import DecodeError

    from monolith.proto import item_pool_pb2

    message = item_pool_pb2.FilterValues()
    try:
        message.ParseFromString(Path(path).read_bytes())
    except OSError as error:
        raise StorageError(f"{path}: cannot read the values: {error.strerror}") from error
    except DecodeError as error:
        raise CorruptFileError(f"{path}: expected a serialized FilterValues message: {error}") from error
    kind = message.WhichOneof("type")
    if kind is None:
        raise CorruptFileError(f"{path}: expected a FilterValues message with a list, got one without")
    return tuple(getattr(message, kind).value)
