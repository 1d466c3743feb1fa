"""How much memory a server may take: tables, dense parameters, positions of workers, coordination and frames together."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable

from monolith.errors import MemoryLimitError
from monolith.transport.calls import FrameMemory

__all__ = ["MemoryLimit"]

FRAMES_SHARE = 16
"""The part of a limit, one in so many, that is kept for frames: a server whose tables have taken all else still answers."""
FRAMES_WITHOUT_LIMIT = 2**30
"""Bytes of frames in memory at a time on a server that has no limit."""
HUGE_PAGE = 2**21
"""Steps in which a table takes memory once it has this much."""
WORKING_BYTES = 2**23
"""What a table may need in addition to its rows while it grows: blocks of its index, and scratch memory of a call."""


class MemoryLimit:
    """What a server holds in memory, counted by those who hold it, and what it may hold. `limit` None: whatever there is.

    Example:
        >>> memory = MemoryLimit(1000)
        >>> memory.count("tables", lambda: 700)
        >>> memory.require_room(200)
        >>> memory.require_room(300)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        monolith.errors.MemoryLimitError: the server holds 700 bytes (tables 700) and keeps 62 for frames; up to 300 more would...
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._sizes: dict[str, Callable[[], int]] = {}
        if limit is None:
            self.frames = FrameMemory(FRAMES_WITHOUT_LIMIT)
            """The frames that are being received, worked on or sent."""
        else:
            self.frames = FrameMemory(limit // FRAMES_SHARE, lambda: limit - self.used)

    @property
    def used(self) -> int:
        """Bytes held, frames apart."""
        return sum(size() for size in self._sizes.values())

    def count(self, what: str, size: Callable[[], int]) -> None:
        """Count what `size` returns, from now on."""
        self._sizes[what] = size

    def require_room(self, more: int, *, tables: int = 0) -> None:
        """Raise `MemoryLimitError` unless `more` bytes fit below the limit, in rows of that many tables or elsewhere."""
        _require_addresses(more, tables)
        if self._limit is None:
            return
        parts = {what: size() for what, size in self._sizes.items()}
        used, frames = sum(parts.values()), max(self.frames.in_use, self._limit // FRAMES_SHARE)
        if used + more >= HUGE_PAGE:
            # Each table may be about to take another step.
            more += tables * HUGE_PAGE
        if used + frames + more > self._limit:
            held = ", ".join(f"{what} {size:,}" for what, size in parts.items() if size)
            raise MemoryLimitError(
                f"the server holds {used:,} bytes ({held or 'nothing'}) and keeps {frames:,} for frames; up to {more:,} more "
                f"would not fit below the limit of {self._limit:,}; let rows expire, add servers, or raise --memory-limit"
            )


def _require_addresses(more: int, tables: int) -> None:
    """Raise `MemoryLimitError` if a limit of the process (`ulimit -v`) leaves too little: a table would notice halfway."""
    if not tables or resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    try:
        mmap.mmap(-1, 2 * more + tables * WORKING_BYTES).close()
    except OSError as error:
        raise MemoryLimitError(
            f"up to {more:,} more bytes in {tables} tables: the system does not give them, {error.strerror}; raise ulimit -v, "
            "let rows expire, or add servers"
        ) from None
