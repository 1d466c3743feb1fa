"""Saving a training run: checkpoints taken between two steps and written during the next ones, and the change log."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import JsonValue
from torch import Tensor

from monolith.errors import InvalidArgumentError, LogGapError
from monolith.log import ChangeLog, Flusher
from monolith.process_bound import WorkerThreads
from monolith.ps.client.server_parameters import ServerOptimizer
from monolith.state.index import (
    create_monolith_checkpoint_state,
    remove_checkpoint_info,
    update_save_time,
    write_checkpoint_info,
)
from monolith.state.manifest import Manifest
from monolith.state.model_dir import DENSE_ONLY, ModelDir
from monolith.state.restore_points import BASENAME, step_of_name
from monolith.state.retention import CheckpointHistory, drop_checkpoint, remove_orphans, remove_unreachable
from monolith.state.save import PendingCheckpoint, begin_checkpoint
from monolith.state.snapshot import OpenSnapshot, write_snapshot
from monolith.state.storage import LocalFolder
from monolith.table import EmbeddingTable
from monolith.table.store import StoreSave
from monolith.table.table_file import FileEntry
from monolith.train.config import RunConfig
from monolith.train.hooks.checkpoint import NoFirstSaveCheckpointSaverHook
from monolith.train.hooks.hook import Hook
from monolith.train.hooks.tide import SecondOrStepTimerWithTideSetting
from monolith.train.restoring import RestoreChoice

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["DenseOnlyCheckpoints", "LogFlushHook", "RunCheckpoints", "TrainerSaving"]

NamedTables = Mapping[str, Sequence[EmbeddingTable]]

_logger = logging.getLogger(__name__)


class RunCheckpoints:
    """Writes the checkpoints and the change log of one run, for `NoFirstSaveCheckpointSaverHook`.

    On a local disk a checkpoint costs what changed since the last one. The rows go into the log in `<model_dir>/log`, and a
    snapshot of all rows is written while training continues when the log since the last one has grown larger than it. A remote
    store has no log. There every checkpoint has all rows, written while training waits.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     checkpoints = RunCheckpoints(RunConfig(model_dir=model_dir))
        ...     checkpoints.open({}, parent=0)
        ...     path = checkpoints.begin(Trainer(nn.Identity())).finish()
        ...     _ = checkpoints.close()
        >>> path == f"{model_dir}/model.ckpt-0"
        True
    """

    def __init__(self, config: RunConfig, *, folder: str | None = None, clock: Callable[[], float] = time.time) -> None:
        """`folder` replaces the model_dir of `config`."""
        self.folder = (folder or str(config.model_dir)).rstrip("/")
        self.model_dir = ModelDir(self.folder)
        self.saved_version: object = None
        """The `version` of the trainer's state that was saved last."""
        self._config, self._clock = config, clock
        self._tables: NamedTables = {}
        self._history = CheckpointHistory(
            max_to_keep=config.checkpoints_max_to_keep,
            keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
            clock=clock,
            model_dir=self.model_dir,
        )
        self._resolved: dict[str, JsonValue] = config.model_dump(mode="json")
        self._log: ChangeLog | None = None
        self._flusher: Flusher | None = None
        self._flushes = False
        self._flushing: Future[int] | None = None
        self._snapshot_due = False
        self._scan: Future[OpenSnapshot] | None = None
        self._threads: WorkerThreads | None = None

    @property
    def mode(self) -> Literal["full", "dense_only"]:
        """Everything is saved."""
        return "full"

    @property
    def keeps_log(self) -> bool:
        """Whether changes go into a log, so a checkpoint costs what changed."""
        return self.model_dir.keeps_log

    @property
    def change_log(self) -> ChangeLog | None:
        """The open change log of a run. None outside of runs and without a local model_dir."""
        return self._log

    @property
    def in_background(self) -> bool:
        """Whether writing may continue during training."""
        return self.keeps_log

    def create(self) -> None:
        """Create the folder, so that a run that cannot be saved fails before it starts."""
        folder = self.model_dir.folder
        if isinstance(folder, LocalFolder):
            folder.make()

    def open(self, tables: NamedTables, *, parent: int) -> None:
        """Begin to write `tables`. `parent` is the sequence number in the own log that they come from, or 0."""
        self._tables = tables
        self._begin_folder()
        if self.keeps_log:
            self._log = self.model_dir.open_log(tables, parent=parent, clock=self._clock)
            self._snapshot_due = self.model_dir.needs_snapshot(self._log)
            # Rows from elsewhere are in no snapshot yet, so before the first checkpoint no log leads to them.
            self._flushes = self._config.log_flush_secs is not None and (parent > 0 or self._log.complete)
            self._flusher = Flusher(self._log, every_secs=self._config.log_flush_secs)

    def close(self) -> int:
        """Let others write. Returns the last sequence number of the log, which the next one continues, or 0."""
        self._drop_scan()
        if self._threads is not None:
            self._threads.shutdown()
        log, self._log, self._flusher, self._threads = self._log, None, None, None
        if log is None:
            return 0
        log.close()
        return log.sequence

    def is_saved(self, trainer: Trainer) -> bool:
        """Return whether the current state of the trainer has been saved."""
        return self.saved_version == trainer.version

    def prepare(self) -> Future[OpenSnapshot] | Future[int] | None:
        """Return what must end before the state is taken: a commit to the log, or a snapshot of all rows, begun here if due."""
        if self._flushing is not None and not self._flushing.done():
            return self._flushing
        if self._scan is None and self._log is not None and self._snapshot_due:
            if self._threads is None:
                self._threads = WorkerThreads(1, thread_name_prefix="monolith-snapshot")
            self._scan = self._threads.submit(write_snapshot, self.model_dir, self._tables, self._log)
        return self._scan

    def renew_snapshot(self) -> None:
        """Write a snapshot of all rows as they are from now on, for the next checkpoint. Waits for it."""
        if self._flushing is not None:
            self._flushing.exception()  # a commit that failed is reported when it is tried again
        self._drop_scan()
        self._snapshot_due = True
        preparing = self.prepare()
        if preparing is not None:
            preparing.result()

    def drop(self, names: Iterable[str]) -> None:
        """Remove checkpoints by name, none of which may be the newest, and what only they needed. No save may be running."""
        known = self.model_dir.checkpoints()
        for name in names:
            if name not in known:
                raise InvalidArgumentError(f"{self.folder}: has no checkpoint {name!r}; it has {', '.join(known)}")
            drop_checkpoint(f"{self.folder}/{name}", self.model_dir)
            if (step := step_of_name(name)) is not None:
                remove_checkpoint_info(self.model_dir, step)
        self._history.recover_from_index(self.model_dir)
        self._remove_unreachable()

    def begin(self, trainer: Trainer) -> PendingRunSave:
        """Take the state as it is now, between two steps."""
        trainer.settle()
        scan, self._scan = self._scan, None
        path = f"{self.folder}/{BASENAME}-{trainer.step}"
        # The servers decide first what they save, and this process while it does nothing else.
        servers = self._begin_remote(trainer, path)
        state: dict[str, Any] = trainer.state_dict()
        if isinstance(trainer.optimizer, ServerOptimizer):
            # The model's copies are some batches behind the servers, and so behind the rows.
            values = self._dense_on_servers(trainer.optimizer, servers)
            state["model"] = {**state["model"], **trainer.optimizer.values_in(trainer.model, values)}
        pending = begin_checkpoint(
            path,
            state=state,
            step=trainer.step,
            tables=self._tables,
            log=self._log,
            snapshot=None if scan is None else scan.result(),
            event_time=trainer.event_time,
            config=self._resolved,
            time=self._clock(),
            share=self._config.save_share,
            servers=servers.finish,
            model_dir=self.model_dir,
        )
        rows = {name: sum(map(len, shards)) for name, shards in self._tables.items()}
        return PendingRunSave(checkpoints=self, pending=pending, step=trainer.step, version=trainer.version, rows=rows)

    def publish(self, save: PendingRunSave, manifest: Manifest) -> None:
        """List a complete checkpoint in the index, and remove what has expired."""
        rows = {**save.rows, **self.model_dir.part_rows(save.pending.name)}
        if rows:
            write_checkpoint_info(self.model_dir, save.step, feature_counts=rows)
        exempt = update_save_time(self.model_dir, int(self._clock())).exempt_model_checkpoint_paths
        for path in self._history.record(save.pending.path, self.model_dir, exempt=exempt):
            if (step := step_of_name(path)) is not None:
                remove_checkpoint_info(self.model_dir, step)
        remove_orphans(self.model_dir, manifest)
        if self._log is not None:
            self._remove_unreachable()
            # Here, where training does not wait for it.
            self._snapshot_due = self.model_dir.needs_snapshot(self._log)
        self._flushes = self._config.log_flush_secs is not None
        self.saved_version = save.version

    def _remove_unreachable(self) -> None:
        try:
            remove_unreachable(self.model_dir)
        except LogGapError as error:
            # This checkpoint is safe, and the log stays in case the lost segment is put back.
            _logger.warning("nothing was removed from the log: %s", error)

    def flush(self, trainer: Trainer) -> None:
        """Commit the changes to the log, if it is due. Called between two steps."""
        if self._flusher is not None and self._flushes:
            stores = trainer.remote_stores

            def dense() -> Mapping[str, object]:
                if not stores:
                    trainer.settle()
                return trainer.state_dict()

            def begin_parts() -> Callable[[], tuple[FileEntry, ...]] | None:
                # This log has no rows of remote stores. It names the segments in theirs.
                trainer.settle()
                cuts = [store.begin_cut(step=trainer.step) for store in stores]
                begun = [cut for cut in cuts if cut is not None]
                return (lambda: _finish_all(begun)) if len(begun) == len(cuts) else None

            begun = self._flusher.poll(
                step=trainer.step,
                event_time=trainer.event_time,
                dense=dense,
                begin_parts=begin_parts if stores else None,
            )
            self._flushing = begun or self._flushing

    def _begin_folder(self) -> None:
        self._history.recover_from_index(self.model_dir)
        create_monolith_checkpoint_state(self.model_dir)

    def _begin_remote(self, trainer: Trainer, path: str) -> StoreSave:
        """Let remote stores decide what is in the checkpoint at `path`."""
        saves = [store.begin_save(path, step=trainer.step) for store in trainer.remote_stores]
        return StoreSave(
            dense={name: values for save in saves for name, values in save.dense.items()},
            finish=lambda: _finish_all(saves),
        )

    def _dense_on_servers(self, optimizer: ServerOptimizer, saves: StoreSave) -> Mapping[str, Tensor]:
        """Return the values of dense parameters at the moment of the rows."""
        return {name: torch.from_numpy(values.copy()) for name, values in saves.dense.items()}

    def _drop_scan(self) -> None:
        scan, self._scan = self._scan, None
        if scan is not None and scan.exception() is None:
            scan.result().abandon()


