"""What a run does by event time: save, and remove rows that have expired."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Self

from monolith.train.config import RunConfig
from monolith.train.hooks.hook import EverySteps, Hook

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["EventTimeHook"]

_log = logging.getLogger(__name__)


class EventTimeHook(Hook):
    """Saves every `save_secs`, and removes expired rows every `evict_secs`, of event time.

    Both happen when the newest event time trained passes a multiple of them, so a stream that is replayed has them at the same
    places as it had live, however fast it is read.

    Example:
        >>> hook = EventTimeHook(save_secs=3600, evict_secs=86400)
    """

    def __init__(self, *, save_secs: int | None = None, evict_secs: int | None = None) -> None:
        self._save = None if save_secs is None else EverySteps(save_secs)
        self._evict = None if evict_secs is None else EverySteps(evict_secs)

    @classmethod
    def of_run(cls, config: RunConfig) -> list[Self]:
        """Return the hook that a run needs, or none."""
        save, evict = config.save_checkpoints_event_secs, config.evict_event_secs
        return [] if save is None and evict is None else [cls(save_secs=save, evict_secs=evict)]

    def after_start(self, trainer: Trainer) -> None:
        """Begin where the run was."""
        for timer in (self._save, self._evict):
            # From no event time to the first one is no interval.
            if timer is not None and trainer.event_time:
                timer.is_due(trainer.event_time)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Do what is due."""
        if not trainer.event_time:
            return
        if self._evict is not None and self._evict.is_due(trainer.event_time):
            self._remove_expired(trainer)
        if self._save is not None and self._save.is_due(trainer.event_time):
            trainer.save()

    def _remove_expired(self, trainer: Trainer) -> None:
        trainer.settle()
        removed = {name: rows for store in trainer.stores for name, rows in store.evict().items() if rows}
        if removed:
            trainer.note_change()
            _log.info("step %d: removed expired rows: %s", trainer.step, removed)
