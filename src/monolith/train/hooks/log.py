"""Lines in Python's log, for runs nobody watches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from monolith.train.hooks.every_steps import EverySteps
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["LoggingHook"]

_log = logging.getLogger(__name__)


class LoggingHook(Hook):
    """Log step and loss per example every `every_steps` steps at level INFO, and why the run ended.

    Example:
        >>> hook = LoggingHook(every_steps=100)
    """

    def __init__(self, *, every_steps: int = 100) -> None:
        self.every_steps = every_steps
        self._timer = EverySteps(every_steps)

    def after_start(self, trainer: Trainer) -> None:
        """Say where the run starts."""
        _log.info("training starts at step %d", trainer.step)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Log the loss."""
        if self._timer.is_due(result.step):
            _log.info("step %d: loss %.6g per example", result.step, result.mean_loss)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Say why the run ended."""
        if error is not None:
            _log.error("training broke at step %d: %r", trainer.step, error)
        else:
            _log.info("training ended at step %d: %s", trainer.step, trainer.stop_reason)