def _finish_all(saves: Iterable[StoreSave]) -> tuple[FileEntry, ...]:
    return tuple(entry for save in saves for entry in save.finish())


@dataclass(frozen=True, kw_only=True)
class PendingRunSave:
    """A state that is decided and not written yet."""

    checkpoints: RunCheckpoints
    pending: PendingCheckpoint
    step: int
    version: object
    rows: Mapping[str, int]

    def hurry(self) -> None:
        """Write at full speed from now on, because a caller waits."""
        self.pending.hurry()

    def finish(self) -> str:
        """Write the checkpoint and list it in the index. Returns its path."""
        self.checkpoints.publish(self, self.pending.finish())
        return self.pending.path


class DenseOnlyCheckpoints(RunCheckpoints):
    """Checkpoints of everything but the tables, in a folder of their own. Skipped where `full` has saved.

    Example:
        >>> full = RunCheckpoints(RunConfig(model_dir="runs/ctr"))
        >>> DenseOnlyCheckpoints(RunConfig(model_dir="runs/ctr"), full).folder
        'runs/ctr/dense_only'
    """

    def __init__(self, config: RunConfig, full: RunCheckpoints, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(config, folder=f"{full.folder}/{DENSE_ONLY}", clock=clock)
        self._full = full

    @property
    def mode(self) -> Literal["full", "dense_only"]:
        """No table is saved."""
        return "dense_only"

    def open(self, tables: NamedTables, *, parent: int) -> None:
        """Begin to write, without tables and so without a log."""
        self._begin_folder()

    def _begin_remote(self, trainer: Trainer, path: str) -> StoreSave:
        return StoreSave()

    def _dense_on_servers(self, optimizer: ServerOptimizer, saves: StoreSave) -> Mapping[str, Tensor]:
        return optimizer.origin.read()

    def is_saved(self, trainer: Trainer) -> bool:
        """Return whether the current state of the trainer has been saved, here or in full."""
        return trainer.version in (self.saved_version, self._full.saved_version)


class LogFlushHook(Hook):
    """Commits to the change log after a step if `RunConfig.log_flush_secs` have passed since the last commit.

    Example:
        >>> from monolith.train.checkpoints import RunCheckpoints
        >>> from monolith.train.config import RunConfig
        >>> hook = LogFlushHook(RunCheckpoints(RunConfig(model_dir="runs/ctr", log_flush_secs=1.0)))
    """

    def __init__(self, checkpoints: RunCheckpoints) -> None:
        self._checkpoints = checkpoints

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Commit if it is due."""
        self._checkpoints.flush(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        """Commit what the last steps have changed, if it is due."""
        self._checkpoints.flush(trainer)


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
        self.timers: dict[str, SecondOrStepTimerWithTideSetting] = {}
        """The timers of the savers of the last run, by what they save: "full" and "dense_only"."""
        self._parent = 0

    @property
    def model_dir(self) -> ModelDir:
        """Where it is saved."""
        return self._full.model_dir

    @property
    def change_log(self) -> ChangeLog | None:
        """The open change log of a run."""
        return self._full.change_log

    def hooks(self) -> list[Hook]:
        """Return new hooks for one run."""
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
        savers: dict[str, NoFirstSaveCheckpointSaverHook] = {"full": self._hook}
        if config.dense_only_save_every:
            self._dense = DenseOnlyCheckpoints(config, self._full)
            savers["dense_only"] = NoFirstSaveCheckpointSaverHook(self._dense, **config.dense_only_save_every, **common)
            hooks.append(savers["dense_only"])
        self.timers = {mode: hook.timer for mode, hook in savers.items() if hook.timer is not None}
        if config.log_flush_secs is not None:
            hooks.append(LogFlushHook(self._full))
        return hooks

    def create(self) -> None:
        """Create the model_dir, so that a run that cannot be saved fails before it starts."""
        self._full.create()

    def track(self, parent: int) -> None:
        """Track every change of the tables, which come from sequence number `parent` of the own log, or 0."""
        self._parent = parent
        if self._full.keeps_log:
            for table in itertools.chain(*self._trainer.tables().values()):
                table.track_changes()

    def open(self, restored: RestoreChoice | None) -> None:
        """Begin a run that was just `restored`. One that went back is saved at once."""
        self._open_full()
        if restored is not None and restored.is_newest_checkpoint and not self._trainer.remote_stores:
            # A run that makes no step has nothing to save.
            self._full.saved_version = self._trainer.version
        if self._dense is not None:
            self._dense.open({}, parent=0)
        if restored is not None and (restored.went_back or restored.markers):
            self._save_now()
            restored.leave_markers(self.model_dir)

    def close(self) -> None:
        """End the run."""
        self._hook = None
        self._parent = self._full.close()

    def save(self) -> str | None:
        """Save now, during a run or outside of one. Returns the path once it is durable."""
        if self._hook is not None:
            return self._hook.trigger_save(self._trainer)
        self.create()
        self._open_full()
        try:
            return self._save_now()
        finally:
            self.close()

    def renew_snapshot(self) -> None:
        """Write a snapshot of all rows now, for the next checkpoint."""
        self._full.renew_snapshot()

    def drop(self, names: Iterable[str]) -> None:
        """Remove older checkpoints by name. What is being written is finished first, and the present state is saved."""
        self.save()
        self._full.drop(names)

    def _open_full(self) -> None:
        self._full.open(self._trainer.tables(), parent=self._parent)
        for store in self._trainer.remote_stores:
            store.open_log(self._full.folder)

    def _save_now(self) -> str:
        pending = self._full.begin(self._trainer)
        pending.hurry()
        return pending.finish()
