"""Curves in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from monolith.train.hooks.every_steps import EverySteps
from monolith.train.hooks.hook import Hook
from monolith.train.hooks.progress import ProgressHook, ProgressReport
from monolith.urls import checked_location

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from monolith.train.trainer import StepResult, Trainer

__all__ = ["TensorBoardHook", "write_evaluation"]


class TensorBoardHook(Hook):
    """Write curves as event files into `folder`, a point every `every_steps` steps.

    There are the loss per example, the gradient norm, examples per second, the AUC of each binary head over examples that the
    model had not been trained on yet, and the rows of each table. A run without a point leaves no file.

    Example:
        >>> hook = TensorBoardHook("runs/ctr", every_steps=100)
    """

    def __init__(self, folder: str | Path, *, every_steps: int = 100) -> None:
        self.folder, self.every_steps = checked_location(folder), every_steps
        self._timer = EverySteps(every_steps)
        self._progress = ProgressHook(self._write, every_steps=every_steps)
        self._writer: SummaryWriter | None = None

    def after_start(self, trainer: Trainer) -> None:
        """Begin to measure."""
        self._progress.after_start(trainer)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Take in a step, and write a point of each curve if it is time."""
        self._progress.after_step(trainer, result)
        if not self._timer.is_due(result.step):
            return
        if result.grad_norm is not None:
            self._open().add_scalar("global_gradient_norm", result.grad_norm.item(), result.step)
        for name, stats in trainer.table_stats().items():
            self._open().add_scalar(f"rows/{name}", stats.rows, result.step)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Write what is left, and close."""
        if error is None:
            self._progress.end(trainer, None)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, report: ProgressReport) -> None:
        values = {"loss": report.loss, "examples_per_second": report.examples_per_second}
        for name, value in (values | {f"auc/{head}": auc for head, auc in report.auc.items()}).items():
            self._open().add_scalar(name, value, report.step)

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.folder)
        return self._writer


def write_evaluation(folder: str | Path, metrics: Mapping[str, float], step: int) -> None:
    """Write `metrics` of an evaluation as points at `step` into `folder`, which may have the curves of training too.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_evaluation(folder, {"ctr/auc": 0.75}, step=100)
        ...     len(list(Path(folder).iterdir()))
        1
    """
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
