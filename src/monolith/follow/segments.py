"""What a feed publishes: segments of changed rows, of which the newest are kept for followers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from monolith.table import EmbeddingTable
from monolith.table.buckets import bucket_of

__all__ = ["FeedSegment", "KeptSegments", "TablePart", "changed_rows"]

MAX_SEGMENTS = 4096
"""Segments that are kept at most, however small."""
MAX_TABLES = 4096
"""Tables of all segments of one answer together, at most: a frame has a limited number of arrays."""


@dataclass(frozen=True, kw_only=True)
class TablePart:
    """What a segment has of one table."""

    name: str
    ids: np.ndarray
    """int64 [n]."""
    values: np.ndarray
    """float32 [n, dim]: stored weights."""
    erased: np.ndarray
    """int64 [m]: ids without a row."""
    event_time: int
    """The newest event time of these rows."""
    scales: tuple[float, ...]
    """The scale of one-bit reads, one per segment of a row."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.ids.nbytes + self.values.nbytes + self.erased.nbytes

    def of_buckets(self, mask: np.ndarray) -> TablePart:
        """Return what it has of some buckets, bool [NUM_BUCKETS]."""
        mine = mask[bucket_of(self.ids)]
        erased = self.erased[mask[bucket_of(self.erased)]]
        return replace(self, ids=self.ids[mine], values=self.values[mine], erased=erased)


@dataclass(frozen=True, kw_only=True)
class FeedSegment:
    """The rows that changed between two moments, as they were at the second or a little later."""

    sequence: int
    step: int
    event_time: int
    begun: float
    """Seconds of the feed's clock: everything that was written before is in this segment or an earlier one."""
    gained: tuple[tuple[int, int], ...]
    """Ranges of buckets that the writer owns since this segment. A follower reads all their rows."""
    parts: tuple[TablePart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(part.nbytes for part in self.parts)


class KeptSegments:
    """The newest segments, in order. Not thread-safe.

    Args:
        max_bytes: Memory of their arrays. The newest is always kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._segments: deque[FeedSegment] = deque()
        self.nbytes = 0
        """Memory of the arrays."""

    @property
    def first(self) -> int:
        """Number of the oldest. 0 if there is none."""
        return self._segments[0].sequence if self._segments else 0

    def add(self, segment: FeedSegment) -> None:
        """Keep the next segment, and drop the oldest ones that are too many."""
        self._segments.append(segment)
        self.nbytes += segment.nbytes
        while len(self._segments) > 1 and (self.nbytes > self._max_bytes or len(self._segments) > MAX_SEGMENTS):
            self.nbytes -= self._segments.popleft().nbytes

    def after(self, since: int, max_bytes: int) -> list[FeedSegment] | None:
        """Return those after number `since`, oldest first, at least one if there is any. None if one is no longer kept."""
        newest = self._segments[-1].sequence if self._segments else 0
        if not 0 <= since <= newest or (since < newest and self.first > since + 1):
            return None
        found: list[FeedSegment] = []
        size = parts = 0
        for segment in self._segments:
            if segment.sequence <= since:
                continue
            size += segment.nbytes
            parts += len(segment.parts)
            if found and (size > max_bytes or parts > MAX_TABLES):
                break
            found.append(segment)
        return found

    def clear(self) -> None:
        """Drop all."""
        self._segments.clear()
        self.nbytes = 0


def changed_rows(name: str, table: EmbeddingTable) -> Iterator[TablePart]:
    """Yield what has changed in a table since the last call, as it is now, in parts of some megabytes."""
    for piece in table.read_feed():
        yield TablePart(
            name=name,
            ids=piece.ids,
            values=piece.values,
            erased=piece.erased,
            event_time=int(piece.times.max()) if len(piece.times) else 0,
            scales=tuple(table.state().hashnet_scales) if len(piece.ids) else (),
        )
