"""Curves in TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from monolith.data.sources.source import StreamLag
from monolith.errors import InvalidArgumentError
from monolith.features import Ragged
from monolith.optional_packages import import_extra
from monolith.train.hooks.hook import EverySteps, Hook
from monolith.train.hooks.progress import ProgressHook, ProgressReport
from monolith.urls import checked_location, local_path

if TYPE_CHECKING:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    from monolith.features.batch import BatchColumn
    from monolith.train.trainer import StepResult, Trainer

__all__ = [
    "ColumnStatistics",
    "FeatureStatisticsHook",
    "ProfilerHook",
    "TensorBoardHook",
    "can_write_curves",
    "column_statistics",
    "write_evaluation",
]

_log = logging.getLogger(__name__)


class TensorBoardHook(Hook):
    """Write curves as event files into `folder`, a point every `every_steps` steps.

    There are the loss per example, the gradient norm, examples per second, the AUC of each binary head over examples that the
    model had not been trained on yet, and the rows of each table. On a stream also the lag in records and seconds, and how many
    records were late or bad. A run without a point leaves no file.

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

    def while_waiting(self, trainer: Trainer) -> None:
        """Write the last steps of a stream that is too slow for `every_steps`."""
        self._progress.while_waiting(trainer)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Write what is left, and close."""
        if error is None:
            self._progress.end(trainer, None)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, report: ProgressReport) -> None:
        values = {"loss": report.loss, "examples_per_second": report.examples_per_second, **_lag_values(report.lag)}
        for name, value in (values | {f"auc/{head}": auc for head, auc in report.auc.items()}).items():
            self._open().add_scalar(name, value, report.step)

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            self._writer = _open_writer(self.folder)
        return self._writer


def _lag_values(lag: StreamLag | None) -> dict[str, float]:
    if lag is None:
        return {}
    known = {} if lag.seconds is None else {"lag/seconds": lag.seconds}
    return {"lag/records": lag.records, **known, "lag/late": lag.late, "lag/bad": lag.bad}


def write_evaluation(folder: str | Path, metrics: Mapping[str, float], step: int) -> None:
    """Write `metrics` of an evaluation as points at `step` into `folder`, which may have the curves of training too.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_evaluation(folder, {"ctr/auc": 0.75}, step=100)
        ...     len(list(Path(folder).iterdir()))
        1
    """
    with _open_writer(folder) as writer:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)


@cache
def can_write_curves() -> bool:
    """Return whether TensorBoard is installed. If not, the log says so once, at level DEBUG: nobody has asked for curves."""
    if find_spec("tensorboard") is not None:
        return True
    _log.debug("no curves are written, because TensorBoard is not installed: pip install 'monolith-torch[tensorboard]'")
    return False


def _open_writer(folder: str | Path) -> SummaryWriter:
    import_extra("tensorboard", extra="tensorboard", purpose="writing curves")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


@dataclass(frozen=True, kw_only=True)
class ColumnStatistics:
    """One column of one batch."""

    rows: int
    values: int
    """Entries of all rows."""
    empty: float
    """Share of rows without an entry."""
    distinct: float | None
    """Share of distinct values among the values, for integers. None for floats and without values."""
    mean: float | None
    """Mean of the values, for floats. None for integers and without values."""
    invalid: int
    """NaN and infinite values."""


def column_statistics(column: BatchColumn) -> ColumnStatistics:
    """Describe a column.

    Example:
        >>> stats = column_statistics(Ragged.from_lists([[7, 7], [], [8, 9]]))
        >>> stats.rows, stats.values, round(stats.empty, 2), stats.distinct
        (3, 4, 0.33, 0.75)
    """
    values = (column.values if isinstance(column, Ragged) else column).detach()
    empty = (column.row_lengths() == 0).double().mean().item() if isinstance(column, Ragged) and len(column) else 0.0
    numbers = values.is_floating_point()
    count = values.numel()
    finite = values[values.isfinite()] if numbers else values
    return ColumnStatistics(
        rows=len(column),
        values=count,
        empty=empty,
        distinct=None if numbers or not count else torch.unique(values).numel() / count,
        mean=finite.double().mean().item() if numbers and finite.numel() else None,
        invalid=count - finite.numel(),
    )


class FeatureStatisticsHook(Hook):
    """Every `every_steps` steps, describe each column of the batch just trained on and hand it to `write`.

    Example:
        >>> hook = FeatureStatisticsHook(every_steps=1000, write=lambda step, columns: print(step, columns))
    """

    def __init__(
        self,
        *,
        every_steps: int = 1000,
        write: Callable[[int, Mapping[str, ColumnStatistics]], None] | None = None,
    ) -> None:
        self.every_steps = every_steps
        self._write = write or _log_columns

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Describe the batch."""
        if result.step % self.every_steps == 0:
            self._write(result.step, {name: column_statistics(column) for name, column in result.batch.items()})


def _log_columns(step: int, columns: Mapping[str, ColumnStatistics]) -> None:
    for name, column in columns.items():
        _log.info("step %d: column %s: %s", step, name, asdict(column))


class ProfilerHook(Hook):
    """Write `trace-<step>.json` into `folder` for `num_steps` steps at a time.

    A trace starts at the step `start` of this run and again every `period` steps (None: never by itself), and whenever
    `request()` was called or someone created the file `PROFILE` in `folder`, which is then removed.

    Example:
        >>> hook = ProfilerHook("runs/ctr/profile", start=500, num_steps=10, period=5000)
        >>> ProfilerHook("profile", start=0, num_steps=10, period=10)
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: period: expected more than num_steps=10, got 10
    """

    def __init__(
        self, folder: str | Path, *, start: int | None = None, num_steps: int = 10, period: int | None = None
    ) -> None:
        if num_steps < 1:
            raise InvalidArgumentError(f"num_steps: expected at least 1, got {num_steps}")
        if period is not None and period <= num_steps:
            raise InvalidArgumentError(f"period: expected more than num_steps={num_steps}, got {period}")
        self.folder = Path(local_path(folder, "folder"))
        self.start, self.num_steps, self.period = start, num_steps, period
        self._steps = 0
        self._requested = False
        self._running: torch.profiler.profile | None = None
        self._left = 0

    def request(self) -> None:
        """Trace the next steps."""
        self._requested = True

    def begin(self, trainer: Trainer) -> None:
        """Count steps from here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._steps = 0

    def before_step(self, trainer: Trainer) -> None:
        """Start a trace if it is due."""
        if self._running is None and self._due():
            import torch

            self._running = torch.profiler.profile(record_shapes=True)
            self._running.start()
            self._left = self.num_steps
        self._steps += 1

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Finish the trace after its last step."""
        if self._running is not None:
            self._left -= 1
            if self._left == 0:
                self._finish(trainer)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Keep what a run that ended early has traced."""
        if self._running is not None:
            self._finish(trainer)

    def _due(self) -> bool:
        asked, self._requested = self._requested, False
        with suppress(FileNotFoundError):
            (self.folder / "PROFILE").unlink()
            asked = True
        if self.start is None or self._steps < self.start:
            return asked
        since = self._steps - self.start
        return asked or (since == 0 if self.period is None else since % self.period == 0)

    def _finish(self, trainer: Trainer) -> None:
        profile, self._running = self._running, None
        if profile is not None:
            profile.stop()
            path = self.folder / f"trace-{trainer.step}.json"
            profile.export_chrome_trace(str(path))
            _log.info("wrote %s", path)
