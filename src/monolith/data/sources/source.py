"""What a source is (`Source`, `FileSource`), and the columns that it puts into its batches (`Column`)."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from pydantic import Field, model_validator

from monolith import _core
from monolith.config import Config
from monolith.data.sources.files import STDIN, expand_paths
from monolith.errors import InvalidArgumentError
from monolith.features import Ragged
from monolith.features.batch import Batch

__all__ = [
    "Column",
    "FileSource",
    "HasLag",
    "PartitionLag",
    "Source",
    "SourcePosition",
    "StreamLag",
    "checked_columns",
    "nested_entries",
]

_TYPES = {
    "int64": _core.ColumnType.INT64,
    "float32": _core.ColumnType.FLOAT32,
    "float64": _core.ColumnType.FLOAT64,
    "bytes": _core.ColumnType.BYTES,
}


class Column(Config):
    """One column of the batches of a source.

    In the batch a column is, with n rows:

    - `shape=(3,)`: a tensor [n, 3], and `shape=()`: a tensor [n]
    - no shape: `Ragged`, any number of values in each row
    - `nested=True`: lists of lists, as two entries: `name` has the values of each row one after the other, `name.lengths`
      the lengths of the row's inner lists
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
    """Type of the values. A value that cannot be read as this type without loss raises `SchemaError`."""
    shape: tuple[int, ...] | None = None
    """Shape of a row, None for rows of different lengths."""
    nested: bool = False
    """Rows are lists of lists (of strings: lists)."""
    field: str | None = None
    """Name in the source, if it is another one."""
    default: float | int | None = None
    """Value of a missing row of a column with a shape. None raises `SchemaError` instead."""

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
        """Return the entries of this column in a batch."""
        return (self.name, f"{self.name}.lengths") if self.nested else (self.name,)

    def to_core(self, missing: float | None = None, *, finite: bool = False) -> _core.ColumnSpec:
        """Return the column as the core's parser takes it. `missing` is the default of columns that have none.

        With `finite` a row that has NaN or infinity does not fit.
        """
        fill = missing if self.default is None else float(self.default)
        layout, width = _core.ColumnLayout.RAGGED, 1
        if self.nested:
            layout = _core.ColumnLayout.NESTED
        elif self.shape is not None or self.dtype == "bytes":
            layout, width = _core.ColumnLayout.FIXED, math.prod(self.shape or ())
        return _core.ColumnSpec(self.name, self.source, _TYPES[self.dtype], layout, width, fill, finite)

    def entries(self, values: np.ndarray, splits: np.ndarray, lengths: np.ndarray, list_splits: np.ndarray) -> Batch:
        """Return batch entries from the arrays of the core's parser."""
        if self.shape is not None:
            return {self.name: torch.from_numpy(values).reshape(-1, *self.shape)}
        ragged = Ragged(torch.from_numpy(values), splits)
        if not self.nested:
            return {self.name: ragged}
        return nested_entries(self, ragged, Ragged(torch.from_numpy(lengths), list_splits))


def nested_entries(column: Column, values: Ragged, lengths: Ragged) -> Batch:
    """Return the two entries of a nested column."""
    return dict(zip(column.output_names(), (values, lengths), strict=True))


def checked_columns(columns: Iterable[Column]) -> Sequence[Column]:
    """Return `columns`, after checking that there is at least one, that all are `Column`s, and that no batch entry is named
    twice."""
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


SourcePosition = dict[str, int | str]
"""Where reading continues, as JSON values. Each source decides what it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionLag:
    """How far the reading of one partition is behind."""

    offset: int
    """Of the next record to be handed out."""
    end: int
    """Offset of the next record that will be written, as far as the reader knows."""
    records: int
    """Records between the two, at most: a broker may have removed some. In Redis, whose offsets are times: 1 if there are any."""
    newest_event_time: int | None = None
    """Of the records handed out, in milliseconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLag:
    """How far the reading of a stream is behind what was written, and what it had to skip.

    Example:
        >>> print(StreamLag(records=120, seconds=0.3, bad=2))
        lag 120 records, 0.3 s, 2 bad
    """

    records: int
    """Records of the partitions read here that were written and not handed out yet, as far as the reader knows."""
    seconds: float | None = None
    """Age of the newest record handed out, of the partition that is most behind. 0 if there are no such records. None if the
    age is not known."""
    watermark: int | None = None
    """Event time in milliseconds since 1970, up to which nothing is expected any more. None if it is not known."""
    newest_event_time: int | None = None
    """Of the records handed out, in milliseconds since 1970."""
    late: int = 0
    """Records that came after the watermark had passed their event time, since the source was made."""
    bad: int = 0
    """Records that could not be used and went to the dead letters, since the source was made."""
    lost: int = 0
    """Records that were removed from the stream before they were read, since the source was made. Only with `on_gap="skip"`."""
    partitions: Mapping[str, PartitionLag] = field(default_factory=dict)
    """The same of each partition."""

    def __str__(self) -> str:
        known = [f"lag {self.records:,} records"]
        if self.seconds is not None:
            known.append(f"{self.seconds:,.1f} s")
        counts = ((self.late, "late"), (self.bad, "bad"), (self.lost, "lost"))
        return ", ".join([*known, *(f"{n:,} {what}" for n, what in counts if n)])


