"""How a trainer saves: its checkpoints, the hooks that write them during a run, and the log it continues."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from monolith.train.checkpoints import DenseOnlyCheckpoints, RunCheckpoints
from monolith.train.hooks.checkpoint import NoFirstSaveCheckpointSaverHook
from monolith.train.hooks.hook import Hook
from monolith.train.hooks.log_flush import LogFlushHook
from monolith.train.restore_choice import RestoreChoice, leave_markers

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["TrainerSaving"]


class TrainerSaving:
    """The saving side of a trainer that has a model_dir.

    Example:
        >>> from torch import nn
        >>> from monolith.train import RunConfig, Trainer
        >>> saving = TrainerSaving(Trainer(nn.Identity(), config=RunConfig(model_dir="runs/ctr", log_flush_secs=1.0)))
        >>> [type(hook).__name__ for hook in saving.hooks()]
        ['NoFirstSaveCheckpointSaverHook', 'LogFlushHook']
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._full = RunCheckpoints(trainer.config)
        self._dense: DenseOnlyCheckpoints | None = None
        self._hook: NoFirstSaveCheckpointSaverHook | None = None
        self._parent = 0

    def hooks(self) -> list[Hook]:
        """New hooks for one run."""
        trainer, config = self._trainer, self._trainer.config
        common: dict[str, Any] = {
            "ignore_save_errors": config.ignore_save_errors,
            "background": self._full.in_background,
            "on_metric": trainer.on_save_metric,
        }
        self._hook = NoFirstSaveCheckpointSaverHook(
            self._full,
            listeners=trainer.save_listeners,
            guard_listeners=trainer.save_guards,
            tide=config.tide,
            **config.save_every,
            **common,
        )
        hooks: list[Hook] = [self._hook]
        if config.dense_only_save_every:
            self._dense = DenseOnlyCheckpoints(config, self._full)
            hooks.append(NoFirstSaveCheckpointSaverHook(self._dense, **config.dense_only_save_every, **common))
        if config.log_flush_secs is not None:
            hooks.append(LogFlushHook(self._full))
        return hooks

    def create(self) -> None:
        """Make the model_dir, so that a run that cannot be saved fails before it starts."""
        self._full.create()

    def track(self, parent: int) -> None:
        """The tables come from number `parent` of the own log, 0 for none of it; every change from now on is noticed."""
        self._parent = parent
        if self._full.keeps_log:
            for table in itertools.chain(*self._trainer.tables().values()):
                table.track_changes()

    def open(self, restored: RestoreChoice | None) -> None:
        """Begin a run, with what it was `restored` from just now. One that was sent back is saved at once."""
        self._full.open(self._trainer.tables(), parent=self._parent)
        if restored is not None and restored.is_newest_checkpoint and not self._trainer.remote_stores:
            # A run that makes no step has nothing to save.
            self._full.saved_version = self._trainer.version
        if self._dense is not None:
            self._dense.open({}, parent=0)
        if restored is not None and (restored.went_back or restored.markers):
            self._save_now()
            leave_markers(self._full.folder, restored)

    def close(self) -> None:
        """End the run."""
        self._hook = None
        self._parent = self._full.close()

    def save(self) -> str | None:
        """Save now, during a run or outside of one; the path, durable."""
        if self._hook is not None:
            return self._hook.trigger_save(self._trainer)
        self.create()
        self._full.open(self._trainer.tables(), parent=self._parent)
        try:
            return self._save_now()
        finally:
            self.close()

    def _save_now(self) -> str:
        pending = self._full.begin(self._trainer)
        pending.hurry()
        return pending.finish()
