"""Traces of a few steps, periodically or when asked for, to be opened in Perfetto or chrome://tracing."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from monolith.errors import InvalidArgumentError
from monolith.train.hooks.hook import Hook
from monolith.urls import local_path

if TYPE_CHECKING:
    import torch

    from monolith.train.trainer import StepResult, Trainer

__all__ = ["ProfilerHook"]

_log = logging.getLogger(__name__)


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
