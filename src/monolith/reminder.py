"""`Reminder`: while a process waits, a log line now and then says what for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["REMIND_SECS", "Reminder"]

REMIND_SECS = 30.0
"""Seconds between two lines about the same wait."""


class Reminder:
    """Logs what a loop is waiting for: when the wait begins and every 30 seconds after that, however often the loop polls.

    Example:
        >>> import sys
        >>> log = logging.getLogger("reminder-example")
        >>> log.addHandler(logging.StreamHandler(sys.stdout)); log.setLevel(logging.INFO)
        >>> now = 0.0
        >>> reminder = Reminder(log, clock=lambda: now)
        >>> for now in (0.0, 10.0, 20.0, 30.0, 40.0):
        ...     reminder.waiting("worker %d to join", 3)
        waiting for worker 3 to join
        still waiting after 30 s for worker 3 to join
    """

    def __init__(
        self, log: logging.Logger, *, every_secs: float = REMIND_SECS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._every_secs, self._clock = log, every_secs, clock
        self._began: float | None = None
        self._next = 0.0

    def waiting(self, what: str, *values: object) -> None:
        """Call this in every round of the loop, with the words that follow "waiting for", as for `logging`."""
        now = self._clock()
        if self._began is None:
            self._began, self._next = now, now + self._every_secs
            self._log.info(f"waiting for {what}", *values)
        elif now >= self._next:
            self._next = now + self._every_secs
            self._log.info(f"still waiting after %.0f s for {what}", now - self._began, *values)
