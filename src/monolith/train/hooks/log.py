"""Lines in Python's log, for runs nobody watches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from monolith.train.hooks.every_steps import EverySteps
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["LoggingHook"]

_log = logging.getLogger(__name__)


class LoggingHook(Hook):
    """Log progress every `every_steps` steps at level INFO, and why the run ended.

    An error is left to whoever catches it: the log only has the step at which it came. `Estimator.train` adds this hook unless
    it is given a `LoggingHook` or a `ProgressHook`.

    Example:
        >>> hook = LoggingHook(every_steps=100)
    """

    def __init__(self, *, every_steps: int = 100, clock: Callable[[], float] = time.perf_counter) -> None:
        self.every_steps = every_steps
        self._timer, self._clock = EverySteps(every_steps), clock
        self._since, self._examples = 0.0, 0

    def after_start(self, trainer: Trainer) -> None:
        """Say where the run starts."""
        _log.info("training starts at step %d", trainer.step)
        self._since, self._examples = self._clock(), 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Log the loss, and the examples per second of this process since the last line."""
        self._examples += result.examples
        if not self._timer.is_due(result.step):
            return
        now = self._clock()
        rate = self._examples / (now - self._since) if now > self._since else float("inf")
        _log.info("step %d: loss %.6g per example, %.0f examples/s", result.step, result.mean_loss, rate)
        self._since, self._examples = now, 0

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Say why the run ended."""
        if error is not None:
            _log.info("training stopped at step %d: %s", trainer.step, type(error).__name__)
        elif trainer.steps_made:
            _log.info("training ended at step %d: %s", trainer.step, trainer.stop_reason)
