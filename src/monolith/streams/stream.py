"""What a stream is: partitions of records with offsets, as in Kafka (`Stream`, `StreamReader`, `StreamWriter`, `Records`)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

__all__ = [
    "END",
    "Headers",
    "NewRecord",
    "Offset",
    "Records",
    "START",
    "Stream",
    "StreamReader",
    "StreamWriter",
    "partition_of_key",
]

START: Literal["start"] = "start"
"""The offset of the oldest record that a partition still has."""
END: Literal["end"] = "end"
"""The offset of the next record that will be written to a partition."""

Offset = int | Literal["start", "end"]
"""Where reading begins: the offset of the first record wanted, `START` or `END`."""

Headers = tuple[tuple[str, bytes], ...]
"""Names and values that travel with a record, outside of its value."""

NewRecord = tuple[bytes, bytes | None, int, Headers]
"""Value, key, timestamp and headers of a record that is to be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """Consecutive records of one partition, by column: several of these lists per batch cost less than an object per record.

    Offsets rise, but need not be contiguous: a broker leaves gaps where it has removed records or written marks of its own.
    """

    partition: str
    """Name of the partition, such as "clicks/3"."""
    offsets: Sequence[int]
    """Of each record."""
    next_offset: int
    """Where reading continues after these records. Larger than the last of `offsets`."""
    timestamps: Sequence[int]
    """Milliseconds since 1970, as the writer or the broker has set them. -1 if there is none."""
    keys: Sequence[bytes | None]
    """Of each record."""
    values: Sequence[bytes]
    """Of each record. A record without a value, Kafka's tombstone, is empty here."""
    headers: Sequence[Headers] | None = None
    """Of each record. None if no record has any."""

    def __len__(self) -> int:
        return len(self.values)


class StreamReader(Protocol):
    """Reads some partitions of a stream. Used by one thread at a time, except for `wake`."""

    def assign(self, positions: Mapping[str, Offset]) -> None:
        """Read these partitions from these offsets on, and no others.

        Raises:
            InvalidArgumentError: there is no such partition.
            StreamGapError: the stream does not have the offset any more, or never had it.
        """

    def poll(self, max_records: int, timeout: float) -> list[Records]:
        """Return the records that have come, at most `max_records` of them, after at most `timeout` seconds.

        Returns as soon as there is a record, so fewer than `max_records` are common. An empty list means that none came. Every
        partition is served in turn, so a partition with much to read does not starve the others.

        Raises:
            UnavailableError: the stream cannot be reached, and waiting longer is of no use. A broker that restarts is waited for.
            StreamGapError: records that were to be read next have been removed.
        """

    def ends(self) -> dict[str, int]:
        """Return the offset of the next record to be written to each assigned partition, as far as this reader knows it."""

    def commit(self, positions: Mapping[str, int]) -> None:
        """Report how far reading has come, for the tools that monitor the stream. Nothing is read back from there."""

    def wake(self) -> None:
        """Let `poll` return at once, in any thread."""

    def close(self) -> None:
        """Release what the reader holds."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class StreamWriter(Protocol):
    """Appends records to the partitions of a stream. Used by one thread at a time."""

    def append(
        self,
        value: bytes,
        *,
        partition: int | None = None,
        key: bytes | None = None,
        timestamp: int | None = None,
        headers: Headers = (),
    ) -> None:
        """Append one record, or wait while too many are on their way. It is stored when `flush` has returned.

        Args:
            value: the record.
            partition: its number. None: by the hash of `key`, or in turn without a key.
            key: records of one key are in one partition, in the order in which they were written.
            timestamp: milliseconds since 1970. None: now.
            headers: see `Headers`.
        """

    def extend(self, records: Sequence[NewRecord], *, partition: int) -> None:
        """Append several records of one partition. Costs less than `append` for each."""

    def flush(self, timeout: float | None = None) -> None:
        """Return when all records are stored: on disk, or acknowledged by the broker.

        Raises:
            DeadlineExceededError: they were not within `timeout` seconds. They may be stored later.
            StorageError, UnavailableError: some could not be stored. The message says how many.
        """

    def close(self) -> None:
        """Flush, and release what the writer holds."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Stream(Protocol):
    """One or more topics, each with partitions. Make one with `open_stream`."""

    @property
    def url(self) -> str:
        """What `open_stream` was called with, without secrets."""

    def partitions(self) -> list[str]:
        """Return the names of all partitions that there are now, sorted by topic and number. More may be added later."""

    def bounds(self) -> dict[str, tuple[int, int]]:
        """Return, for each partition, the offset of the oldest record that it has and of the next one that will be written."""

    def first_offset_at(self, timestamp: int) -> dict[str, int]:
        """Return, for each partition, the offset of the first record at or after `timestamp`, milliseconds since 1970.

        A partition whose records are all older has its end here.
        """

    def reader(self) -> StreamReader:
        """Return a new reader, which `assign` gives partitions."""

    def writer(self, partitions: Sequence[int] | None = None) -> StreamWriter:
        """Return a new writer of all partitions, or of some. Records without a partition are divided among those.

        A partition of a folder stream has one writer at a time.
        """

    def last(self, partition: str) -> Records | None:
        """Return the last record of a partition, None if it is empty. A writer that continues learns here what was stored."""


def partition_of_key(key: bytes, partitions: Sequence[int]) -> int:
    """Return which of `partitions` has the records of a key. All kinds of streams agree, and so does librdkafka's partitioner.

    Example:
        >>> partition_of_key(b"user 7", range(4)) == partition_of_key(b"user 7", [0, 1, 2, 3])
        True
    """
    return partitions[zlib.crc32(key) % len(partitions)]
