"""Work that leaves the memory and the processors to others: a little, then a rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from monolith.errors import InvalidArgumentError

__all__ = ["Pace"]

Piece = TypeVar("Piece")


class Pace:
    """Lets a thread work for `share` of the time, until somebody waits for it.

    Example:
        >>> rests = []
        >>> pace = Pace(0.25, worked=iter([0.0, 2.0, 2.0, 3.0, 3.0]).__next__, rest=rests.append)
        >>> list(pace.spread("ab")), rests
        (['a', 'b'], [6.0, 3.0])
    """

    def __init__(
        self,
        share: float,
        *,
        worked: Callable[[], float] = time.thread_time,
        rest: Callable[[float], object] | None = None,
    ) -> None:
        """`worked` tells the seconds this thread has worked; `rest` waits so many seconds, or less."""
        if not 0 < share <= 1:
            raise InvalidArgumentError(f"share: expected a number in (0, 1], got {share!r}")
        self._rests_per_work = 1 / share - 1
        self._hurried = threading.Event()
        self._worked, self._rest = worked, rest or self._hurried.wait

    @property
    def rests(self) -> bool:
        """Whether there is any rest."""
        return self._rests_per_work > 0

    def spread(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The same pieces, with a rest after each in proportion to what it took to make and to use it."""
        began = self._worked()
        for piece in pieces:
            yield piece
            if self.rests:
                self._rest((self._worked() - began) * self._rests_per_work)
                began = self._worked()

    def hurry(self) -> None:
        """Rest no more: somebody waits."""
        self._hurried.set()