@runtime_checkable
class HasLag(Protocol):
    """A source, or something around it, that knows how far it is behind."""

    def lag(self) -> StreamLag | None:
        """Return how far reading is behind. None if that is not known, or makes no sense. Called by any thread."""


class Source(ABC):
    """An ordered stream of batches that knows its position.

    Iterating continues where the last iteration stopped. At the end the source starts again, so that one `for` loop is one
    epoch. A source that `waits` does not: it continues with what has come since. `state_dict` is the position after the last
    batch handed out: a source that loads it, in this process or another, continues with exactly the next batch. A source is read
    by one thread at a time.

    Subclasses implement `_start` and `_read`.
    """

    waits: bool = False
    """Whether a read may wait for records that do not exist yet. Such a source is read by a thread of its own (`Prefetch`), and
    it has no end, or one that only says that nothing came for a while."""

    def __init__(self) -> None:
        self._shard_index, self._shard_count = 0, 1
        self._position = self._start()

    @abstractmethod
    def _start(self) -> SourcePosition:
        """Return the position before the first batch. Every position has the same keys, with values of the same types."""

    @abstractmethod
    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        """Yield the batches from `position` on, each with the position after it."""

    def __iter__(self) -> Iterator[Batch]:
        for batch, behind in self._read(self._position):
            self._position = behind
            yield batch
        if not self.waits:
            self._position = self._start()

    def interrupt(self) -> None:  # noqa: B027 - a source that does not wait has nothing to do
        """Let a read that waits for records end at once, as if the source had ended. The next read waits again.

        Called by another thread than the one that reads. Does nothing in a source that does not wait.
        """

    def fix_start(self) -> bool:
        """Decide now where reading begins, if the first read would otherwise decide it, such as at the end of a stream.

        Returns whether the position has changed by that.
        """
        return False

    def join_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, int | str]:
        """Return one position from those of all shards, of which there may be another number than now.

        Only of sources that `waits`: each has positions by partition, and any number of shards can load the joined one.
        """
        raise InvalidArgumentError(f"{type(self).__name__} has one position for each shard, which cannot be joined")

    def replay(self, until: Mapping[str, Any]) -> Iterator[Batch]:
        """Yield the records between the position of this source and the position `until`, and move there.

        Only of sources that `waits`: they cut batches by time, so reading again gives other batches. A worker that was killed
        may have trained a batch on some servers, and trains exactly its records on the others.

        Raises:
            InvalidArgumentError: `until` is before the position of this source.
        """
        raise InvalidArgumentError(
            f"{type(self).__name__} gives the same batches whenever it is read: load_state_dict is enough"
        )

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the last batch handed out, as JSON values."""
        return {**self._position, "shard_index": self._shard_index, "shard_count": self._shard_count}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue after the batch at which `state` was taken. The source must be made and sharded as it was then."""
        expected = self.state_dict()
        wrong = [key for key in {**expected, **state} if type(state.get(key)) is not type(expected.get(key))]
        if wrong:
            raise InvalidArgumentError(
                f"state[{wrong[0]!r}]: expected the keys {', '.join(sorted(expected))} with integers and strings as "
                f"{type(self).__name__}.state_dict() gives them, got {state.get(wrong[0])!r}"
            )
        for key in ("shard_index", "shard_count"):
            if state[key] != expected[key]:
                raise InvalidArgumentError(
                    f"state[{key!r}] is {state[key]}, but this source is shard {self._shard_index} of "
                    f"{self._shard_count}; a position only has a meaning in the shard it was taken in"
                )
        position = {key: state[key] for key in self._position}
        self._check(position)
        self._position = position

    def _check(self, position: SourcePosition) -> None:
        """Raise InvalidArgumentError if `position` cannot be one of this source."""
        for key, value in position.items():
            if isinstance(value, int) and value < 0:
                raise InvalidArgumentError(f"state[{key!r}]: expected 0 or more, got {value}")

    def shard(self, index: int, count: int) -> Self:
        """Return a new source, at its beginning, with a `count`-th of this one. All shards together have every row once."""
        if not 0 <= index < count:
            raise InvalidArgumentError(f"shard: expected 0 <= index < count, got index {index} and count {count}")
        part = copy.copy(self)
        part._shard_index = self._shard_index + index * self._shard_count
        part._shard_count = self._shard_count * count
        part._position = part._start()
        return part


class FileSource(Source):
    """A source over files. Its positions have the keys `file` (index) and `url` (of that file, "" at the very start)."""

    def __init__(
        self, paths: str | Sequence[str], *, batch_size: int, drop_remainder: bool, max_corrupt: int = 0
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("max_corrupt", max_corrupt, 0)):
            if value < least:
                raise InvalidArgumentError(f"{name}: expected {least} or more, got {value}")
        self.files = expand_paths(paths)
        self._batch_size, self._drop_remainder, self._max_corrupt = batch_size, drop_remainder, max_corrupt
        super().__init__()

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self._batch_size

    def _check(self, position: SourcePosition) -> None:
        super()._check(position)
        index, url = int(position["file"]), position["url"]
        if url and (index >= len(self.files) or self.files[index] != url):
            raise InvalidArgumentError(
                f"state['url'] is {url!r}, which is not file {index} of this source; the list of files has changed"
            )
        if url == STDIN:
            raise InvalidArgumentError("state: standard input cannot be read again from a position")
