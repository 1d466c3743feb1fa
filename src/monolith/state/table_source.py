"""Where the rows of a saved state are, whatever kind of restore point it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from monolith.errors import CorruptFileError, LogGapError
from monolith.log import SegmentInfo
from monolith.state.checkpoint_folder import check_complete, part_paths, snapshot_of
from monolith.state.in_use import in_use
from monolith.state.lineage import LOG, find_lineage
from monolith.state.manifest import Manifest, ShardEntry, TableEntry
from monolith.state.paths import parent_folder
from monolith.state.restore_points import RestorePoint
from monolith.state.saved_tables import ALL, TableSource, joined_source
from monolith.state.snapshot import SNAPSHOTS, SnapshotManifest
from monolith.state.storage import Folder, StrPath, open_folder
from monolith.table.table_file import FileEntry

__all__ = ["TableSource", "open_source", "reading"]


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
    ranges = ALL if manifest.buckets is None else tuple(range(*pair) for pair in manifest.buckets)
    own = TableSource(
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
        ranges=ranges,
        owned=sum(map(len, ranges)),
    )
    parts = part_paths(manifest, path)
    return joined_source(own, [_of_checkpoint(part) for part in parts]) if parts else own


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
            f"{point.model_dir}/{LOG}: tables had rows before sequence {point.sequence} that no snapshot has; choose a later "
            "restore point"
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
