"""Curves in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from monolith.train.hooks.every_steps import EverySteps
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from monolith.train.trainer import StepResult, Trainer

__all__ = ["TensorBoardHook"]


class TensorBoardHook(Hook):
    """Every `every_steps` steps write loss, gradient norm and rows of each table as event files into `folder`.

    Example:
        >>> hook = TensorBoardHook("runs/ctr", every_steps=100)
    """

    def __init__(self, folder: str | Path, *, every_steps: int = 100) -> None:
        self.folder, self.every_steps = Path(folder), every_steps
        self._timer = EverySteps(every_steps)
        self._writer: SummaryWriter | None = None

    def begin(self, trainer: Trainer) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder))

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Write a point of each curve."""
        if self._writer is None or not self._timer.is_due(result.step):
            return
        self._writer.add_scalar("loss", result.loss.item(), result.step)
        if result.grad_norm is not None:
            self._writer.add_scalar("global_gradient_norm", result.grad_norm.item(), result.step)
        for name, stats in trainer.table_stats().items():
            self._writer.add_scalar(f"rows/{name}", stats.rows, result.step)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
