"""Who moves buckets of a server: one at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from monolith.errors import InvalidArgumentError

__all__ = ["MoverLease"]

SECONDS = 60.0
"""After which somebody else may move buckets, if whoever did has not been heard of."""
REMEMBERED = 64
"""Those who have done with moving, and are not listened to any more."""


class MoverLease:
    """Refuses whoever moves beside another, and messages of those who have done.

    Example:
        >>> lease = MoverLease()
        >>> lease.require(5)
        >>> lease.end(5)
        >>> lease.require(6)
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mover, self._until = 0, 0.0
        self._ended: deque[int] = deque(maxlen=REMEMBERED)

    def require(self, rebalance: int) -> None:
        """Let `rebalance` move something now, and nobody else for a while."""
        if rebalance in self._ended:
            # A message that was delayed: what it asks for may have been undone since.
            raise InvalidArgumentError("rebalance: it has ended")
        now = self._clock()
        if rebalance != self._mover and now < self._until:
            raise InvalidArgumentError(
                "rebalance: somebody else is moving buckets of this server; let that end, or wait a minute if it has died"
            )
        self._mover, self._until = rebalance, now + SECONDS

    def end(self, rebalance: int) -> None:
        """`rebalance` has done."""
        self._ended.append(rebalance)
        if rebalance == self._mover:
            self._until = 0.0
