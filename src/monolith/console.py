"""Log lines for the person who watches a process: on stderr, every 30 seconds of a wait, and rate-limited if repeated."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Outage", "Progress", "QUIET_SECS", "REMIND_SECS", "RareWarnings", "Reminder", "log_to_stderr"]

REMIND_SECS = 30.0
"""Seconds between two lines about the same wait."""
QUIET_SECS = 1.0
"""Seconds of a wait that is not worth a line: a connection that was closed is open again by then."""

Progress = Callable[[int, int], None]
"""Called with the amount done and the total: bytes when reading, rows when writing."""


def log_to_stderr() -> None:
    """Show our messages from level INFO on, and warnings of other libraries, on stderr.

    Does nothing if the program has configured logging itself. Called by our programs and by the roles of a distributed job,
    never on import.

    Example:
        >>> log_to_stderr()
    """
    if logging.getLogger().handlers:
        return
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("monolith").setLevel(logging.INFO)


class Reminder:
    """Logs what a loop is waiting for: when the wait begins, when its subject changes, and every 30 seconds.

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
        >>> Reminder(log, who="the chief").waiting("worker 3 to join", left_secs=60.0)
        the chief: waiting for worker 3 to join, at most 60 s more
    """

    def __init__(
        self,
        log: logging.Logger,
        *,
        who: str | None = None,
        every_secs: float = REMIND_SECS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._every_secs, self._clock = log, every_secs, clock
        self._who = "" if who is None else f"{who}: "
        self._began: float | None = None
        self._said = ""
        self._next = 0.0

    def waiting(self, what: str, *values: object, left_secs: float | None = None) -> None:
        """Call this in every round of the loop, with the words that follow "waiting for", as for `logging`.

        `left_secs` is the time until the loop gives up, if it does.
        """
        now = self._clock()
        self._began = now if self._began is None else self._began
        if what == self._said and now < self._next:
            return
        how = "waiting" if now == self._began else f"still waiting after {now - self._began:.0f} s"
        until = "" if left_secs is None else f", at most {left_secs:.0f} s more"
        self._said, self._next = what, now + self._every_secs
        self._log.info("%s%s for %s%s", self._who, how, what % values if values else what, until)


class Outage:
    """Logs that requests wait for a server: after a second, then every 30 seconds, and when it answers again.

    Threads share it: one server that is away is one line, however many requests wait for it.

    Example:
        >>> import sys
        >>> log = logging.getLogger("outage-example")
        >>> log.addHandler(logging.StreamHandler(sys.stdout)); log.setLevel(logging.INFO)
        >>> now = 0.0
        >>> outage = Outage(log, clock=lambda: now)
        >>> for now in (0.0, 0.5, 1.5, 20.0, 31.5):
        ...     outage.waits("the server at ps-1:7100: Connection refused", left_secs=60.0 - now)
        the server at ps-1:7100: Connection refused; waiting for it, at most 58 s more
        the server at ps-1:7100: Connection refused; still waiting for it after 32 s, at most 28 s more
        >>> now = 33.0
        >>> outage.over("ps-1:7100")
        the server at ps-1:7100 answers again, after 33 s
    """

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._next = 0.0
        self._is_logged = False

    def waits(self, failure: object, *, left_secs: float) -> None:
        """A request failed, will be sent again, and gives up after `left_secs`."""
        with self._lock:
            now = self._clock()
            if self._since is None:
                self._since, self._next = now, now + QUIET_SECS
            if now < self._next:
                return
            still = f"still waiting for it after {now - self._since:.0f} s" if self._is_logged else "waiting for it"
            self._next, self._is_logged = now + REMIND_SECS, True
        self._log.info("%s; %s, at most %.0f s more", failure, still, left_secs)

    def over(self, address: str) -> None:
        """The server at `address` has answered."""
        if self._since is None:
            return
        with self._lock:
            since, logged = self._since, self._is_logged
            self._since, self._is_logged = None, False
        if since is not None and logged:
            self._log.info("the server at %s answers again, after %.0f s", address, self._clock() - since)


class RareWarnings:
    """Logs one warning per period and kind, and how many were suppressed.

    Example:
        >>> warnings = RareWarnings(logging.getLogger("example"), seconds=10)
        >>> warnings.warn("cannot accept a connection: %s", "Too many open files")
    """

    def __init__(
        self, logger: logging.Logger, *, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._seconds, self._clock = logger, seconds, clock
        self._last: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def warn(self, message: str, *values: object) -> None:
        """Log `message % values`, unless one with the same `message` was logged less than a period ago."""
        with self._lock:
            at, left_out = self._last.get(message, (-self._seconds, 0))
            if self._clock() - at < self._seconds:
                self._last[message] = at, left_out + 1
                return
            self._last[message] = self._clock(), 0
        more = f" ({left_out} more since the last line)" if left_out else ""
        self._logger.warning(message + "%s", *values, more)
