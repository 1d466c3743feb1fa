"""Snapshots: all rows of all tables, written while they train, and made exact by the log.

A scan of tables that train shows each row at some moment between its begin and its end. The segments of the log after the last
one committed before the begin hold every row that changed since. Replayed up to a cut made after the end they give each row
the value it had at that cut: so the scan may begin and end anywhere, and nobody waits for it.
"""

from __future__ import annotations

import time as clock
from dataclasses import dataclass
from typing import Literal

from monolith.config import Count
from monolith.errors import InvalidArgumentError
from monolith.log import ChangeLog
from monolith.log.commit import Tables, named_tables
from monolith.state.manifest import MANIFEST, Sealed, TableEntry, read_sealed, write_sealed
from monolith.state.storage import LocalFolder, StrPath, open_folder
from monolith.state.table_files import write_tables
from monolith.state.writing import Writing
from monolith.table import EmbeddingTable
from monolith.table.table_file import FileEntry

__all__ = [
    "OpenSnapshot",
    "SNAPSHOTS",
    "SnapshotManifest",
    "group_tables",
    "local_folder",
    "read_snapshot",
    "write_snapshot",
]

SNAPSHOTS = "snapshots"
"""The folder of the model_dir that has them."""


class SnapshotManifest(Sealed):
    """What a snapshot consists of, and between which cuts of the log it was written."""

    format: Literal["monolith-snapshot"] = "monolith-snapshot"
    sequence: Count
    """The last segment before the scan began: the ones after it are to be replayed."""
    closed_by: Count
    """The first segment cut after the scan had ended: the replay must not end before it."""
    time: float
    """When the scan began, seconds since 1970."""
    files: tuple[FileEntry, ...]
    """Everything in the snapshot's folder."""
    tables: dict[str, TableEntry]
    """By the name they have in the log."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


@dataclass(frozen=True, kw_only=True)
class OpenSnapshot:
    """All rows are written, but the log was not cut since: give it to the next `begin_checkpoint`, or `abandon` it."""

    folder: LocalFolder
    writing: Writing
    sequence: int
    time: float
    files: tuple[FileEntry, ...]
    tables: dict[str, TableEntry]

    def close(self, closed_by: int) -> SnapshotManifest:
        """Complete it: `closed_by` is the number of a segment that was cut after `write_snapshot` had returned."""
        manifest = SnapshotManifest(
            sequence=self.sequence, closed_by=closed_by, time=self.time, files=self.files, tables=self.tables
        )
        write_sealed(self.folder, manifest)
        self.writing.end()
        return manifest

    def abandon(self) -> None:
        """Remove it, unless it was closed."""
        if self.folder.size(MANIFEST) is None:
            _remove(self.folder)
        self.writing.end()


def write_snapshot(model_dir: StrPath, tables: Tables, log: ChangeLog, *, time: float | None = None) -> OpenSnapshot:
    """Write all rows of `tables` into a new folder of `<model_dir>/snapshots`; on any thread, while others train and commit.

    `log` is the log of these tables, in `<model_dir>/log`; `time` is now, in seconds since 1970, None asks the clock.
    """
    groups = group_tables(tables)
    sequence, began = log.sequence, clock.time() if time is None else time
    folder = _new_folder(local_folder(model_dir).inside(SNAPSHOTS), sequence)
    writing = Writing(folder)
    try:
        files, entries = write_tables(folder, "tables", groups)
    except BaseException:
        _remove(folder)
        writing.end()
        raise
    return OpenSnapshot(
        folder=folder, writing=writing, sequence=sequence, time=began, files=tuple(files), tables=entries
    )


def read_snapshot(model_dir: StrPath, name: str) -> SnapshotManifest:
    """The manifest of a snapshot; `CorruptFileError` if there is none, or it is damaged or too new."""
    return read_sealed(open_folder(model_dir).inside(f"{SNAPSHOTS}/{name}"), SnapshotManifest)


def group_tables(tables: Tables) -> dict[str, list[EmbeddingTable]]:
    """The shards of each table, by the name it has in log and checkpoints."""
    groups: dict[str, list[EmbeddingTable]] = {}
    for name, table in zip(*named_tables(tables), strict=True):
        groups.setdefault(name, []).append(table)
    for name, shards in groups.items():
        if len({(shard.layout, shard.config.seed) for shard in shards}) > 1:
            raise InvalidArgumentError(
                f"tables: two are named {name!r} and differ; the shards of one table have the same segments and seed, "
                "and different tables need different names"
            )
    return groups


def local_folder(model_dir: StrPath) -> LocalFolder:
    """The model_dir, which must be on a local disk because a log is."""
    folder = open_folder(model_dir)
    if not isinstance(folder, LocalFolder):
        raise InvalidArgumentError(f"{model_dir}: expected a folder on a local disk, which is where a log can be")
    return folder


def _new_folder(snapshots: LocalFolder, sequence: int) -> LocalFolder:
    """Several snapshots may begin after the same segment: on other lines, or because nothing was committed meanwhile."""
    taken, name, number = set(snapshots.names()), f"{sequence:020d}", 1
    while name in taken:
        name, number = f"{sequence:020d}-{number}", number + 1
    return snapshots.inside(name)


def _remove(folder: LocalFolder) -> None:
    LocalFolder(folder.path.parent).remove(folder.path.name)
