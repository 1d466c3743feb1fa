"""The window of a day in which lent machines are safe ("tide"), and the slow start of workers."""

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

__all__ = ["CustomGlobalStepWaiterHook", "TideWindow", "utc_now"]

_log = logging.getLogger(__name__)


def utc_now() -> datetime:
    """Return the present, in UTC."""
    return datetime.now(UTC)


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
        now: Callable[[], datetime] = utc_now,
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
