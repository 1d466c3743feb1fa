"""`MemoryLimit`: the memory of a server, over tables, dense parameters, positions of workers, coordination and frames."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable

from monolith.errors import MemoryLimitError
from monolith.transport.calls import FrameMemory

__all__ = ["MemoryLimit"]

FRAMES_SHARE = 16
"""One part in so many of the limit is reserved for frames, so that a server with full tables still answers."""
FRAMES_WITHOUT_LIMIT = 2**30
"""Bytes of frames in memory on a server without a limit."""
HUGE_PAGE = 2**21
"""Unit in which a table allocates memory once it has this much."""
WORKING_BYTES = 2**23
"""Memory of a growing table in addition to its rows: blocks of its index, and scratch memory of a call."""


class MemoryLimit:
    """The memory that a server uses, as reported by its parts, and its limit. None: no limit.

    Example:
        >>> memory = MemoryLimit(1000)
        >>> memory.count("tables", lambda: 700)
        >>> memory.require_memory(200)
        >>> memory.require_memory(300)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        monolith.errors.MemoryLimitError: the server holds 700 bytes (tables 700) and keeps 62 for frames; up to 300 more would...
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._sizes: dict[str, Callable[[], int]] = {}
        if limit is None:
            self.frames = FrameMemory(FRAMES_WITHOUT_LIMIT)
            """Frames that are being received, processed or sent."""
        else:
            self.frames = FrameMemory(limit // FRAMES_SHARE, lambda: limit - self.used)

    @property
    def used(self) -> int:
        """Bytes in use, without frames."""
        return sum(size() for size in self._sizes.values())

    @property
    def limit(self) -> int | None:
        """The limit that was given."""
        return self._limit

    @property
    def full(self) -> str:
        """Why another row would be refused. Empty if it would not.

        Example:
            >>> MemoryLimit(1000).full, MemoryLimit().full
            ('', '')
        """
        try:
            self.require_memory(1, tables=1)
        except MemoryLimitError as error:
            return str(error)
        return ""

    def count(self, what: str, size: Callable[[], int]) -> None:
        """Add what `size` returns to the memory in use."""
        self._sizes[what] = size

    def require_memory(self, more: int, *, tables: int = 0) -> None:
        """Raise `MemoryLimitError` unless `more` bytes fit below the limit. `tables`: how many tables would grow."""
        _require_addresses(more, tables)
        if self._limit is None:
            return
        parts = {what: size() for what, size in self._sizes.items()}
        used, frames = sum(parts.values()), max(self.frames.in_use, self._limit // FRAMES_SHARE)
        if used + more >= HUGE_PAGE:
            # Each table may be about to allocate another unit.
            more += tables * HUGE_PAGE
        if used + frames + more > self._limit:
            held = ", ".join(f"{what} {size:,}" for what, size in parts.items() if size)
            raise MemoryLimitError(
                f"the server holds {used:,} bytes ({held or 'nothing'}) and keeps {frames:,} for frames; up to {more:,} more "
                f"would not fit below the limit of {self._limit:,}; let rows expire, add servers, or raise --memory-limit"
            )


def _require_addresses(more: int, tables: int) -> None:
    """Raise `MemoryLimitError` if a limit of the process (`ulimit -v`) leaves too little, before a table is half changed."""
    if not tables or resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    try:
        mmap.mmap(-1, 2 * more + tables * WORKING_BYTES).close()
    except OSError as error:
        raise MemoryLimitError(
            f"up to {more:,} more bytes in {tables} tables: the system does not give them, {error.strerror}; raise ulimit -v, "
            "let rows expire, or add servers"
        ) from None
