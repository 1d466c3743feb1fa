"""The index of a segment: where to begin looking for an offset or a time. It is a hint, and not needed to read the segment.

An entry has the first offset of a batch, its position, and the newest timestamp of all batches before it in the segment. One is
appended for every 64 KiB, and not brought to disk. An entry with a wrong checksum, or without such a batch, is passed over, so
a damaged index costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import numpy as np

from monolith import _core

__all__ = ["INDEX_INTERVAL_BYTES", "IndexWriter", "SegmentIndex", "index_path"]

INDEX_INTERVAL_BYTES = 64 << 10
"""An entry is written for about so many bytes of a segment."""

_ENTRY = struct.Struct("<qqqII")
_TYPE = np.dtype([("offset", "<i8"), ("position", "<i8"), ("newest", "<i8"), ("crc", "<u4"), ("unused", "<u4")])
_CHECKED = 24


def index_path(segment: Path) -> Path:
    """Return the path of the index of a segment.

    Example:
        >>> index_path(Path("00000000000000000007.segment")).name
        '00000000000000000007.index'
    """
    return segment.with_suffix(".index")


class IndexWriter:
    """Appends to the index of the segment that is being written. Errors of the disk are ignored, as the index is a hint."""

    def __init__(self, segment: Path, *, newest: int = -1, position: int = 0) -> None:
        """`newest`: the newest timestamp that the segment has. `position`: where it continues."""
        self._path, self._newest, self._indexed = index_path(segment), newest, position

    def add(self, offset: int, position: int, newest: int) -> None:
        """Take note of a batch that is about to be written."""
        if position - self._indexed >= INDEX_INTERVAL_BYTES:
            self._indexed = position
            packed = _ENTRY.pack(offset, position, self._newest, 0, 0)[:_CHECKED]
            with contextlib.suppress(OSError), self._path.open("ab") as file:
                # A killed writer may have left a part of an entry.
                os.ftruncate(file.fileno(), file.tell() // _ENTRY.size * _ENTRY.size)
                file.write(packed + struct.pack("<II", _core.crc32c(packed), 0))
        self._newest = max(self._newest, newest)


class SegmentIndex:
    """The index of a segment, as it is when it is read."""

    def __init__(self, segment: Path) -> None:
        try:
            data = index_path(segment).read_bytes()
        except OSError:
            data = b""
        entries = np.frombuffer(data[: len(data) // _ENTRY.size * _ENTRY.size], _TYPE)
        sound = [_core.crc32c(data[at : at + _CHECKED]) for at in range(0, len(entries) * _ENTRY.size, _ENTRY.size)]
        entries = entries[entries["crc"] == np.array(sound, dtype=np.uint32)]
        # Sorted, unless segments were mixed up: then there is no order to search by.
        rising = bool((np.diff(entries["offset"]) >= 0).all() and (np.diff(entries["newest"]) >= 0).all())
        self._entries = entries if rising else entries[:0]

    def before_offset(self, offset: int) -> list[tuple[int, int]]:
        """Return first offset and position of the last batches that begin at or before `offset`, the best first."""
        return self._best(int(np.searchsorted(self._entries["offset"], offset, side="right")))

    def before_time(self, timestamp: int) -> list[tuple[int, int]]:
        """Return first offset and position of batches before which there is no record at or after `timestamp`."""
        return self._best(int(np.searchsorted(self._entries["newest"], timestamp, side="left")))

    def _best(self, count: int) -> list[tuple[int, int]]:
        return [(int(each["offset"]), int(each["position"])) for each in self._entries[max(0, count - 3) : count][::-1]]
