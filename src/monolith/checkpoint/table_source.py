"""Where the rows of a saved state are, whatever kind of restore point it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from monolith.checkpoint.checkpoint_folder import check_complete, read_listed, snapshot_of
from monolith.checkpoint.in_use import in_use
from monolith.checkpoint.lineage import LOG, find_lineage
from monolith.checkpoint.manifest import FileEntry, Manifest, ShardEntry, TableEntry
from monolith.checkpoint.paths import parent_folder
from monolith.checkpoint.restore_points import RestorePoint
from monolith.checkpoint.snapshot import SNAPSHOTS, SnapshotManifest
from monolith.checkpoint.storage import Folder, StrPath, open_folder
from monolith.checkpoint.table_files import buckets_of, in_parallel, read_table_file
from monolith.errors import CorruptFileError, LogGapError
from monolith.log import LogSegment, SegmentInfo, replay
from monolith.table import NUM_BUCKETS, EmbeddingTable

__all__ = ["TableSource", "open_source", "reading"]


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """The tables of a saved state: their rows are in files, and then changed by segments of the log, in order."""

    where: str
    step: int
    time: float
    sequence: int
    tables: Mapping[str, TableEntry]
    checkpoint: Folder
    """Has the admission filters."""
    checkpoint_files: tuple[FileEntry, ...]
    rows: Folder
    """Has the files with rows."""
    row_files: Mapping[str, tuple[FileEntry, ...]]
    """By table."""
    model_dir: Folder
    segments: tuple[FileEntry, ...]

    def read(self, name: str) -> bytes:
        """A file of the checkpoint itself."""
        return read_listed(self.checkpoint, self.checkpoint_files, name)

    def rows_in(self, name: str, buckets: range) -> int:
        """About how many rows a table has in `buckets`; no more than its files could hold, whatever they say."""
        entry = self.tables[name]
        size = sum(file.size for file in (*self.row_files.get(name, ()), *self.segments))
        return min(entry.rows, size // 12) * len(buckets) // NUM_BUCKETS

    def fill(self, tables: Mapping[str, EmbeddingTable], buckets: range) -> None:
        """Give empty `tables`, by their names in the source, the rows they had there in `buckets`."""
        jobs = [
            (entry, table)
            for name, table in tables.items()
            for entry in self.row_files.get(name, ())
            if _overlap(buckets_of(entry.name), buckets)
        ]
        in_parallel(lambda job: read_table_file(self.rows, job[0], job[1], buckets), jobs)
        for entry in self.segments:
            self._replay(entry, tables, buckets)

    def _replay(self, entry: FileEntry, tables: Mapping[str, EmbeddingTable], buckets: range) -> None:
        with self.model_dir.local(entry.name) as path:
            segment = LogSegment(path)
            if (segment.info.size, f"crc32c:{segment.info.checksum:08x}") != (entry.size, entry.checksum):
                raise CorruptFileError(f"{path}: is not the segment that {self.where} was written with")
            replay(segment, tables, buckets=buckets)


@contextlib.contextmanager
def reading(source: StrPath | RestorePoint) -> Iterator[TableSource]:
    """Like `open_source`, and retention removes no checkpoint within the block."""
    path = source.checkpoint if isinstance(source, RestorePoint) else source
    with contextlib.nullcontext() if path is None else in_use(path):
        yield open_source(source)


def open_source(source: StrPath | RestorePoint) -> TableSource:
    """The tables of a checkpoint or of another restore point, of which everything must be there."""
    if not isinstance(source, RestorePoint):
        return _of_checkpoint(str(source))
    return _of_log(source) if source.checkpoint is None else _of_checkpoint(source.checkpoint)


def _of_checkpoint(path: str) -> TableSource:
    manifest, folder, model_dir = check_complete(path), open_folder(path), open_folder(parent_folder(path))
    rows, files = _rows_of(manifest, folder, model_dir)
    return TableSource(
        where=path,
        step=manifest.step,
        time=manifest.time,
        sequence=manifest.sequence,
        tables=manifest.tables,
        checkpoint=folder,
        checkpoint_files=manifest.files,
        rows=rows,
        row_files=files,
        model_dir=model_dir,
        segments=manifest.segments,
    )


def _rows_of(
    manifest: Manifest, folder: Folder, model_dir: Folder
) -> tuple[Folder, Mapping[str, tuple[FileEntry, ...]]]:
    if manifest.snapshot is None:
        return folder, _files_by_table(manifest, str(folder))
    snapshot_folder, snapshot = snapshot_of(manifest.snapshot, model_dir)
    for name, table in snapshot.tables.items():
        if name in manifest.tables and manifest.tables[name].layout != table.layout:
            raise CorruptFileError(f"{snapshot_folder}: table {name!r} has other rows than the checkpoint {folder}")
    return snapshot_folder, _files_by_table(snapshot, str(snapshot_folder))


def _files_by_table(manifest: Manifest | SnapshotManifest, where: str) -> dict[str, tuple[FileEntry, ...]]:
    entries = {entry.name: entry for entry in manifest.files}
    try:
        return {name: tuple(entries[file] for file in table.files) for name, table in manifest.tables.items()}
    except KeyError as error:
        raise CorruptFileError(f"{where}: a table is in {error}, which the manifest does not list") from None


def _of_log(point: RestorePoint) -> TableSource:
    model_dir = open_folder(point.model_dir)
    lineage = find_lineage(point.model_dir, point.sequence)
    if lineage is None:
        raise LogGapError(
            f"{point.model_dir}/{LOG}: nothing leads to sequence {point.sequence} any more; choose a later restore point"
        )
    snapshot = lineage.snapshot
    return TableSource(
        where=f"sequence {point.sequence} of {point.model_dir}/{LOG}",
        step=point.step,
        time=point.time,
        sequence=point.sequence,
        tables=_tables_of(lineage.segments[-1]),
        checkpoint=model_dir,
        checkpoint_files=(),
        rows=model_dir.inside(f"{SNAPSHOTS}/{lineage.name}") if lineage.name is not None else model_dir,
        row_files=_files_by_table(snapshot, str(lineage.name)) if snapshot is not None else {},
        model_dir=model_dir,
        segments=lineage.segment_entries(),
    )


def _tables_of(info: SegmentInfo) -> dict[str, TableEntry]:
    tables: dict[str, TableEntry] = {}
    for part in info.tables:
        state = part.meta.state
        shard = ShardEntry(
            max_event_time=state.max_event_time,
            updates=state.updates,
            hashnet_scales=tuple(state.hashnet_scales),
        )
        earlier = tables[part.name].shards if part.name in tables else ()
        tables[part.name] = TableEntry(config=part.config(), layout=part.layout, rows=0, shards=(*earlier, shard))
    return tables


def _overlap(left: range, right: range) -> bool:
    return max(left.start, right.start) < min(left.stop, right.stop)
