"""Writing a checkpoint: its content is decided between two steps, and written while the next ones are made."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time as clock
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, StorageError
from monolith.log import ChangeLog, SegmentInfo
from monolith.log.commit import Tables
from monolith.state.locks import LEASE_ENDING, MARK, WriterMark, claimed, remove_unfinished
from monolith.state.manifest import MANIFEST, Manifest, ShardEntry, TableEntry
from monolith.state.model_dir import LOG, ModelDir
from monolith.state.paths import base_name
from monolith.state.snapshot import OpenSnapshot, write_snapshot
from monolith.state.storage import Folder, StrPath
from monolith.state.tables import group_tables, table_entry, write_tables
from monolith.state_bytes import PackedState, State, pack_state
from monolith.table import AdmissionFilter, EmbeddingTable
from monolith.table.table_file import FileEntry

__all__ = ["PendingCheckpoint", "begin_checkpoint", "write_checkpoint"]

_log = logging.getLogger(__name__)


def begin_checkpoint(
    path: StrPath,
    *,
    state: Mapping[str, State],
    step: int,
    tables: Tables = (),
    log: ChangeLog | None = None,
    snapshot: OpenSnapshot | None = None,
    event_time: int = 0,
    config: Mapping[str, JsonValue] | None = None,
    parts: Mapping[str, State] | None = None,
    time: float | None = None,
    share: float = 1.0,
    state_in_log: bool = False,
    servers: Callable[[], tuple[FileEntry, ...]] | None = None,
    buckets: Iterable[tuple[int, int]] | None = None,
    model_dir: ModelDir | None = None,
) -> PendingCheckpoint:
    """Decide quickly, between two steps, what is saved. `finish()` of the result writes it, on any thread.

    Args:
        path: The checkpoint's folder, local or a URL. A complete checkpoint that exists there is replaced. Until the new one is
            complete, readers find the old one.
        state: Nested tensors, numbers and strings: dense parameters, optimizer, random states, position in the data.
        step: Steps made so far.
        tables: In this process. Equal names are shards of one table. A mapping gives names that differ from the tables' own.
        log: The log of `tables`, in `log/` next to the checkpoint, which then costs what changed since the last commit. Without
            a log all rows are written now, while the caller waits.
        snapshot: One that `write_snapshot` has finished, which this checkpoint completes. None uses the newest one, and writes
            one now if there are rows that neither a snapshot nor the log has.
        event_time: The newest event time trained, seconds since 1970. 0 takes the tables' own.
        config: The resolved configuration of the run, for people and for `inspect`.
        parts: Further states by name, which `read_state(path, name)` reads.
        time: Now, seconds since 1970. None asks the clock.
        share: Share of a processor's time for the thread that writes the changed rows. `hurry()` of the result ends the limit.
        state_in_log: Put `state` into the log as well, its `source` as the position in the data. The commit is then a restore
            point even if the checkpoint is never completed.
        servers: Waits for the checkpoints that parameter servers are writing, and returns their manifests.
        buckets: The ranges of buckets that the tables own, if they are a part of a larger whole.
        model_dir: The one that `path` is in, if the caller holds it.
    """
    states = {"state": state, **(parts or {})}
    for name in states:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise InvalidArgumentError(f"parts: expected names of letters, digits, '-' and '_', got {name!r}")
    home = model_dir or ModelDir.around(path)
    _require_log_of(home, log)
    groups = group_tables(tables)
    pending = PendingCheckpoint(
        model_dir=home,
        name=base_name(path),
        path=str(path),
        manifest=Manifest(
            step=step,
            time=clock.time() if time is None else time,
            event_time=event_time,
            config=dict(config or {}),
            files=(),
            buckets=None if buckets is None else tuple(buckets),
        ),
        states={name: pack_state(value, name) for name, value in states.items()},
        snapshot=snapshot,
        servers=servers,
    )
    try:
        pending.take_tables(groups, log, share, dict(state) if state_in_log else None)
    except BaseException:
        pending.abandon()
        raise
    return pending


def write_checkpoint(
    path: StrPath,
    *,
    state: Mapping[str, State],
    step: int,
    tables: Tables = (),
    log: ChangeLog | None = None,
    full: bool = False,
    event_time: int = 0,
    config: Mapping[str, JsonValue] | None = None,
    parts: Mapping[str, State] | None = None,
    time: float | None = None,
) -> Manifest:
    """Write a checkpoint. When this returns it is complete and survives a power cut.

    Other threads may train meanwhile. The rows are those of the moment the log is cut, at the end. `full` writes a new snapshot
    first. The other arguments are those of `begin_checkpoint`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from monolith.state import is_complete, read_state
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     _ = write_checkpoint(f"{model_dir}/model.ckpt-3", state={"weights": torch.ones(2)}, step=3)
        ...     is_complete(f"{model_dir}/model.ckpt-3"), read_state(f"{model_dir}/model.ckpt-3")
        (True, {'weights': tensor([1., 1.])})
    """
    home = ModelDir.around(path)
    pending = begin_checkpoint(
        path,
        state=state,
        step=step,
        tables=tables,
        log=log,
        snapshot=write_snapshot(home, tables, log, time=time) if full and log is not None else None,
        event_time=event_time,
        config=config,
        parts=parts,
        time=time,
        model_dir=home,
    )
    return pending.finish()


@dataclass(kw_only=True)
class PendingCheckpoint:
    """A checkpoint whose content is decided but not written yet. `finish` may run on any thread while training continues."""

    model_dir: ModelDir
    name: str
    path: str
    manifest: Manifest
    """What is known of it so far. Names of files are those in a new folder."""
    states: Mapping[str, PackedState]
    snapshot: OpenSnapshot | None
    filters: dict[AdmissionFilter, bytes] = field(default_factory=dict)
    """The content of the file of each admission filter, which tables may share."""
    log: ChangeLog | None = None
    """Has the rows."""
    commit: Future[int] | None = None
    """The commit of the segment that it ends with."""
    servers: Callable[[], tuple[FileEntry, ...]] | None = None
    """Waits for what parameter servers write, and returns their manifests."""
    mark: WriterMark | None = None
    """Held while there is something in the folder."""
    generation: str = ""
    """Ends the names of its files, so that none has the name of a file of a checkpoint that exists already."""
    entry: FileEntry | None = None
    """The manifest's file, once it is written."""

    def take_tables(
        self,
        tables: dict[str, list[EmbeddingTable]],
        log: ChangeLog | None,
        share: float,
        logged: dict[str, State] | None = None,
    ) -> None:
        """Take the tables as they are at this moment. `logged` is the state for the log, if it gets one."""
        files: list[FileEntry] = []
        if log is not None:
            entries = {name: table_entry(shards) for name, shards in tables.items()}
            if self.snapshot is None and not log.complete:
                self.snapshot = self._missing_snapshot(tables, log)
        elif tables:
            folder = self._open()
            files, entries = write_tables(folder, f"tables{self.generation}", tables)
        described = {
            name: entries[name].model_copy(update={"shards": tuple(map(self._take_state, shards))})
            for name, shards in tables.items()
        }
        newest = max((shard.max_event_time for entry in described.values() for shard in entry.shards), default=0)
        event_time = self.manifest.event_time or newest
        self.manifest = self.manifest.model_copy(
            update={"tables": described, "files": tuple(files), "event_time": event_time}
        )
        if log is not None:
            self.log = log
            source = None if logged is None else logged.pop("source", None)
            self.commit = log.commit_in_background(
                step=self.manifest.step, event_time=event_time, share=share, dense=logged, source=source
            )

    def finish(self) -> Manifest:
        """Write everything. When this returns the checkpoint is complete and survives a power cut."""
        try:
            folder = self._open()
            manifest = self._with_lineage(self._with_files(folder))
            if self.servers is not None:
                manifest = manifest.model_copy(update={"parts": self.servers()})
            self.entry = self.model_dir.write(self.name, manifest)
        except BaseException:
            self.abandon()
            raise
        with claimed(folder) as nobody_reads:
            if nobody_reads:  # otherwise the files of the replaced checkpoint are removed by the next save
                _remove_unlisted(folder, manifest)
        self._release()
        with contextlib.suppress(StorageError):
            remove_unfinished(self.model_dir.folder)
        return manifest

    def hurry(self) -> None:
        """Write at full speed from now on, because a caller waits."""
        if self.log is not None:
            self.log.hurry()

    def abandon(self) -> None:
        """Give it up and remove what was written for it. What was cut is in the log, or waits for the next cut."""
        if self.commit is not None:
            self.hurry()
            self.commit.exception()
        with contextlib.suppress(CorruptFileError, StorageError):
            if self.snapshot is not None:
                self.snapshot.abandon()
            if self.mark is not None:
                folder = self.model_dir.inside(self.name)
                if folder.size(MANIFEST) is None:
                    self.model_dir.folder.remove(self.name)
                else:
                    _remove_unlisted(folder, self.model_dir.manifest(self.name))
        self._release()

    def _open(self) -> Folder:
        """Begin to write. This is done late, because making a folder durable takes longer than a step may."""
        folder = self.model_dir.inside(self.name)
        if self.mark is None:
            self.mark = WriterMark(folder)
            self.generation = f".{secrets.token_hex(4)}" if set(folder.names()) - {MARK} else ""
        return folder

    def _release(self) -> None:
        if self.mark is not None:
            self.mark.release()

    def _missing_snapshot(self, tables: dict[str, list[EmbeddingTable]], log: ChangeLog) -> OpenSnapshot | None:
        try:
            lineage = self.model_dir.lineage(log.sequence) if log.sequence else None
        except LogGapError as error:
            _log.warning("%s; a snapshot of all rows is written, which does not need that segment", error)
            lineage = None
        return write_snapshot(self.model_dir, tables, log, time=self.manifest.time) if lineage is None else None

    def _take_state(self, table: EmbeddingTable) -> ShardEntry:
        state, admission = table.state(), table.admission
        if admission is not None and admission not in self.filters:
            self.filters[admission] = admission.core.serialize()
        return ShardEntry(
            max_event_time=state.max_event_time,
            updates=state.updates,
            hashnet_scales=tuple(state.hashnet_scales),
            admission=None if admission is None else f"admission-{list(self.filters).index(admission):03d}",
        )

    def _with_files(self, folder: Folder) -> Manifest:
        stems = {name: f"{name}{self.generation}" for name in self.states}
        filters = {f"admission-{number:03d}": data for number, data in enumerate(self.filters.values())}
        contents = {f"{name}{self.generation}.bin": data for name, data in filters.items()}
        for name, packed in self.states.items():
            contents[f"{stems[name]}.json"] = packed.structure
            contents[f"{stems[name]}.safetensors"] = packed.tensor_bytes()
        for name, data in contents.items():
            folder.write(name, data)
        files = [FileEntry.of(name, data) for name, data in contents.items()]
        tables = {name: self._with_filters(entry) if filters else entry for name, entry in self.manifest.tables.items()}
        return self.manifest.model_copy(
            update={"states": stems, "tables": tables, "files": (*self.manifest.files, *files)}
        )

    def _with_filters(self, entry: TableEntry) -> TableEntry:
        shards = tuple(
            shard.model_copy(update={"admission": f"{shard.admission}{self.generation}.bin"})
            if shard.admission is not None
            else shard
            for shard in entry.shards
        )
        return entry.model_copy(update={"shards": shards})

    def _with_lineage(self, manifest: Manifest) -> Manifest:
        if self.commit is None:
            return manifest
        sequence = self.commit.result()
        if self.snapshot is not None:
            self.snapshot.close(sequence)
        lineage = self.model_dir.lineage(sequence)
        if lineage is None:
            raise CorruptFileError(
                f"{self.model_dir}/{LOG}: no snapshot has the rows from before sequence {sequence}; write a full checkpoint"
            )
        _require_tables(lineage.segments[-1], manifest.tables)
        return manifest.model_copy(
            update={"sequence": sequence, "snapshot": lineage.entry, "segments": lineage.segment_entries()}
        )


