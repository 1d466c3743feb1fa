"""The segments of a partition as files: which there are (`SegmentList`), and one of them open for reading (`SegmentFile`)."""

from __future__ import annotations

import errno
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from monolith.errors import CorruptFileError, StorageError, StreamGapError
from monolith.streams.folder.format import (
    BATCH_HEADER,
    SEGMENT_HEADER,
    SEGMENT_OFFSETS,
    BatchHeader,
    StreamSegmentHeader,
    stream_segment_name,
)
from monolith.streams.folder.index import SegmentIndex

__all__ = [
    "SegmentFile",
    "SegmentList",
    "SegmentRemovedError",
    "boot_id",
    "highest_offset",
    "partition_bounds",
    "segment_of",
]

_NAME = re.compile(r"(\d{20})\.segment")
LAST_OFFSET = 2**63 - 1
"""No record has this offset. A batch before it is the last one that the index knows."""
# The time of a folder has the resolution of the kernel's clock, so two changes may have the same.
_SURE_AFTER_NS = 100_000_000


class SegmentRemovedError(Exception):
    """A segment was removed by retention between listing and opening it."""


@cache
def boot_id() -> bytes:
    """Return 16 bytes that identify this start of the operating system."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        # Every opening counts as after a power cut then, which costs nothing but a step in the offsets.
        return os.urandom(16)


class SegmentList:
    """The first offsets of the segments of a partition, listed again when the folder has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changed_ns, self._bases = -1, list[int]()

    def bases(self) -> list[int]:
        """Return them, sorted."""
        try:
            changed_ns = self.folder.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                self._bases = sorted(
                    int(found[1]) for path in self.folder.iterdir() if (found := _NAME.fullmatch(path.name))
                )
                self._changed_ns = changed_ns if time.time_ns() - changed_ns > _SURE_AFTER_NS else -1
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be listed: {error.strerror}") from error
        return self._bases


class SegmentFile:
    """A segment open for reading. It is closed when it is garbage-collected.

    It is not mapped into memory, so a disk error is an exception and not a signal.
    """

    _descriptor = -1

    def __init__(self, folder: Path, base: int) -> None:
        self.path, self.base = folder / stream_segment_name(base), base
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise SegmentRemovedError from None
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be opened: {error.strerror}") from error
        self.header = StreamSegmentHeader.unpack(self.read(0, SEGMENT_HEADER), str(self.path))
        if self.header.base != base:
            raise CorruptFileError(f"{self.path}: its header has the first offset {self.header.base}; it was renamed")

    def size(self) -> int:
        """Return the size that the file has now."""
        return os.fstat(self._descriptor).st_size

    def read(self, at: int, size: int) -> bytes:
        """Return at most `size` bytes from byte `at` on, fewer at the end of the file."""
        try:
            data = os.pread(self._descriptor, size, at)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror or errno.errorcode}") from error
        return data

    def batch_at(self, at: int) -> BatchHeader | None:
        """Return the header of the batch at byte `at`, or None if there is none."""
        return BatchHeader.unpack(self.read(at, BATCH_HEADER))

    def walk(self, at: int = SEGMENT_HEADER) -> Iterator[tuple[int, BatchHeader]]:
        """Yield position and header of the batches from the one at byte `at` on, as far as they are complete."""
        size = self.size()
        while (header := self.batch_at(at)) is not None and at + header.size <= size:
            yield at, header
            at += header.size

    def place_of(self, offset: int) -> int:
        """Return the position of a batch at or before the one that has `offset`, near it."""
        return self._first_sound(SegmentIndex(self.path).before_offset(offset))

    def place_before(self, timestamp: int) -> int:
        """Return the position of a batch before which there is no record at or after `timestamp`, near the first such."""
        return self._first_sound(SegmentIndex(self.path).before_time(timestamp))

    def _first_sound(self, places: list[tuple[int, int]]) -> int:
        size = self.size()
        for offset, at in places:
            header = self.batch_at(at)
            # An entry is there before its batch is. From one that is not complete, `walk` would not see those before it either.
            if header is not None and header.first_offset == offset and at + header.size <= size:
                return at
        return SEGMENT_HEADER

    @property
    def may_have_lost_its_end(self) -> bool:
        """Whether the operating system was started again since it was made."""
        return self.header.boot != boot_id()

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def segment_of(segments: SegmentList, offset: int, name: str) -> SegmentFile | None:
    """Return the segment that has `offset`, or where writing would give it. None if there is no segment yet.

    Raises:
        StreamGapError: the record was removed by retention.
    """
    while bases := segments.bases():
        number = max(bisect_right(bases, offset) - 1, 0)
        try:
            found = SegmentFile(segments.folder, bases[number])
        except SegmentRemovedError:
            segments = SegmentList(segments.folder)
            continue
        if offset < found.header.previous_end:
            raise StreamGapError(
                f"{name}: has no record {offset:,} any more: its oldest is {found.base:,}, older ones were removed by retention. "
                f"Start at the oldest, or give the stream a larger retention than the reader may be behind"
            )
        return found
    return None


def partition_bounds(segments: SegmentList) -> tuple[int, int]:
    """Return the offset of the oldest record of a partition, and of its next one."""
    while bases := segments.bases():
        try:
            last = SegmentFile(segments.folder, bases[-1])
        except SegmentRemovedError:
            segments = SegmentList(segments.folder)
            continue
        end = last.base
        for _, header in last.walk(last.place_of(LAST_OFFSET)):
            end = header.end_offset
        return bases[0], end
    return 0, 0


def highest_offset(segment: SegmentFile) -> int:
    """Return the offset that is larger than every one that a record of the segment may have had."""
    return segment.base + SEGMENT_OFFSETS
