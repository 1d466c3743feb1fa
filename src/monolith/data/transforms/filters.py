"""Which rows of a batch stay: by feature ids, actions, labels, values or text of a column."""

from __future__ import annotations

import itertools
import operator
import os
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from monolith.config import Config
from monolith.data.transforms.rows import (
    Number,
    any_in_rows,
    is_in,
    list_tensor,
    matrix_of,
    numbers_of,
    rows_with,
    select_rows,
)
from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.features import Batch, Ragged, fid_v2, num_rows
from monolith.features.batch import column_of

__all__ = [
    "FilterByAction",
    "FilterByFid",
    "FilterByLabel",
    "FilterByText",
    "FilterByValue",
    "RowFilter",
    "read_filter_values",
    "texts_of",
]

Op = Literal["gt", "ge", "eq", "lt", "le", "neq", "between", "in", "not-in", "any", "all", "diff"]


class RowFilter(Config):
    """A transform that keeps the rows where `mask` is true.

    Example:
        >>> issubclass(FilterByLabel, RowFilter)
        True
    """

    @abstractmethod
    def mask(self, batch: Batch) -> torch.Tensor:
        """Return which rows stay: bool [rows]."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        return select_rows(batch, self.mask(batch))


class FilterByFid(RowFilter):
    """Keeps rows by the feature ids they have in any of `columns`, and by their actions and request time.

    A row stays if it has none of `filter_fids`, one of `has_fids`, all of `select_fids`, an id of each of `select_slots`
    (fids v2), one of `has_actions`, and a request time of at least `req_time_min`. A condition that is empty or None is not
    checked.

    Example:
        >>> batch = {"ids": Ragged.from_lists([[1, 2], [2, 3], []])}
        >>> FilterByFid(columns=("ids",), filter_fids=(3,), has_fids=(1, 2))(batch)["ids"].to_lists()
        [[1, 2]]
    """

    columns: tuple[str, ...]
    """Columns of ids to look into: tensors or `Ragged`."""
    filter_fids: tuple[int, ...] = ()
    """A row with one of these is dropped."""
    has_fids: tuple[int, ...] = ()
    """A row with none of these is dropped."""
    select_fids: tuple[int, ...] = ()
    """A row without all of these is dropped."""
    select_slots: tuple[Annotated[int, Field(ge=0, lt=32768)], ...] = ()
    """A row without an id of each of these slots is dropped."""
    has_actions: tuple[int, ...] = ()
    """A row with none of these in `actions` is dropped."""
    req_time_min: int | None = None
    """A row with a smaller `req_time` is dropped."""
    actions: str = "actions"
    """The column of actions."""
    req_time: str = "req_time"
    """The column of request times."""

    def mask(self, batch: Batch) -> torch.Tensor:
        """Return which rows stay: bool [rows]."""
        keep = torch.ones(num_rows(batch), dtype=torch.bool)
        if self.filter_fids:
            keep &= ~self._have(batch, self.filter_fids)
        if self.has_fids:
            keep &= self._have(batch, self.has_fids)
        for fid in self.select_fids:
            keep &= self._have(batch, (fid,))
        for slot in self.select_slots:
            keep &= self._any(batch, partial(_of_slot, slot=slot))
        if self.has_actions:
            keep &= rows_with(column_of(batch, self.actions), self.has_actions)
        if self.req_time_min is not None:
            keep &= numbers_of(batch, self.req_time) >= self.req_time_min
        return keep

    def _have(self, batch: Batch, fids: tuple[int, ...]) -> torch.Tensor:
        return self._any(batch, partial(is_in, listed=fids))

    def _any(self, batch: Batch, hit: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        found = torch.zeros(num_rows(batch), dtype=torch.bool)
        for name in self.columns:
            column = column_of(batch, name)
            found |= any_in_rows(column, hit(column.values if isinstance(column, Ragged) else column))
        return found


class FilterByAction(RowFilter):
    """Keeps rows with at least one of `has_actions` in the column `actions`.

    Example:
        >>> FilterByAction(has_actions=(7,))({"actions": Ragged.from_lists([[7, 1], [1], []])})["actions"].to_lists()
        [[7, 1]]
    """

    has_actions: tuple[int, ...]
    """Actions that keep a row."""
    actions: str = "actions"
    """The column of actions."""

    def mask(self, batch: Batch) -> torch.Tensor:
        """Return which rows stay: bool [rows]."""
        return rows_with(column_of(batch, self.actions), self.has_actions)


class FilterByLabel(RowFilter):
    """Keeps rows with any label at or above its threshold, or with `filter_equal` only above it.

    The label column is [rows], [rows, labels], or `Ragged`. A `Ragged` row with fewer labels than thresholds is dropped.

    Example:
        >>> FilterByLabel(thresholds=(1.0,))({"label": torch.tensor([0.0, 1.0, 2.0])})["label"].tolist()
        [1.0, 2.0]
    """

    thresholds: Annotated[tuple[float, ...], Field(min_length=1)]
    """One per label, in order."""
    filter_equal: bool = False
    """Whether a label equal to its threshold does not count."""
    label: str = "label"
    """The column of labels."""

    def mask(self, batch: Batch) -> torch.Tensor:
        """Return which rows stay: bool [rows]."""
        column, count = column_of(batch, self.label), len(self.thresholds)
        thresholds = torch.tensor(self.thresholds)
        if isinstance(column, Ragged):
            enough = column.row_lengths() >= count
            place = torch.arange(len(column.values)) - column.offsets[:-1][column.value_rowids()]
            counted = place < count
            hit = counted & self._reaches(column.values, thresholds[place.clamp(max=count - 1)])
            return enough & any_in_rows(column, hit)
        labels = matrix_of(column)
        if labels.shape[1] < count:
            raise InvalidArgumentError(
                f"batch[{self.label!r}]: expected at least {count} labels, one per threshold, got {labels.shape[1]}"
            )
        return self._reaches(labels[:, :count], thresholds).any(dim=1)

    def _reaches(self, labels: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
        return labels > thresholds if self.filter_equal else labels >= thresholds


class FilterByValue(RowFilter):
    """Keeps rows by comparing a column with `operand`.

    For one number per row: "gt", "ge", "eq", "lt", "le" and "neq" take a number, "in" and "not-in" a tuple, and "between" (lo,
    hi) keeps lo <= value < hi. For a `Ragged` column: "any" keeps rows with one value of `operand`, "all" rows with all of its
    values, and "diff" rows with a value that is not in it. An empty row stays if `keep_empty`.

    Example:
        >>> batch = {"rank": torch.tensor([1, 5, 9])}
        >>> FilterByValue(column="rank", op="between", operand=(2, 9))(batch)["rank"].tolist()
        [5]
    """

    column: str
    """The column to compare."""
    op: Op
    """How to compare."""
    operand: Number | tuple[Number, ...]
    """What to compare with. `read_filter_values` reads a long tuple from a file."""
    keep_empty: bool = False
    """Whether rows without a value stay."""

    @model_validator(mode="after")
    def _operand_fits(self) -> FilterByValue:
        count = len(self.operand) if isinstance(self.operand, tuple) else None
        if (self.op in _COMPARISONS) != (count is None):
            raise ValueError(f"operand: {self.op!r} takes {'a number' if self.op in _COMPARISONS else 'a tuple'}")
        if self.op == "between" and count != 2:
            raise ValueError("operand: 'between' takes (lo, hi)")
        return self

    def mask(self, batch: Batch) -> torch.Tensor:
        """Return which rows stay: bool [rows]."""
        column = column_of(batch, self.column)
        if isinstance(column, Ragged) != (self.op in ("any", "all", "diff")):
            kind = "a Ragged" if isinstance(column, Ragged) else "one number per row"
            raise InvalidArgumentError(
                f"batch[{self.column!r}]: op {self.op!r} does not compare {kind}; 'any', 'all' and 'diff' are for Ragged"
            )
        if isinstance(column, Ragged):
            return self._set_mask(column)
        values = numbers_of(batch, self.column)
        if not isinstance(self.operand, tuple):
            return _COMPARISONS[self.op](values, self.operand)
        if self.op == "between":
            return (values >= self.operand[0]) & (values < self.operand[1])
        return is_in(values, self._listed, invert=self.op == "not-in")

    @cached_property
    def _listed(self) -> torch.Tensor:
        # Computed once: a list from a file may be long.
        return list_tensor(self.operand if isinstance(self.operand, tuple) else (self.operand,))

    def _set_mask(self, column: Ragged) -> torch.Tensor:
        if self.op == "all":
            kept = torch.ones(len(column), dtype=torch.bool)
            for value in self._listed:
                kept &= any_in_rows(column, column.values == value)
        else:
            kept = any_in_rows(column, is_in(column.values, self._listed, invert=self.op == "diff"))
        return torch.where(column.row_lengths() == 0, torch.tensor(self.keep_empty), kept)


_COMPARISONS: dict[str, Callable[[torch.Tensor, Number], torch.Tensor]] = {
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "lt": torch.lt,
    "le": torch.le,
    "neq": torch.ne,
}


def _of_slot(ids: torch.Tensor, slot: int) -> torch.Tensor:
    return fid_v2.slot_of(ids) == slot


_TEXT_COMPARISONS: dict[str, Callable[[bytes, bytes], bool]] = {
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

    "gt", "ge", "eq", "lt", "le", "neq" take one text, in the order of bytes, "in" and "not-in" a tuple, and "between" (lo, hi)
    keeps lo <= text < hi. "startswith" and "endswith" take one text, or a tuple of which one must match. A row without a text
    has the empty one.

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
    """What to compare with. `str` means its UTF-8 bytes."""

    @model_validator(mode="after")
    def _operand_fits(self) -> FilterByText:
        count = len(self.operand) if isinstance(self.operand, tuple) else None
        if self.op not in _AFFIXES and (self.op in _TEXT_COMPARISONS) != (count is None):
            raise ValueError(f"operand: {self.op!r} takes {'one text' if self.op in _TEXT_COMPARISONS else 'a tuple'}")
        if self.op == "between" and count != 2:
            raise ValueError("operand: 'between' takes (lo, hi)")
        return self

    def mask(self, batch: Batch) -> torch.Tensor:
        """Return which rows stay: bool [rows]."""
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
        if self.op in _TEXT_COMPARISONS:
            return _TEXT_COMPARISONS[self.op](text, self._operands[0])
        if self.op in _AFFIXES:
            return _AFFIXES[self.op](text, self._operands)
        if self.op == "between":
            return self._operands[0] <= text < self._operands[1]
        return (text in self._listed) == (self.op == "in")


def texts_of(column: Ragged) -> list[bytes]:
    """Return the text of each row of a `Ragged` of uint8.

    Example:
        >>> texts_of(Ragged.from_lists([[104, 105], []], dtype=torch.uint8))
        [b'hi', b'']
    """
    text, splits = column.values.numpy().tobytes(), column.offsets.tolist()
    return [text[start:end] for start, end in itertools.pairwise(splits)]


def read_filter_values(path: str | os.PathLike[str]) -> tuple[int, ...] | tuple[float, ...] | tuple[bytes, ...]:
    """Return the values of a file that holds one serialized FilterValues message, as operand of an "in" or "not-in" filter.

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
