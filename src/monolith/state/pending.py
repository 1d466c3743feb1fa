"""`PendingCheckpoint`: what is decided between two steps, and written while the next ones are made."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, StorageError
from monolith.log import ChangeLog, SegmentInfo
from monolith.state.in_use import claimed
from monolith.state.lineage import LOG, find_lineage
from monolith.state.manifest import (
    MANIFEST,
    Manifest,
    ShardEntry,
    TableEntry,
    read_manifest,
    write_sealed,
)
from monolith.state.paths import base_name, parent_folder
from monolith.state.snapshot import OpenSnapshot, write_snapshot
from monolith.state.storage import Folder, LocalFolder, open_folder
from monolith.state.table_files import table_entry, write_tables
from monolith.state.writing import MARK, Writing, remove_unfinished
from monolith.state_bytes import PackedState, State
from monolith.table import AdmissionFilter, EmbeddingTable
from monolith.table.table_file import FileEntry

__all__ = ["PendingCheckpoint"]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PendingCheckpoint:
    """A checkpoint whose content is decided but not written yet. `finish` may run on any thread while training goes on."""

    path: str
    manifest: Manifest
    """What is known of it so far; names of files are those in a new folder."""
    states: Mapping[str, PackedState]
    snapshot: OpenSnapshot | None
    filters: dict[AdmissionFilter, bytes] = field(default_factory=dict)
    """What goes into the file of each admission filter, which tables may share."""
    log: ChangeLog | None = None
    """Has the rows."""
    commit: Future[int] | None = None
    """Of the segment that it ends with."""
    servers: Callable[[], tuple[FileEntry, ...]] | None = None
    """Waits for what parameter servers write; their manifests."""
    writing: Writing | None = None
    """Held while there is something in the folder."""
    generation: str = ""
    """Ends the names of its files, none of which is one of a checkpoint that is there already."""

    def take_tables(
        self,
        tables: dict[str, list[EmbeddingTable]],
        log: ChangeLog | None,
        share: float,
        logged: dict[str, State] | None = None,
    ) -> None:
        """Take what the tables are at this moment; `logged` is the state for the log, if it is to have one."""
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
        self.manifest = self.manifest.model_copy(
            update={
                "tables": described,
                "files": tuple(files),
                "event_time": self.manifest.event_time or newest,
            }
        )
        if log is not None:
            self.log = log
            source = None if logged is None else logged.pop("source", None)
            self.commit = log.commit_in_background(
                step=self.manifest.step,
                event_time=self.manifest.event_time,
                share=share,
                dense=logged,
                source=source,
            )

    def finish(self) -> Manifest:
        """Write everything; when this returns the checkpoint is complete and survives a power cut."""
        try:
            folder = self._open()
            manifest = self._with_lineage(self._with_files(folder))
            if self.servers is not None:
                manifest = manifest.model_copy(update={"parts": self.servers()})
            write_sealed(folder, manifest)
        except BaseException:
            self.abandon()
            raise
        with claimed(self.path) as nobody_reads:
            if nobody_reads:  # otherwise the files of the checkpoint before go with the next save
                _remove_unlisted(folder, manifest)
        self._close()
        with contextlib.suppress(StorageError):
            remove_unfinished(parent_folder(self.path))
        return manifest

    def hurry(self) -> None:
        """Write at full speed from now on: somebody waits."""
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
            if self.writing is not None:
                self._clear()
        self._close()

    def _open(self) -> Folder:
        """Begin to write; not before it must be: making a folder durable takes longer than a step may."""
        folder = open_folder(self.path)
        if self.writing is None:
            self.writing = Writing(folder)
            self.generation = f".{secrets.token_hex(4)}" if set(folder.names()) - {MARK} else ""
        return folder

    def _close(self) -> None:
        if self.writing is not None:
            self.writing.end()

    def _clear(self) -> None:
        folder = open_folder(self.path)
        if folder.size(MANIFEST) is None:
            open_folder(parent_folder(self.path)).remove(base_name(self.path))
        else:
            _remove_unlisted(folder, read_manifest(self.path))

    def _missing_snapshot(self, tables: dict[str, list[EmbeddingTable]], log: ChangeLog) -> OpenSnapshot | None:
        model_dir = parent_folder(self.path)
        try:
            lineage = find_lineage(model_dir, log.sequence) if log.sequence else None
        except LogGapError as error:
            _log.warning("%s; a snapshot of all rows is written, which does not need that segment", error)
            lineage = None
        return write_snapshot(model_dir, tables, log, time=self.manifest.time) if lineage is None else None

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
        filters = {f"admission-{place:03d}": data for place, data in enumerate(self.filters.values())}
        contents = {f"{name}{self.generation}.bin": data for name, data in filters.items()}
        for name, packed in self.states.items():
            contents[f"{stems[name]}.json"] = packed.structure
            contents[f"{stems[name]}.safetensors"] = packed.tensor_bytes()
        for name, data in contents.items():
            folder.write(name, data)
        files = [FileEntry.of(name, data) for name, data in contents.items()]
        tables = {name: self._with_filters(entry) for name, entry in self.manifest.tables.items()}
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
        model_dir = parent_folder(self.path)
        lineage = find_lineage(model_dir, sequence)
        if lineage is None:
            raise CorruptFileError(
                f"{model_dir}/{LOG}: tables had rows before sequence {sequence} that no snapshot has; write a full checkpoint"
            )
        _require_tables(lineage.segments[-1], manifest.tables)
        return manifest.model_copy(
            update={
                "sequence": sequence,
                "snapshot": lineage.snapshot_entry(LocalFolder(model_dir)),
                "segments": lineage.segment_entries(),
            }
        )


def _require_tables(segment: SegmentInfo, tables: Mapping[str, TableEntry]) -> None:
    logged = {table.name for table in segment.tables}
    missing = [name for name in tables if name not in logged]
    if missing or segment.kind != "rows":
        what = f"it has no {', '.join(map(repr, missing))}" if missing else "it has values without optimizer state"
        raise InvalidArgumentError(f"log: expected that of all tables of the checkpoint, with whole rows, but {what}")


def _remove_unlisted(folder: Folder, manifest: Manifest) -> None:
    """What an earlier checkpoint, or an attempt that did not finish, left behind."""
    listed = {MANIFEST, MARK, *(entry.name.partition("/")[0] for entry in manifest.files)}
    for name in folder.names():
        if name not in listed and not name.endswith(".lease"):  # of readers, see `in_use`
            # The checkpoint is complete with or without them.
            with contextlib.suppress(StorageError):
                folder.remove(name)
