"""`BatchingWriter`: a thread that writes what is appended, in batches, so `append` waits neither for a disk nor for a server.

Records of a folder are readable as soon as they are written, a millisecond or two after `append`, and on disk when `flush` has
returned. What a power cut takes away had not been flushed. A reader may have seen it all the same, so the next writer leaves out
its offsets.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from monolith import _core
from monolith.errors import DeadlineExceededError, InvalidArgumentError, StorageError, UnavailableError
from monolith.process_bound import ProcessBound
from monolith.streams.stream import Headers, NewRecord, partition_of_key

__all__ = ["BatchingWriter", "MAX_RECORD_BYTES", "PartitionSink"]

MAX_RECORD_BYTES = 64 << 20
"""Largest record: value, key and headers."""

_logger = logging.getLogger(__name__)

# Large enough that the cost of a batch is small, small enough that a reader gets it in one read.
_BATCH_BYTES = 512 << 10
_BATCH_RECORDS = 8192
_Part = tuple[Sequence[NewRecord], int]
"""Records that were appended together, and their bytes."""


class PartitionSink(Protocol):
    """Where the records of one partition are written. Used by one thread at a time."""

    def write(self, records: Sequence[NewRecord]) -> None:
        """Write a batch. Raises `StorageError` or `UnavailableError`."""

    def sync(self) -> None:
        """Return when all that was written is stored."""

    def tidy(self) -> None:
        """Do what is due from time to time. Called after writing, and about once a second."""

    def close(self, *, clean: bool) -> None:
        """Release the partition. `clean`: no call has failed."""


class BatchingWriter:
    """Appends to the partitions that it was made for. Made by `FolderStream.writer` and `RedisStream.writer`.

    After a `StorageError` or `UnavailableError` it is of no use any more: what was appended since the last `flush` may be stored
    or not. Make a new writer, and see with `Stream.last` what was stored.

    Example:
        >>> import tempfile
        >>> from monolith.streams import open_stream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stream = open_stream(f"{folder}/events", partitions=2)
        ...     with stream.writer() as writer:
        ...         writer.append(b"hello", key=b"user 7")
        ...         writer.flush()
        ...     sum(stream.first_offset_at(2**60).values())
        1
    """

    def __init__(self, partitions: Mapping[int, PartitionSink], *, linger_secs: float, max_pending_bytes: int) -> None:
        self._partitions = dict(partitions)
        self._numbers = list(partitions)
        self._linger_secs, self._max_pending_bytes = linger_secs, max_pending_bytes
        self._pending: dict[int, deque[_Part]] = {number: deque() for number in partitions}
        self._next = 0
        self._appended = self._written = 0
        self._idle = False
        self._changed, self._done = threading.Event(), threading.Condition()
        self._flushes_wanted = self._flushes_done = 0
        self._closing = False
        self._error: StorageError | UnavailableError | None = None
        self._bound = ProcessBound("the writer of a stream")
        self._at_exit = weakref.finalize(self, _warn_of_unwritten, self._pending, self._bound)
        self._thread = threading.Thread(target=self._run, name="monolith-stream-writer", daemon=True)
        self._thread.start()

    def append(
        self,
        value: bytes,
        *,
        partition: int | None = None,
        key: bytes | None = None,
        timestamp: int | None = None,
        headers: Headers = (),
    ) -> None:
        """As of every writer."""
        if timestamp is None:
            timestamp = time.time_ns() // 1_000_000
        pending = self._pending_of(self._choose(key) if partition is None else partition)
        record = (value, key, timestamp, headers)
        size = _core.record_sizes((record,))[0]
        _require_fitting(size)
        self._add(pending, (record,), size)

    def extend(self, records: Sequence[NewRecord], *, partition: int) -> None:
        """As of every writer."""
        pending = self._pending_of(partition)
        sizes = _core.record_sizes(records)
        _require_fitting(max(sizes, default=0))
        start = size = 0
        for number, own in enumerate(sizes, 1):
            size += own
            if size >= _BATCH_BYTES or number - start >= _BATCH_RECORDS or number == len(sizes):
                self._add(pending, records[start:number], size)
                start, size = number, 0

    def _add(self, pending: deque[_Part], records: Sequence[NewRecord], size: int) -> None:
        if self._appended - self._written > self._max_pending_bytes or self._error is not None or self._closing:
            self._wait_for_capacity()
        pending.append((records, size))
        # A record without a value takes memory, too.
        self._appended += size + 100 * len(records)
        if self._idle:
            self._changed.set()

    def flush(self, timeout: float | None = None) -> None:
        """As of every writer."""
        self._bound.require()
        with self._done:
            self._raise_error()
            if self._closing:
                raise InvalidArgumentError("flush: the writer is closed")
            self._flushes_wanted += 1
            mine = self._flushes_wanted
            self._changed.set()
            self._done.wait_for(lambda: self._flushes_done >= mine or self._error is not None, timeout)
            self._raise_error()
            if self._flushes_done < mine:
                raise DeadlineExceededError(f"flush: the records were not on disk within {timeout} seconds")

    def close(self) -> None:
        """As of every writer. Calling it twice is harmless."""
        if self._closing:
            return
        failed_before = self._error is not None
        try:
            if not failed_before and self._bound.is_here:
                self.flush()
        finally:
            self._closing = True
            self._changed.set()
            if self._bound.is_here:
                self._thread.join()
            for partition in self._partitions.values():
                partition.close(clean=self._error is None)
            self._at_exit.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _choose(self, key: bytes | None) -> int:
        if key is not None:
            return partition_of_key(key, self._numbers)
        self._next = (self._next + 1) % len(self._numbers)
        return self._numbers[self._next]

    def _pending_of(self, partition: int) -> deque[_Part]:
        pending = self._pending.get(partition)
        if pending is None:
            raise InvalidArgumentError(
                "partition: expected one that this writer was made for, "
                f"{', '.join(map(str, self._numbers))}, got {partition}"
            )
        return pending

    def _wait_for_capacity(self) -> None:
        self._bound.require()
        if self._closing:
            raise InvalidArgumentError("append: the writer is closed")
        with self._done:
            self._changed.set()
            self._done.wait_for(
                lambda: self._appended - self._written <= self._max_pending_bytes or self._error is not None
            )
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error

    def _run(self) -> None:
        """Write what was appended, until `close`."""
        while not (self._closing and not self._any_pending()):
            self._wait_for_work()
            wanted = self._flushes_wanted
            try:
                while self._any_pending():
                    self._write_pending()
                for partition in self._partitions.values():
                    partition.tidy()
                    if wanted > self._flushes_done:
                        partition.sync()
            except (StorageError, UnavailableError) as error:
                self._fail(error)
                return
            except BaseException as error:
                self._fail(StorageError(f"the thread that writes a stream failed: {error!r}"))
                raise
            with self._done:
                self._flushes_done = wanted
                self._done.notify_all()

    def _fail(self, error: StorageError | UnavailableError) -> None:
        count = _count(self._pending)
        with self._done:
            self._error = type(error)(f"{error}; {count:,} records that were appended are not written")
            self._done.notify_all()

    def _wait_for_work(self) -> None:
        self._changed.clear()
        self._idle = True
        # Looked at again after `_idle` was set: a record appended before has not set `_changed`.
        if not self._any_pending() and self._flushes_wanted == self._flushes_done and not self._closing:
            self._changed.wait(1.0)
        self._idle = False
        if self._flushes_wanted == self._flushes_done and not self._closing and self._any_pending():
            # More may come at once, and a batch costs as much as many records.
            self._changed.clear()
            self._changed.wait(self._linger_secs)

    def _any_pending(self) -> bool:
        return any(self._pending.values())

    def _write_pending(self) -> None:
        for number, pending in self._pending.items():
            batch, size = list[NewRecord](), 0
            while pending and size < _BATCH_BYTES and len(batch) < _BATCH_RECORDS:
                records, own = pending.popleft()
                batch += records
                size += own
            if not batch:
                continue
            try:
                self._partitions[number].write(batch)
            except (StorageError, UnavailableError):
                pending.appendleft((batch, size))
                raise
            with self._done:
                self._written += size + 100 * len(batch)
                self._done.notify_all()


def _require_fitting(size: int) -> None:
    if size > MAX_RECORD_BYTES:
        raise InvalidArgumentError(
            f"value: expected a record of at most {MAX_RECORD_BYTES:,} bytes with its key and headers, got {size:,}"
        )


def _count(pending: Mapping[int, deque[_Part]]) -> int:
    return sum(len(records) for waiting in pending.values() for records, _ in waiting)


def _warn_of_unwritten(pending: Mapping[int, deque[_Part]], bound: ProcessBound) -> None:
    """Called when the process ends and the writer was not closed."""
    count = _count(pending)
    if count and bound.is_here:
        _logger.warning("%d records that were appended are not written: the writer of a stream was not closed", count)