def _require_log_of(model_dir: ModelDir, log: ChangeLog | None) -> None:
    if log is None:
        return
    if not model_dir.keeps_log or log.folder.resolve() != model_dir.log.folder.resolve():
        expected = Path(model_dir.path) / LOG
        raise InvalidArgumentError(
            f"log: expected the one in {expected}, next to the checkpoint, got {log.folder}; without a log all rows are saved"
        )


def _require_tables(segment: SegmentInfo, tables: Mapping[str, TableEntry]) -> None:
    logged = {table.name for table in segment.tables}
    missing = [name for name in tables if name not in logged]
    if missing or segment.kind != "rows":
        what = f"it has no {', '.join(map(repr, missing))}" if missing else "it has values without optimizer state"
        raise InvalidArgumentError(f"log: expected that of all tables of the checkpoint, with whole rows, but {what}")


def _remove_unlisted(folder: Folder, manifest: Manifest) -> None:
    """Remove what an earlier checkpoint, or an attempt that did not finish, left behind."""
    listed = {MANIFEST, MARK, *(entry.name.partition("/")[0] for entry in manifest.files)}
    for name in folder.names():
        if name not in listed and not name.endswith(LEASE_ENDING):
            # The checkpoint is complete with or without them.
            with contextlib.suppress(StorageError):
                folder.remove(name)
