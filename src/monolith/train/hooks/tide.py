"""Machines that are lent for some hours of the day ("tide"): train inside the window, leave when it closes.

Also the slow start of workers: later ones wait until the model has moved away from its random start.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from datetime import time as TimeOfDay
from typing import TYPE_CHECKING

from monolith.config import Config
from monolith.console import Reminder
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["CustomGlobalStepWaiterHook", "TideStoppingHook", "TideWindow", "before", "tide_available_now"]

_log = logging.getLogger(__name__)


def _utc_now() -> datetime:
    return datetime.now(UTC)


def before(hour1: int, minute1: int, hour2: int, minute2: int) -> bool:
    """Whether the first time of day is earlier than the second.

    Example:
        >>> before(1, 59, 2, 0), before(2, 0, 2, 0)
        (True, False)
    """
    return (hour1, minute1) < (hour2, minute2)


class TideWindow(Config):
    """From `start` to `end` of every day, UTC, whole minutes; `end` is outside. It may span midnight; start = end is all day.

    Example:
        >>> night = TideWindow(start=TimeOfDay(22, 30), end=TimeOfDay(6))
        >>> night.contains(TimeOfDay(23, 0)), night.contains(TimeOfDay(5, 59)), night.contains(TimeOfDay(6, 0))
        (True, True, False)
    """

    start: TimeOfDay
    """First minute of the window."""
    end: TimeOfDay
    """First minute after the window."""

    def contains(self, moment: TimeOfDay) -> bool:
        """Whether a UTC time of day is inside."""
        start, end = (self.start.hour, self.start.minute), (self.end.hour, self.end.minute)
        now = (moment.hour, moment.minute)
        if start == end:
            return True
        return start <= now < end if start < end else now >= start or now < end


def tide_available_now(
    start_hour: int,
    start_minute: int,
    end_hour: int,
    end_minute: int,
    *,
    now: Callable[[], datetime] = _utc_now,
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

    def __init__(self, window: TideWindow, *, now: Callable[[], datetime] = _utc_now) -> None:
        self.window = window
        self._now = now

    def before_step(self, trainer: Trainer) -> None:
        """Ask the clock."""
        if not self.window.contains(self._now().time()):
            trainer.request_stop(f"outside the tide window {self.window.start:%H:%M}-{self.window.end:%H:%M} UTC")


class CustomGlobalStepWaiterHook(Hook):
    """Hold back the first step until the job's global step, made by other workers, has reached `wait_until_step`.

    Waiting is bounded: once the global step exceeds 1, for `max_non_tide_wait_minute` minutes plus a random 0 to 600 seconds,
    which keeps waiting workers from starting all at once. Outside `window`, if there is one, the run stops instead of waiting.
    Every 30 seconds a log line says which step is being waited for.

    Example:
        >>> steps = iter([0, 5, 10])
        >>> hook = CustomGlobalStepWaiterHook(10, lambda: next(steps), sleep=lambda seconds: print("waits", seconds))
        >>> hook.wait(request_stop=print)
        waits 0.5
        waits 0.5
    """

    poll_seconds = 0.5

    def __init__(
        self,
        wait_until_step: int,
        global_step: Callable[[], int],
        *,
        window: TideWindow | None = None,
        max_non_tide_wait_minute: float = 10,
        now: Callable[[], datetime] = _utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        extra_seconds: Callable[[], float] = lambda: random.SystemRandom().uniform(0, 600),
    ) -> None:
        self.wait_until_step = wait_until_step
        self.window = window
        self.max_wait_seconds = max_non_tide_wait_minute * 60
        self._global_step, self._now, self._monotonic = global_step, now, monotonic
        self._sleep, self._extra_seconds = sleep, extra_seconds
        self._started = wait_until_step <= 0
        self._reminder = Reminder(_log, clock=monotonic)

    def before_step(self, trainer: Trainer) -> None:
        """Wait, the first time."""
        self.wait(trainer.request_stop)

    def wait(self, request_stop: Callable[[str], None]) -> None:
        """Return when the worker may start, or has asked to stop; at once if it has started before."""
        deadline: float | None = None
        while not self._started:
            if self.window is not None and not self.window.contains(self._now().time()):
                request_stop(f"outside the tide window while waiting for step {self.wait_until_step}")
                return
            step = self._global_step()
            if step >= self.wait_until_step:
                self._started = True
                return
            if deadline is None and step > 1:
                deadline = self._monotonic() + self.max_wait_seconds + self._extra_seconds()
            if deadline is not None and self._monotonic() > deadline:
                _log.warning("waited long enough for step %d, starting at %d", self.wait_until_step, step)
                self._started = True
                return
            self._reminder.waiting("global step %d, now %d: slow start", self.wait_until_step, step)
            self._sleep(self.poll_seconds)
