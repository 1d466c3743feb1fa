"""Where a log begins and ends: the last segment that was committed, and the segments that retention removed.

Every segment names its parent, so the chain shows that a segment in the middle is missing, but not that the last ones are. The
file `head` names the last one. It is written after the segment is durable and before the commit is acknowledged: a head that is
ahead of the files is a loss, and a head that is behind them is a crash between the two writes.

The head is synced at most once a second, because a sync for each commit would make commits a fifth to a third slower. A process
that is killed loses nothing by that. After a power cut the head may be a second behind, and then only a segment of that second
that is also lost goes unnoticed. The file has two records of one disk sector each. A sync closes one, and the next writes go to
the other, so a torn write leaves the record that was synced last.

The file `pruned.json` lists the segments that retention removed. Any other missing segment is lost.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from monolith import _core
from monolith.config import Config
from monolith.durable import write_durably
from monolith.errors import ConfigError, CorruptFileError, StorageError

__all__ = ["HEAD", "HeadWriter", "LogHead", "PrunedNumbers", "add_pruned", "read_head", "read_pruned"]

HEAD = "head"
"""Name of the file with the last segment, in the folder of the log."""
PRUNED = "pruned.json"
"""Name of the file with the removed segments, in the folder of the log."""

SYNC_SECONDS = 1.0
"""Between two syncs of the head."""

_SECTOR = 512
_RECORD = struct.Struct("<8sQI")  # magic, sequence number, the segment's checksum
_SEAL = struct.Struct("<I")
_MAGIC = b"MONOHEAD"

_Sequence = Annotated[int, Field(ge=1, lt=2**63)]


class LogHead(NamedTuple):
    """The last segment that was committed."""

    sequence: int
    checksum: int


def read_head(folder: Path) -> LogHead | None:
    """Read the last segment committed to the log in `folder`. Returns None if there is no head, or nothing was committed.

    Raises:
        CorruptFileError: The file was altered.
        StorageError: The operating system refuses to read it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with HeadWriter(Path(folder)) as head:
        ...         head.write(LogHead(7, 1234))
        ...     read_head(Path(folder))
        LogHead(sequence=7, checksum=1234)
    """
    path = folder / HEAD
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    return max((head for head in _records(data, path) if head is not None), default=None)


class HeadWriter:
    """Writes the head of the log in `folder`. Only the holder of the log's lock may have one. `clock` is in seconds."""

    _descriptor = -1

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / HEAD
        self._clock = clock
        self._synced = float("-inf")
        self._dirty = False
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            data = os.pread(self._descriptor, 2 * _SECTOR, 0)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be opened: {error.strerror}") from error
        first, second = _records(data, self._path)
        self._slot = int(second is None or (first is not None and first > second))
        self.last = max((head for head in (first, second) if head is not None), default=None)
        """What is written now."""

    def write(self, head: LogHead) -> None:
        """Replace the older of the two records, and sync it if the last sync was a second ago."""
        body = _RECORD.pack(_MAGIC, *head)
        record = (body + _SEAL.pack(_core.crc32c(body))).ljust(_SECTOR, b"\0")
        if os.pwrite(self._descriptor, record, self._slot * _SECTOR) != _SECTOR:
            raise StorageError(f"{self._path}: the disk is full")
        self.last, self._dirty = head, True
        if self._clock() - self._synced >= SYNC_SECONDS:
            self._sync()

    def close(self) -> None:
        """Sync and close the file. Calling it twice is harmless."""
        if self._descriptor < 0:
            return
        try:
            if self._dirty:
                self._sync()
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be synced: {error.strerror}") from error
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _sync(self) -> None:
        os.fdatasync(self._descriptor)
        self._synced, self._dirty = self._clock(), False
        self._slot = 1 - self._slot

    def __enter__(self) -> HeadWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _records(data: bytes, path: Path) -> tuple[LogHead | None, LogHead | None]:
    """Decode both records. None stands for one that was never written, or was being written during a power cut."""
    slots = data[:_SECTOR], data[_SECTOR : 2 * _SECTOR]
    first, second = map(_record, slots)
    if first is None and second is None and any(data):
        raise CorruptFileError(
            f"{path}: was altered, so the last segment is unknown. Put the file back, or remove it if you are sure that no "
            "segment is missing"
        )
    return first, second


def _record(slot: bytes) -> LogHead | None:
    body = slot[: _RECORD.size]
    if len(slot) < _RECORD.size + _SEAL.size or _SEAL.unpack_from(slot, _RECORD.size)[0] != _core.crc32c(body):
        return None
    magic, sequence, checksum = _RECORD.unpack(body)
    return LogHead(sequence, checksum) if magic == _MAGIC else None


class _Pruned(Config):
    format: Literal["monolith-log-pruned"] = "monolith-log-pruned"
    version: Literal[1] = 1
    ranges: tuple[tuple[_Sequence, _Sequence], ...] = ()
    """First and last sequence number."""


class PrunedNumbers:
    """Sequence numbers in ranges: `number in numbers`."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges = tuple(ranges)

    def __contains__(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self._ranges)

    def with_more(self, numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return the ranges of these numbers and of `numbers`."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted([*self._ranges, *((number, number) for number in numbers)]):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        return tuple(joined)


def read_pruned(folder: Path) -> PrunedNumbers:
    """Read the sequence numbers that retention has removed from the log in `folder`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     add_pruned(Path(folder), [1, 2, 3, 7])
        ...     [number for number in range(9) if number in read_pruned(Path(folder))]
        [1, 2, 3, 7]
    """
    path = folder / PRUNED
    try:
        return PrunedNumbers(_Pruned.from_json(path.read_text()).ranges)
    except FileNotFoundError:
        return PrunedNumbers()
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path}: {error}") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def add_pruned(folder: Path, numbers: Collection[int]) -> None:
    """Record durably that these segments are about to be removed."""
    record = _Pruned(ranges=read_pruned(folder).with_more(numbers))
    try:
        write_durably(folder / PRUNED, record.model_dump_json().encode())
    except OSError as error:
        raise StorageError(f"{folder / PRUNED}: cannot be written: {error.strerror}") from error
