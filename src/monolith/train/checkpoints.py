"""The checkpoints of a training run: taken between two steps, written beside the next ones, removed in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import JsonValue
from torch import Tensor

from monolith.errors import LogGapError
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
from monolith.state.retention import CheckpointHistory, remove_orphans, remove_unreachable
from monolith.state.save import PendingCheckpoint, begin_checkpoint
from monolith.state.snapshot import OpenSnapshot, write_snapshot
from monolith.state.storage import LocalFolder
from monolith.table import EmbeddingTable
from monolith.table.store import StoreSave
from monolith.train.config import RunConfig

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["DenseOnlyCheckpoints", "RunCheckpoints"]

Tables = Mapping[str, Sequence[EmbeddingTable]]

_logger = logging.getLogger(__name__)


class RunCheckpoints:
    """Writes the checkpoints and the change log of one run; what `NoFirstSaveCheckpointSaverHook` saves with.

    On a local disk a checkpoint costs what changed since the last one: the rows go into the log in `<model_dir>/log`, and a
    snapshot of all rows is written beside training when the log since the last has grown larger than it. A remote store has no
    log: there every checkpoint has all rows, written while training waits.

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
        """`folder` takes the place of the model_dir of `config`."""
        self.folder = (folder or str(config.model_dir)).rstrip("/")
        self.model_dir = ModelDir(self.folder)
        self.saved_version: object = None
        """The `version` of the trainer's state that was saved last."""
        self._config, self._clock = config, clock
        self._tables: Tables = {}
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
        """Whether changes go into a log, so that a checkpoint costs what changed."""
        return self.model_dir.keeps_log

    @property
    def in_background(self) -> bool:
        """Whether writing may go on beside training."""
        return self.keeps_log

    def create(self) -> None:
        """Make the folder, so that a run that cannot be saved fails before it starts."""
        folder = self.model_dir.folder
        if isinstance(folder, LocalFolder):
            folder.make()

    def open(self, tables: Tables, *, parent: int) -> None:
        """Begin to write `tables`; `parent` is the number in the own log that they come from, 0 if they come from elsewhere."""
        self._tables = tables
        self._begin_folder()
        if self.keeps_log:
            self._log = self.model_dir.open_log(tables, parent=parent, clock=self._clock)
            self._snapshot_due = self.model_dir.needs_snapshot(self._log)
            # Rows that came from elsewhere are in no snapshot yet: before the first checkpoint no log leads to them.
            self._flushes = self._config.log_flush_secs is not None and (parent > 0 or self._log.complete)
            self._flusher = Flusher(self._log, every_secs=self._config.log_flush_secs)

    def close(self) -> int:
        """Let others write; the last sequence number of the log, which the next one continues, 0 if there is none."""
        self._drop_scan()
        if self._threads is not None:
            self._threads.shutdown()
        log, self._log, self._flusher, self._threads = self._log, None, None, None
        if log is None:
            return 0
        log.close()
        return log.sequence

    def is_saved(self, trainer: Trainer) -> bool:
        """Whether the state the trainer is in has been saved."""
        return self.saved_version == trainer.version

    def prepare(self) -> Future[OpenSnapshot] | Future[int] | None:
        """What must end before the state is taken: an entry of the log, or a snapshot of all rows, begun here if it is due."""
        if self._flushing is not None and not self._flushing.done():
            return self._flushing
        if self._scan is None and self._log is not None and self._snapshot_due:
            if self._threads is None:
                self._threads = WorkerThreads(1, thread_name_prefix="monolith-snapshot")
            self._scan = self._threads.submit(write_snapshot, self.model_dir, self._tables, self._log)
        return self._scan

    def begin(self, trainer: Trainer) -> PendingRunSave:
        """Take the state as it is now, between two steps."""
        trainer.settle()
        scan, self._scan = self._scan, None
        path = f"{self.folder}/{BASENAME}-{trainer.step}"
        # What the servers hold is decided first, and what this process holds while it does nothing else.
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
        """Name a complete checkpoint in the index, and remove what has to go."""
        rows = {**save.rows, **self.model_dir.part_rows(save.pending.name)}
        if rows:
            write_checkpoint_info(self.folder, save.step, feature_counts=rows)
        exempt = update_save_time(self.folder, int(self._clock())).exempt_model_checkpoint_paths
        for path in self._history.record(save.pending.path, self.folder, exempt=exempt):
            if (step := step_of_name(path)) is not None:
                remove_checkpoint_info(self.folder, step)
        remove_orphans(self.model_dir, manifest)
        if self._log is not None:
            self._remove_unreachable()
            # Found out here, beside training: it takes reading many files.
            self._snapshot_due = self.model_dir.needs_snapshot(self._log)
        self._flushes = self._config.log_flush_secs is not None
        self.saved_version = save.version

    def _remove_unreachable(self) -> None:
        try:
            remove_unreachable(self.model_dir)
        except LogGapError as error:
            # This checkpoint is safe; what is left of the log stays, in case the lost segment is put back.
            _logger.warning("nothing was removed from the log: %s", error)

    def flush(self, trainer: Trainer) -> None:
        """Commit what changed to the log, if it is time; called between two steps."""
        # An entry of this log has no rows of servers, which have logs of their own.
        if self._flusher is not None and self._flushes and not trainer.remote_stores:

            def dense() -> Mapping[str, object]:
                trainer.settle()
                return trainer.state_dict()

            begun = self._flusher.poll(step=trainer.step, event_time=trainer.event_time, dense=dense)
            self._flushing = begun or self._flushing

    def _begin_folder(self) -> None:
        self._history.recover_from_index(self.folder)
        create_monolith_checkpoint_state(self.folder)

    def _begin_remote(self, trainer: Trainer, path: str) -> StoreSave:
        """Let those that hold rows elsewhere decide what is in the checkpoint at `path`."""
        saves = [store.begin_save(path, step=trainer.step) for store in trainer.remote_stores]
        return StoreSave(
            dense={name: values for save in saves for name, values in save.dense.items()},
            finish=lambda: tuple(entry for save in saves for entry in save.finish()),
        )

    def _dense_on_servers(self, optimizer: ServerOptimizer, saves: StoreSave) -> Mapping[str, Tensor]:
        """The values of dense parameters at the moment of the rows."""
        return {name: torch.from_numpy(values.copy()) for name, values in saves.dense.items()}

    def _drop_scan(self) -> None:
        scan, self._scan = self._scan, None
        if scan is not None and scan.exception() is None:
            scan.result().abandon()


@dataclass(frozen=True, kw_only=True)
class PendingRunSave:
    """A state that was taken and is not written yet."""

    checkpoints: RunCheckpoints
    pending: PendingCheckpoint
    step: int
    version: object
    rows: Mapping[str, int]

    def hurry(self) -> None:
        """Write at full speed from now on: somebody waits."""
        self.pending.hurry()

    def finish(self) -> str:
        """Write the checkpoint and name it in the index; its path."""
        self.checkpoints.publish(self, self.pending.finish())
        return self.pending.path


class DenseOnlyCheckpoints(RunCheckpoints):
    """Checkpoints of everything but the tables, in a folder of their own; left out where `full` has saved.

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

    def open(self, tables: Tables, *, parent: int) -> None:
        """Begin to write, without tables and so without a log."""
        self._begin_folder()

    def _begin_remote(self, trainer: Trainer, path: str) -> StoreSave:
        return StoreSave()

    def _dense_on_servers(self, optimizer: ServerOptimizer, saves: StoreSave) -> Mapping[str, Tensor]:
        return optimizer.origin.read()

    def is_saved(self, trainer: Trainer) -> bool:
        """Whether the state the trainer is in has been saved, here or in full."""
        return trainer.version in (self.saved_version, self._full.saved_version)
