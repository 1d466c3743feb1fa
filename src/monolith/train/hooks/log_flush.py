"""Points to continue from between two checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.checkpoints import RunCheckpoints
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["LogFlushHook"]


class LogFlushHook(Hook):
    """After every step, commit what changed to the change log if `RunConfig.log_flush_secs` have passed.

    Example:
        >>> from monolith.train.checkpoints import RunCheckpoints
        >>> from monolith.train.config import RunConfig
        >>> hook = LogFlushHook(RunCheckpoints(RunConfig(model_dir="runs/ctr", log_flush_secs=1.0)))
    """

    def __init__(self, checkpoints: RunCheckpoints) -> None:
        self._checkpoints = checkpoints

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Ask the clock."""
        self._checkpoints.flush(trainer)
