"""Training on a source that waits for records: what a run does while none comes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from monolith.console import REMIND_SECS
from monolith.data.prefetch import Prefetch
from monolith.errors import ConfigError
from monolith.features.batch import Batch

if TYPE_CHECKING:
    from monolith.train.hooks.hook import Hook
    from monolith.train.trainer import Trainer

__all__ = ["Pause", "TICK_SECS", "arriving", "fix_start", "require_one_pass", "waits_for_records"]

TICK_SECS = 0.1
"""Seconds between two ticks of a run whose source waits. So late is what a signal, an operator or a timer asks for."""

_log = logging.getLogger(__name__)


def waits_for_records(source: Iterable[Batch]) -> bool:
    """Return whether `source` may wait for records that do not exist yet.

    Example:
        >>> waits_for_records([])
        False
    """
    return bool(getattr(source, "waits", False))


def fix_start(source: Iterable[Batch]) -> bool:
    """Let a source that waits decide where it begins, see `Source.fix_start`. Returns whether its position has changed by that.

    Example:
        >>> fix_start([])
        False
    """
    return waits_for_records(source) and bool(getattr(source, "fix_start", bool)())


def require_one_pass(source: Iterable[Batch], epochs: int | None) -> None:
    """Raise `ConfigError` for more than one pass over a source that waits, but for those over a history before it.

    Example:
        >>> require_one_pass([], epochs=3)
    """
    if waits_for_records(source) and epochs is not None and epochs not in (1, getattr(source, "epochs", 1)):
        raise ConfigError(
            f"RunConfig.epochs: expected 1 or None for a {type(source).__name__}, which waits for records and is read once, got "
            f"{epochs}. Passes over files before it: HistoryThenStream(epochs=...)"
        )


class Pause:
    """What a run does several times a second while its source waits for records, so that time does not stand still.

    Updates that wait for the next step are applied, so that what was trained is saved and published. Then hooks may act.

    Args:
        trainer: between two steps.
        hooks: those that do something `while_waiting`.
        last: the global step at which the run ends. Other workers may reach it meanwhile.
        source: what is waited for, for the log.

    Example:
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> Pause(Trainer(nn.Identity()), hooks=(), last=None).tick()
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        hooks: Sequence[Hook],
        last: int | None,
        source: object = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer, self._hooks, self._last, self._clock = trainer, hooks, last, clock
        self._source = source
        self._since: float | None = None
        self._remind_after = REMIND_SECS

    def tick(self) -> None:
        """Do it once."""
        trainer = self._trainer
        if self._since is None and trainer.ranks is None:
            trainer.settle()
        self._tell()
        for hook in self._hooks:
            hook.while_waiting(trainer)
        if self._last is not None and trainer.step >= self._last:
            trainer.request_stop(f"step {self._last} is reached")

    def over(self) -> None:
        """A batch has come."""
        self._since = None

    def _tell(self) -> None:
        now = self._clock()
        if self._since is None:
            self._since, self._remind_after = now, REMIND_SECS
            if not self._trainer.steps_made:
                _log.info("waiting for the first %s, at step %d", self._awaited(), self._trainer.step)
        elif now - self._since >= self._remind_after:
            # A stream may be quiet for a night: each line comes after twice the time of the last one.
            self._remind_after = 2 * (now - self._since)
            _log.info(
                "no %s have come for %.0f s, after step %d", self._awaited(), now - self._since, self._trainer.step
            )

    def _awaited(self) -> str:
        return "batches of the history" if getattr(self._source, "phase", None) == "history" else "records"


def arriving(ahead: Prefetch, trainer: Trainer, pause: Pause) -> Iterator[Batch]:
    """Yield the batches of a source that waits as they come.

    Ends with the source, and when the run is to stop: no batch is taken that is not trained.

    Example:
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> trainer = Trainer(nn.Identity())
        >>> with Prefetch([{"x": 1}]) as ahead:
        ...     list(arriving(ahead, trainer, Pause(trainer, hooks=(), last=None)))
        [{'x': 1}]
    """
    while True:
        try:
            batch = ahead.take(TICK_SECS)
        except TimeoutError:
            pause.tick()
            if trainer.stop_reason is not None:
                return
            continue
        if batch is None:
            return
        pause.over()
        yield batch
