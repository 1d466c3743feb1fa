"""How many bytes of requests and answers a server has in memory at a time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["FrameMemory"]

SMALL = 4096
"""Bytes of a frame that is always taken, a health check for one."""


class FrameMemory:
    """Counts the bytes of frames that are being received, worked on or sent.

    A frame is accepted if it fits in addition to the others, and always if it is small or the only one: what is refused now is
    accepted later.

    Args:
        always: bytes that frames may always take.
        most: returns the bytes that they may take now; called only beyond `always`.

    Example:
        >>> memory = FrameMemory(always=100_000)
        >>> memory.take(80_000), memory.take(30_000), memory.take(100), memory.in_use
        (True, False, True, 80100)
        >>> memory.give_back(80_100)
        >>> memory.take(1_000_000)
        True
    """

    def __init__(self, always: float = math.inf, most: Callable[[], float] | None = None) -> None:
        self._always, self._most = always, most
        self._in_use = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        """The bytes of all frames that were taken and not given back."""
        return self._in_use

    def fits(self, size: int) -> bool:
        """Whether a frame of `size` bytes fits in addition to those in memory."""
        together = self._in_use + size
        if size <= SMALL or not self._in_use or together <= self._always:
            return True
        return self._most is not None and together <= self._most()

    def take(self, size: int) -> bool:
        """Count a frame of `size` bytes until `give_back`. Returns False, and counts nothing, if it does not fit."""
        with self._lock:
            fits = self.fits(size)
            self._in_use += size * fits
            return fits

    @contextmanager
    def lent(self) -> Iterator[Callable[[int], bool]]:
        """`take` for the length of a block. What was taken is given back at its end."""
        taken = 0

        def take(size: int) -> bool:
            nonlocal taken
            fits = self.take(size)
            taken += size * fits
            return fits

        try:
            yield take
        finally:
            self.give_back(taken)

    def give_back(self, size: int) -> None:
        """Forget a frame of `size` bytes."""
        with self._lock:
            self._in_use -= size
