"""`RareWarnings`: warnings about what may happen a thousand times a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["RareWarnings"]


class RareWarnings:
    """Logs one warning per period and kind, and how many were left out.

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
