"""Python iterators as sources: of rows, or of batches that are made elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from monolith.data.sources.arrow import arrow_type, to_batch
from monolith.data.sources.column import Column, checked_columns
from monolith.data.sources.source import Position, Source
from monolith.errors import InvalidArgumentError, SchemaError
from monolith.features.batch import Batch

__all__ = ["IteratorSource"]

Rows = Iterable[Mapping[str, Any]]


class IteratorSource(Source):
    """Batches from a Python iterable, or from a function that returns a new one for each epoch.

    With `columns` and `batch_size` the items are rows, mappings from field to a value, a list or None; without, they are
    batches and passed on. Resuming and sharding count items, so the iterable must give the same ones every time.

    Example:
        >>> rows = [{"user": 1, "tags": [5]}, {"user": 2, "tags": []}, {"user": 3, "tags": [6, 7]}]
        >>> columns = [Column(name="user", shape=()), Column(name="tags")]
        >>> [batch["tags"].to_lists() for batch in IteratorSource(rows, columns, batch_size=2)]
        [[[5], []], [[6, 7]]]
    """

    def __init__(
        self,
        items: Rows | Callable[[], Rows],
        columns: Iterable[Column] | None = None,
        *,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> None:
        if (columns is None) != (batch_size is None):
            raise InvalidArgumentError("columns and batch_size: give both for rows, or none of them for batches")
        if batch_size is not None and batch_size < 1:
            raise InvalidArgumentError(f"batch_size: expected 1 or more, got {batch_size}")
        if isinstance(items, Iterator):
            raise InvalidArgumentError(
                f"items: a {type(items).__name__} can be read only once; give a list, or a function that returns a new iterator"
            )
        self.columns = None if columns is None else checked_columns(columns)
        self._items, self._batch_size, self._drop_remainder = items, batch_size, drop_remainder
        super().__init__()

    def _start(self) -> Position:
        return {"item": 0}

    def _read(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        items = self._items() if callable(self._items) else self._items
        done = int(position["item"])
        mine = itertools.islice(items, self._shard_index, None, self._shard_count)
        rest = itertools.islice(mine, done, None)
        if self.columns is None or self._batch_size is None:
            for batch in rest:
                done += 1
                yield dict(batch), {"item": done}
            return
        while rows := list(itertools.islice(rest, self._batch_size)):
            if self._drop_remainder and len(rows) < self._batch_size:
                return
            batch = _rows_to_batch(rows, self.columns, done)
            done += len(rows)
            yield batch, {"item": done}


def _rows_to_batch(rows: list[Mapping[str, Any]], columns: Sequence[Column], first: int) -> Batch:
    arrays = []
    for column in columns:
        try:
            arrays.append(pa.array([row.get(column.source) for row in rows], arrow_type(column)))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise SchemaError(f"column {column.name!r}: rows {first}..{first + len(rows) - 1}: {error}") from None
    return to_batch(pa.table(arrays, names=[column.source for column in columns]), columns)
