"""When to save: every so many seconds or steps, and more often while borrowed machines may be taken back."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from datetime import time as TimeOfDay

from monolith.errors import InvalidArgumentError
from monolith.train.hooks.tide import TideWindow

__all__ = ["SecondOrStepTimerWithTideSetting"]


class SecondOrStepTimerWithTideSetting:
    """Says whether something that was done at one step is due again at another.

    With a tide window (`tide_start_hour`, `tide_end_hour` and `tide_every_secs`, all of them), `tide_every_secs` alone counts
    outside of it; inside, and without one, `every_secs` or `every_steps`.

    Args:
        every_secs: seconds between two triggers; give this or `every_steps`.
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
        """Whether `step` is due; never twice for the same step."""
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
        """Note that `step` triggers; seconds and steps since the trigger before, None if it is the first."""
        now = self._clock()
        elapsed = (None, None) if self._last_step is None else (now - self._last_time, step - self._last_step)
        self._last_step, self._last_time = step, now
        return elapsed
