"""`PartitionWriter`: the files of one partition as its only writer sees them, and what it finds of a writer that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from monolith.durable import write_durably
from monolith.errors import CorruptFileError, StorageError
from monolith.process_bound import let_go_in_children
from monolith.streams.folder.format import (
    BATCH_HEADER,
    SEGMENT_HEADER,
    SEGMENT_OFFSETS,
    BatchHeader,
    StreamSegmentHeader,
    closing_mark,
    encode_batch,
    stream_segment_name,
)
from monolith.streams.folder.index import IndexWriter, index_path
from monolith.streams.folder.segments import LAST_OFFSET, SegmentFile, SegmentList, boot_id, highest_offset
from monolith.streams.folder.settings import FolderSettings
from monolith.streams.stream import NewRecord

__all__ = ["PartitionWriter"]

_logger = logging.getLogger(__name__)

_LOCK = "writer.lock"
_TIDY_SECS = 5.0


class PartitionWriter:
    """Writes batches into the newest segment of a partition, and begins and removes segments. Used by one thread at a time."""

    _lock = -1
    _descriptor = -1

    def __init__(self, folder: Path, stream: bytes, settings: FolderSettings) -> None:
        self._folder, self._stream, self._settings = folder, stream, settings
        self._segments = SegmentList(folder)
        self._base = self._end = 0
        self._size = self._durable = 0
        self._begun = self._tidied = time.monotonic()
        self._lock = _locked(folder)
        let_go_in_children(self)
        try:
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            self._continue()
        except OSError as error:
            self.close(clean=False)
            raise error if isinstance(error, StorageError) else self._refused("opened", error) from error
        except BaseException:
            self.close(clean=False)
            raise

    def write(self, records: Sequence[NewRecord]) -> None:
        """Append a batch. It is readable when this returns, as a whole. Raises `StorageError` if it is not written at all."""
        full = self._end + len(records) > self._base + SEGMENT_OFFSETS
        if full or self._size >= self._settings.segment_bytes or self._descriptor < 0:
            self._begin(max(self._end, 0), self._end)
        data = encode_batch(records, self._end, self._durable)
        self._index.add(self._end, self._size, max(record[2] for record in records))
        self._append(data)
        self._end += len(records)

    def sync(self) -> None:
        """Return when all that was written is on disk."""
        if self._durable == self._size or self._descriptor < 0:
            return
        if self._settings.fsync:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise self._refused("brought to disk", error) from error
        self._durable = self._size

    def tidy(self) -> None:
        """Remove segments that are beyond the retention, a few seconds after the last time or later."""
        if time.monotonic() - self._tidied < _TIDY_SECS:
            return
        self._tidied = time.monotonic()
        secs = self._settings.retention_secs
        if secs is not None and self._end > self._base and self._tidied - self._begun > secs / 4:
            # Only whole segments are removed, so a slow stream needs new ones by time.
            self._begin(self._end, self._end)
        self._remove_old()

    def close(self, *, clean: bool) -> None:
        """Release the partition. `clean`: all is well, and what was written was synced. Calling it twice is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if descriptor >= 0 and clean and self._durable == self._size and self._lock >= 0:
                self._descriptor = descriptor
                self._leave_mark()
                self._descriptor = -1
        finally:
            self._descriptor = -1
            if descriptor >= 0:
                os.close(descriptor)
            lock, self._lock = self._lock, -1
            if lock >= 0:
                os.close(lock)

    def let_go(self) -> None:
        """Close the files in a forked child, which must not hold the lock."""
        self.close(clean=False)

    def __del__(self) -> None:
        self.close(clean=False)

    def _leave_mark(self) -> None:
        last = os.pread(self._descriptor, BATCH_HEADER, max(self._size - BATCH_HEADER, 0))
        header = BatchHeader.unpack(last)
        if header is not None and header.closed:
            return
        try:
            self._append(closing_mark(self._end, self._size))
            self.sync()
        except StorageError as error:
            # Nothing is lost: the next writer checks the segment as after a crash.
            _logger.warning("%s; the records before are stored", error)

    def _append(self, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:] if done else data, self._size + done)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise self._refused("written", error) from error
        self._size += len(data)

    def _begin(self, base: int, previous_end: int) -> None:
        """Begin a segment. The one before is on disk as a whole."""
        self.sync()
        header = StreamSegmentHeader(stream=self._stream, boot=boot_id(), base=base, previous_end=previous_end)
        path = self._folder / stream_segment_name(base)
        try:
            if self._settings.fsync:
                write_durably(path, header.pack())
            else:
                temporary = path.with_name(f".{path.name}.tmp")
                temporary.write_bytes(header.pack())
                temporary.replace(path)
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused("begun", error, path) from error
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._base, self._end = descriptor, base, base
        self._size = self._durable = SEGMENT_HEADER
        self._begun = time.monotonic()
        self._index = IndexWriter(path, position=SEGMENT_HEADER)
        self._remove_old()

    def _continue(self) -> None:
        """Continue the newest segment, or begin one if a power cut may have taken its end."""
        bases = self._segments.bases()
        if not bases:
            self._begin(0, 0)
            return
        segment = SegmentFile(self._folder, bases[-1])
        if segment.header.stream != self._stream:
            raise CorruptFileError(f"{segment.path}: belongs to another stream; it was copied here")
        self._base = segment.base
        self._descriptor = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        closed = self._closing_mark_of(segment)
        if closed is not None:
            self._size = self._durable = segment.size()
            self._end = closed.end_offset
            if segment.may_have_lost_its_end:
                self._begin(self._end, self._end)
            else:
                self._index = _index_of(segment)
            return
        damaged = self._cut_tail(segment)
        if damaged or segment.may_have_lost_its_end:
            _logger.warning(
                "%s: the system or its disk failed while this was written: records from %d on that had not been flushed may be "
                "lost. Writing continues at offset %d, so that none is given twice",
                segment.path,
                self._end,
                highest_offset(segment),
            )
            self._begin(highest_offset(segment), self._end)
        else:
            self._index = _index_of(segment)

    def _closing_mark_of(self, segment: SegmentFile) -> BatchHeader | None:
        at = segment.size() - BATCH_HEADER
        mark = segment.batch_at(at) if at >= SEGMENT_HEADER else None
        return mark if mark is not None and mark.closed and mark.durable == at else None

    def _cut_tail(self, segment: SegmentFile) -> bool:
        """Cut off what is behind the last complete batch. Returns whether that is more than the batch of a killed writer."""
        at, self._end = SEGMENT_HEADER, segment.base
        for position, header in segment.walk():
            if not header.body_is_sound(segment.read(position, header.size)):
                break
            at, self._end = position + header.size, header.end_offset
        size = segment.size()
        tail = segment.read(at, size - at)
        self._refuse_if_it_was_on_disk(segment, at, tail)
        cut = BatchHeader.unpack(tail)
        short = len(tail) < BATCH_HEADER or (cut is not None and cut.size > len(tail))
        try:
            if tail:
                _logger.warning(
                    "%s: cut off %d bytes after byte %d, which a writer that ended early had not written completely",
                    segment.path,
                    len(tail),
                    at,
                )
                os.ftruncate(self._descriptor, at)
            # Written again: if its writer ended because bringing this to disk failed, the system takes it for clean.
            before = segment.read(SEGMENT_HEADER, at - SEGMENT_HEADER)
            done = 0
            while done < len(before):
                done += os.pwrite(self._descriptor, before[done:], SEGMENT_HEADER + done)
            if self._settings.fsync:
                os.fsync(self._descriptor)
        except OSError as error:
            raise self._refused("repaired", error) from error
        self._size = self._durable = at
        return bool(tail) and not short

    def _refuse_if_it_was_on_disk(self, segment: SegmentFile, at: int, tail: bytes) -> None:
        """Raise if a later batch says that the damaged one was on disk: then it was damaged since, and is not cut off."""
        found = tail.find(b"MSB1", 1)
        while found >= 0:
            later = BatchHeader.unpack(tail, found)
            if later is not None and later.durable > at:
                raise CorruptFileError(
                    f"{segment.path}: the batch at byte {at} has a wrong checksum, and had been on disk before; the file is "
                    f"damaged. Restore it, or move it away to lose its records after {self._end - 1:,}"
                )
            found = tail.find(b"MSB1", found + 1)

    def _remove_old(self) -> None:
        settings, bases = self._settings, self._segments.bases()[:-1]
        if settings.retention_bytes is None and settings.retention_secs is None:
            return
        kept = self._size
        for base in reversed(bases):
            path = self._folder / stream_segment_name(base)
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                kept += found.st_size
                too_many = settings.retention_bytes is not None and kept > settings.retention_bytes
                too_old = settings.retention_secs is not None and time.time() - found.st_mtime > settings.retention_secs
                if too_many or too_old:
                    self._remove(base, bases)
                    return

    def _remove(self, base: int, bases: Sequence[int]) -> None:
        """Remove the segment `base` and all before it, the oldest first."""
        gone = [each for each in bases if each <= base]
        try:
            for each in gone:
                path = self._folder / stream_segment_name(each)
                path.unlink(missing_ok=True)
                index_path(path).unlink(missing_ok=True)
        except OSError as error:
            raise self._refused("removed", error) from error
        _logger.info("%s: retention removed %d segments, up to the one of offset %d", self._folder, len(gone), base)

    def _refused(self, what: str, error: OSError, path: Path | None = None) -> StorageError:
        where = path or self._folder / stream_segment_name(self._base)
        return StorageError(f"{where}: cannot be {what}: {error.strerror or error}")


def _index_of(segment: SegmentFile) -> IndexWriter:
    """Return the index of a segment that is continued."""
    newest, end, indexed = -1, SEGMENT_HEADER, segment.place_of(LAST_OFFSET)
    for at, header in segment.walk():
        newest, end = max(newest, header.max_timestamp), at + header.size
    return IndexWriter(segment.path, newest=newest, position=min(indexed, end))


def _locked(folder: Path) -> int:
    """Return the descriptor of the lock of a partition, which ends with the process."""
    path = folder / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 4096, 0).decode(errors="replace").strip()
        os.close(lock)
        raise StorageError(
            f"{folder}: another writer has this partition: {holder or 'unknown'}. Close it, give each writer partitions of its "
            f"own with writer(partitions=[...]), or add partitions ({error.strerror})"
        ) from None
    own = {"host": socket.gethostname(), "process": os.getpid(), "program": Path(sys.argv[0]).name or "python"}
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(own).encode() + b"\n", 0)
    except OSError as error:
        # The lock is held all the same. Only another writer would not learn by whom.
        _logger.warning("%s: the holder cannot be noted: %s", path, error.strerror)
    return lock
