"""What a person wants to see while a model trains, measured over the steps since the last look."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from monolith.data.sources.source import StreamLag
from monolith.metrics.auc import WindowedAUC
from monolith.train.hooks.hook import EverySteps, Hook

if TYPE_CHECKING:
    from rich.console import Console

    from monolith.train.trainer import StepResult, Trainer

__all__ = ["LoggingHook", "ProgressHook", "ProgressReport", "json_lines", "rich_lines"]

_log = logging.getLogger(__name__)

SLOW_SECS = 10.0
"""Seconds after which the steps made on a stream are reported, although they are fewer than those of a report."""


class LoggingHook(Hook):
    """Log progress every `every_steps` steps at level INFO, and why the run ended.

    An error is left to its handler: the log only has the step at which it was raised. `Estimator.train` adds this hook unless
    it is given a `LoggingHook` or a `ProgressHook`.

    Example:
        >>> hook = LoggingHook(every_steps=100)
    """

    def __init__(self, *, every_steps: int = 100, clock: Callable[[], float] = time.perf_counter) -> None:
        self.every_steps = every_steps
        self._timer, self._clock = EverySteps(every_steps), clock
        self._since, self._examples = 0.0, 0
        self._last: StepResult | None = None

    def after_start(self, trainer: Trainer) -> None:
        """Say where the run starts."""
        _log.info("training starts at step %d", trainer.step)
        self._since, self._examples = self._clock(), 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Log the loss, and the examples per second of this process since the last line."""
        self._examples += result.examples
        self._last = result
        if self._timer.is_due(result.step):
            self._tell(trainer, result)

    def while_waiting(self, trainer: Trainer) -> None:
        """Log the last steps of a stream that is too slow for `every_steps`."""
        if self._last is not None and self._clock() - self._since >= SLOW_SECS:
            self._tell(trainer, self._last)

    def _tell(self, trainer: Trainer, result: StepResult) -> None:
        now = self._clock()
        rate = self._examples / (now - self._since) if now > self._since else float("inf")
        lag = trainer.lag()
        _log.info(
            "step %d: loss %.6g per example, %.0f examples/s%s",
            result.step,
            result.mean_loss,
            rate,
            "" if lag is None else f", {lag}",
        )
        self._since, self._examples, self._last = now, 0, None

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Say why the run ended."""
        if error is not None:
            _log.info("training stopped at step %d: %s", trainer.step, type(error).__name__)
        elif trainer.steps_made:
            _log.info("training ended at step %d: %s", trainer.step, trainer.stop_reason)


@dataclass(frozen=True, kw_only=True)
class ProgressReport:
    """The state of a run at one step. Loss and AUC are those of examples that the model had not been trained on yet."""

    step: int
    examples: int
    """Since the run started."""
    examples_per_second: float
    """Over the last interval, reading included."""
    loss: float
    """Per example, mean of the steps of the last interval."""
    auc: dict[str, float]
    """By binary head, over the most recent examples."""
    rows: int
    """In all tables."""
    table_bytes: int
    """Held by all tables."""
    memory_bytes: int
    """Resident memory of this process."""
    lag: StreamLag | None = None
    """How far this process is behind the stream that it reads. None for other sources."""


class ProgressHook(Hook):
    """Hand a `ProgressReport` to `write` every `every_steps` steps and at the end of the run.

    Example:
        >>> import sys
        >>> hook = ProgressHook(json_lines(sys.stdout), every_steps=100)
    """

    def __init__(
        self,
        write: Callable[[ProgressReport], None],
        *,
        every_steps: int = 100,
        auc_window: int = 100_000,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every_steps, self.auc_window = every_steps, auc_window
        self._write, self._clock = write, clock
        self._timer = EverySteps(every_steps)
        self._auc: dict[str, WindowedAUC] = {}
        self._examples = self._reported = 0
        self._losses: list[float] = []
        self._since = 0.0

    def after_start(self, trainer: Trainer) -> None:
        """Start the clock."""
        self._auc = {head.name: WindowedAUC(self.auc_window) for head in trainer.heads if head.kind == "binary"}
        self._examples = self._reported = 0
        self._losses = []
        self._since = self._clock()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Take in a step."""
        self._examples += result.examples
        self._losses.append(result.mean_loss)
        for head in trainer.heads:
            # A rank whose data has ended has no logits.
            if head.name in self._auc and head.name in result.logits:
                rows, logits = head.select(result.batch, result.logits[head.name])
                self._auc[head.name].update(logits.reshape(-1), head.labels(rows))
        if self._timer.is_due(result.step):
            self._report(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        """Report the last steps of a stream that is too slow for `every_steps`."""
        if self._losses and self._clock() - self._since >= SLOW_SECS:
            self._report(trainer)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Report the steps since the last report. A run that failed cannot be asked for its rows: nothing is reported."""
        if self._losses and error is None:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        now = self._clock()
        seconds, examples = now - self._since, self._examples - self._reported
        stats = trainer.table_stats()
        self._write(
            ProgressReport(
                step=trainer.step,
                examples=self._examples,
                examples_per_second=examples / seconds if seconds > 0 else math.inf,
                loss=sum(self._losses) / len(self._losses),
                auc={name: auc.compute() for name, auc in self._auc.items()},
                rows=sum(table.rows for table in stats.values()),
                table_bytes=sum(table.bytes for table in stats.values()),
                memory_bytes=_resident_bytes(),
                lag=trainer.lag(),
            )
        )
        self._since, self._reported, self._losses = self._clock(), self._examples, []


def json_lines(stream: TextIO) -> Callable[[ProgressReport], None]:
    """Write each report as one line of JSON. Numbers that JSON lacks become null.

    Example:
        >>> import sys
        >>> report = ProgressReport(step=1, examples=8, examples_per_second=80.0, loss=0.7, auc={"ctr": math.nan},
        ...                         rows=3, table_bytes=100, memory_bytes=1000)
        >>> json_lines(sys.stdout)(report)
        {"step": 1, "examples": 8, "examples_per_second": 80.0, "loss": 0.7, "auc": {"ctr": null}, "rows": 3, "table_bytes": 100,
        "memory_bytes": 1000, "lag": null}
    """

    def write(report: ProgressReport) -> None:
        stream.write(json.dumps(_finite(asdict(report)), allow_nan=False) + "\n")
        stream.flush()

    return write


def rich_lines(console: Console) -> Callable[[ProgressReport], None]:
    """Write each report as one line a person can read.

    Example:
        >>> from rich.console import Console
        >>> write = rich_lines(Console())
    """

    def write(report: ProgressReport) -> None:
        aucs = " ".join(
            f"[bold]{value:.4f}[/]" + (f" {name}" if len(report.auc) > 1 else "")
            for name, value in report.auc.items()
            if not math.isnan(value)  # so far, all labels were the same
        )
        console.print(
            f"[dim]step[/] {report.step:>8,}  [dim]loss[/] {report.loss:.5g}  "
            + (f"[dim]AUC[/] {aucs}  " if aucs else "")
            + f"{report.examples_per_second:>9,.0f} [dim]examples/s[/]  {report.rows:,} [dim]rows[/]  "
            f"{report.memory_bytes / 2**20:,.0f} [dim]MiB[/]"
            + ("" if report.lag is None else f"  [dim]{report.lag}[/]"),
            highlight=False,
            soft_wrap=True,  # a log has lines of any length
        )

    return write


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    import resource

    return pages * resource.getpagesize()
