"""`LogHead`: the last segment of a log that was committed, so that its removal is noticed.

Every segment names its parent, so the chain shows that a segment in the middle is missing, but not that the last ones are. The
file `head` names the last one. It is written after the segment is durable and before the commit is acknowledged: a head that is
ahead of the files is a loss, and a head that is behind them is a crash between the two writes.

The record is synced at most once a second: a sync for each commit would make commits a fifth to a third slower. A process that is
killed loses nothing by that. After a power cut the head may be a second behind, and then only a segment of that second that is
also lost goes unnoticed.

The file has two records of one disk sector each. A sync closes one, and the next writes go to the other: a torn write leaves the
one that was synced last.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from monolith import _core
from monolith.errors import CorruptFileError, StorageError

__all__ = ["HEAD", "Head", "HeadWriter", "read_head"]

HEAD = "head"
"""Its name in the folder of the log."""

SYNC_SECONDS = 1.0
"""Between two syncs of the head."""

_SECTOR = 512
_RECORD = struct.Struct("<8sQI")  # magic, sequence number, the segment's checksum
_SEAL = struct.Struct("<I")
_MAGIC = b"MONOHEAD"


class Head(NamedTuple):
    """The last segment that was committed."""

    sequence: int
    checksum: int


def read_head(folder: Path) -> Head | None:
    """The last segment committed to the log in `folder`. None if nothing was, or if there is no such file.

    Raises:
        CorruptFileError: The file was altered.
        StorageError: The operating system refuses to read it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with HeadWriter(Path(folder)) as head:
        ...         head.write(Head(7, 1234))
        ...     read_head(Path(folder))
        Head(sequence=7, checksum=1234)
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

    def write(self, head: Head) -> None:
        """Replace the older of the two records, and sync it if the last sync is a second ago."""
        body = _RECORD.pack(_MAGIC, *head)
        record = (body + _SEAL.pack(_core.crc32c(body))).ljust(_SECTOR, b"\0")
        if os.pwrite(self._descriptor, record, self._slot * _SECTOR) != _SECTOR:
            raise StorageError(f"{self._path}: the disk is full")
        self._dirty = True
        if self._clock() - self._synced >= SYNC_SECONDS:
            self._sync()

    def close(self) -> None:
        """Sync and close the file. Harmless when called twice."""
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


def _records(data: bytes, path: Path) -> tuple[Head | None, Head | None]:
    """Both records. None for one that was never written, or was being written when the power went."""
    slots = data[:_SECTOR], data[_SECTOR : 2 * _SECTOR]
    first, second = map(_record, slots)
    if first is None and second is None and any(data):
        raise CorruptFileError(
            f"{path}: was altered; nobody can tell which segment was the last one. Put the file back, or remove it if you are "
            "sure that no segment is missing"
        )
    return first, second


def _record(slot: bytes) -> Head | None:
    body = slot[: _RECORD.size]
    if len(slot) < _RECORD.size + _SEAL.size or _SEAL.unpack_from(slot, _RECORD.size)[0] != _core.crc32c(body):
        return None
    magic, sequence, checksum = _RECORD.unpack(body)
    return Head(sequence, checksum) if magic == _MAGIC else None
