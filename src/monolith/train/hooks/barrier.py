"""Save while no worker is halfway through a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from monolith.train.barrier import BarrierAlreadyPlacedError, Callback, WorkerBarrier
from monolith.train.hooks.hook import Hook
from monolith.train.hooks.save_listener import CheckpointSaverListener

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["BarrierHook", "BarrierSaverListener", "SAVE"]

SAVE = "Save"
"""The action of a barrier that is placed for a save."""

_log = logging.getLogger(__name__)


class BarrierHook(Hook):
    """In every worker but the chief: be held between steps while there is a barrier.

    Before the worker is held, all of its updates have reached the servers, those that wait for the next step too, and
    `callbacks` are called with the barrier's action.

    Example:
        >>> from monolith.train.barrier import LocalBarrier
        >>> hook = BarrierHook(LocalBarrier(2), index=1)
    """

    def __init__(self, barrier: WorkerBarrier, *, index: int, callbacks: Sequence[Callback] = ()) -> None:
        self._barrier, self._index, self._callbacks = barrier, index, tuple(callbacks)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Come by."""
        self._barrier.wait(self._index, (lambda action: trainer.settle(), *self._callbacks))


class BarrierSaverListener(CheckpointSaverListener):
    """In the chief, best as a guard listener: place a barrier before a save, remove it when the state is taken, or cannot be.

    A save does not wait for ever: after `max_pending_seconds` it goes on and logs who is not held. A barrier that someone else
    has placed is left to them.

    Args:
        barrier: holds the workers.
        max_pending_seconds: how long a save waits until all are held.
        step: the global step; `trainer.step` becomes it while the workers are held.
        monotonic: seconds.
        sleep: waits.

    Example:
        >>> from monolith.train.barrier import LocalBarrier
        >>> listener = BarrierSaverListener(LocalBarrier(1))
    """

    poll_seconds = 1.0

    def __init__(
        self,
        barrier: WorkerBarrier,
        *,
        max_pending_seconds: float = 30,
        step: Callable[[], int] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.max_pending_seconds = max_pending_seconds
        self._barrier, self._step, self._monotonic, self._sleep = barrier, step, monotonic, sleep
        self._placed = False

    def before_cut(self, trainer: Trainer, step: int) -> None:
        """Hold the workers."""
        # Before it is sure: a call that fails may have placed it, and must not hold the workers for ever.
        self._placed = True
        try:
            self._barrier.place(SAVE)
        except BarrierAlreadyPlacedError:
            self._placed = False
            _log.info("saving step %d behind a barrier that is there already", step)
        else:
            self._wait_until_held(step)
        if self._step is not None:
            trainer.settle()
            trainer.step = max(trainer.step, self._step())

    def _wait_until_held(self, step: int) -> None:
        deadline = self._monotonic() + self.max_pending_seconds
        while (missing := self._barrier.unblocked()) and self._monotonic() < deadline:
            self._sleep(self.poll_seconds)
        if missing:
            _log.warning(
                "saving step %d although workers %s are still training after %g s",
                step,
                missing,
                self.max_pending_seconds,
            )

    def after_cut(self, trainer: Trainer, step: int) -> None:
        """Let them go: writing does not need them to stand still."""
        self._release()

    def after_save(self, trainer: Trainer, step: int) -> None:
        """Let them go, should the save have failed before the cut."""
        self._release()

    def _release(self) -> None:
        if self._placed:
            self._placed = False
            self._barrier.remove()
