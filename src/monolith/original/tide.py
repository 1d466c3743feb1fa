"""Training on machines that are lent for some hours of the day ("tide"): stop when the window closes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from datetime import time as TimeOfDay

from monolith.train import Trainer
from monolith.train.hooks import Hook
from monolith.train.hooks.tide import TideWindow, utc_now

__all__ = ["TideStoppingHook", "before", "tide_available_now"]


def before(hour1: int, minute1: int, hour2: int, minute2: int) -> bool:
    """Whether the first time of day is earlier than the second.

    Example:
        >>> before(1, 59, 2, 0), before(2, 0, 2, 0)
        (True, False)
    """
    return (hour1, minute1) < (hour2, minute2)


def tide_available_now(
    start_hour: int,
    start_minute: int,
    end_hour: int,
    end_minute: int,
    *,
    now: Callable[[], datetime] = utc_now,
) -> bool:
    """Whether the present is inside the window, UTC.

    Example:
        >>> from datetime import datetime
        >>> tide_available_now(22, 0, 6, 0, now=lambda: datetime(2024, 1, 1, 1, 30))
        True
    """
    window = TideWindow(start=TimeOfDay(start_hour, start_minute), end=TimeOfDay(end_hour, end_minute))
    return window.contains(now().time())


class TideStoppingHook(Hook):
    """Stop the run before a step that would fall outside the window.

    Example:
        >>> hook = TideStoppingHook(TideWindow(start=TimeOfDay(1), end=TimeOfDay(3)))
    """

    def __init__(self, window: TideWindow, *, now: Callable[[], datetime] = utc_now) -> None:
        self.window = window
        self._now = now

    def before_step(self, trainer: Trainer) -> None:
        """Ask the clock."""
        self._ask(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        """Ask the clock."""
        self._ask(trainer)

    def _ask(self, trainer: Trainer) -> None:
        if not self.window.contains(self._now().time()):
            trainer.request_stop(f"outside the tide window {self.window.start:%H:%M}-{self.window.end:%H:%M} UTC")
