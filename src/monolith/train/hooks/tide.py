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
from monolith.errors import InvalidArgumentError
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["CustomGlobalStepWaiterHook", "SecondOrStepTimerWithTideSetting", "TideWindow", "utc_now"]

_log = logging.getLogger(__name__)


def utc_now() -> datetime:
    """Return the present, in UTC."""
    return datetime.now(UTC)


class TideWindow(Config):
    """From `start` to `end` of every day, in UTC and whole minutes, `end` excluded. It may span midnight.

    If both are equal it is the whole day.

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
        """Return when the worker may start or has asked to stop, and at once if it has started before."""
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


class SecondOrStepTimerWithTideSetting:
    """Says whether something that was done at one step is due again at another.

    With a tide window (`tide_start_hour`, `tide_end_hour` and `tide_every_secs`, all of them), only `tide_every_secs`
    counts outside of it. Inside, and without a window, `every_secs` or `every_steps` count.

    Args:
        every_secs: seconds between two triggers. Give this or `every_steps`.
        every_steps: steps between two triggers.
        tide_start_hour: the window in UTC, with `tide_start_minute`.
        tide_end_hour: first hour outside of it, with `tide_end_minute`.
        tide_every_secs: seconds between two triggers outside the window.
        clock: seconds since 1970.

    Example:
        >>> now = [0.0]
        >>> timer = SecondOrStepTimerWithTideSetting(every_secs=10, clock=lambda: now[0])
        >>> timer.should_trigger_for_step(0), timer.update_last_triggered_step(0)
        (True, (None, None))
        >>> now[0] = 15.0
        >>> timer.should_trigger_for_step(0), timer.should_trigger_for_step(3), timer.update_last_triggered_step(3)
        (False, True, (15.0, 3))
    """

    def __init__(
        self,
        *,
        every_secs: float | None = None,
        every_steps: int | None = None,
        tide_start_hour: int | None = None,
        tide_start_minute: int = 0,
        tide_end_hour: int | None = None,
        tide_end_minute: int = 0,
        tide_every_secs: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if (every_secs is None) == (every_steps is None):
            raise InvalidArgumentError(
                f"timer: expected every_secs or every_steps, got every_secs={every_secs}, every_steps={every_steps}"
            )
        if (every_secs is not None and every_secs < 0) or (every_steps is not None and every_steps < 1):
            raise InvalidArgumentError(
                f"timer: expected every_secs >= 0 or every_steps >= 1, got {every_secs} and {every_steps}"
            )
        self.every_secs, self.every_steps, self.tide_every_secs = every_secs, every_steps, tide_every_secs
        self.window: TideWindow | None = None
        if tide_start_hour is not None and tide_end_hour is not None and tide_every_secs is not None:
            start, end = TimeOfDay(tide_start_hour, tide_start_minute), TimeOfDay(tide_end_hour, tide_end_minute)
            self.window = TideWindow(start=start, end=end)
        self._clock = clock
        self._enabled = True
        self.reset()

    def reset(self) -> None:
        """Forget the last trigger: the next step triggers."""
        self._last_step: int | None = None
        self._last_time = 0.0

    def enable(self) -> None:
        """Trigger again, as if never disabled."""
        self._enabled = True

    def disable(self) -> None:
        """Trigger no more until `enable`."""
        self._enabled = False

    def last_triggered_step(self) -> int | None:
        """The step of the last trigger."""
        return self._last_step

    def should_trigger_for_step(self, step: int) -> bool:
        """Return whether `step` is due. It never is twice."""
        if not self._enabled or step == self._last_step:
            return False
        if self._last_step is None:
            return True
        now = self._clock()
        outside = self.window is not None and not self.window.contains(datetime.fromtimestamp(now, UTC).time())
        if outside and self.tide_every_secs is not None:
            return now >= self._last_time + self.tide_every_secs
        if self.every_secs is not None:
            return now >= self._last_time + self.every_secs
        return self.every_steps is not None and step >= self._last_step + self.every_steps

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Record that `step` triggers. Returns the seconds and steps since the last trigger, None for the first one."""
        now = self._clock()
        elapsed = (None, None) if self._last_step is None else (now - self._last_time, step - self._last_step)
        self._last_step, self._last_time = step, now
        return elapsed
