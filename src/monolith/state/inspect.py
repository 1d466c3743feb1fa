"""What is in a checkpoint or a model_dir, without loading it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import JsonValue

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.state.checkpoint_folder import check_complete, part_paths, snapshot_of
from monolith.state.manifest import TableEntry, read_manifest
from monolith.state.paths import parent_folder
from monolith.state.restore_points import RestorePoint
from monolith.state.storage import StrPath, open_folder
from monolith.state.table_source import reading
from monolith.table import EmbeddingTable, Entries, TableConfig, bucket_of
from monolith.table.table_file import FileEntry

__all__ = ["CheckpointInspection", "TableInspection", "inspect_checkpoint", "read_row"]


@dataclass(frozen=True, kw_only=True)
class TableInspection:
    """One table of a checkpoint."""

    rows: int
    """When it was saved."""
    shards: int
    row_bytes: int
    """Of one row: weights and optimizer state."""
    layout: str
    """What a row consists of."""
    newest_event_time: int
    config: TableConfig

    @property
    def bytes(self) -> int:
        """Of all rows, wherever they are saved: in files of the checkpoint, in its snapshot, or in the log."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class CheckpointInspection:
    """One checkpoint."""

    path: str
    step: int
    time: float
    """Seconds since 1970."""
    event_time: int
    sequence: int
    """Of the log; 0 without one."""
    problem: str | None
    """Why it cannot be restored; None: everything is there. Contents are checked when they are read."""
    states: tuple[str, ...]
    bytes: int
    """Of its own files."""
    snapshot: str | None
    """The snapshot it begins with, shared with other checkpoints."""
    snapshot_bytes: int
    segments: int
    """How many segments of the log follow the snapshot."""
    segment_bytes: int
    tables: dict[str, TableInspection]
    config: dict[str, JsonValue]
    """The configuration of the run."""
    parts: tuple[CheckpointInspection, ...] = ()
    """What parameter servers have written for it; their tables are counted in `tables`."""


def inspect_checkpoint(path: StrPath) -> CheckpointInspection:
    """What the checkpoint at `path` says of itself.

    Example:
        >>> from monolith.state import write_checkpoint
        >>> _ = write_checkpoint("memory://run-3/model.ckpt-8", state={}, step=8, config={"clip_norm": 1.0})
        >>> found = inspect_checkpoint("memory://run-3/model.ckpt-8")
        >>> found.step, found.config, found.problem
        (8, {'clip_norm': 1.0}, None)
    """
    manifest = read_manifest(path)
    problem, snapshot_bytes = None, 0
    try:
        check_complete(path)
        if manifest.snapshot is not None:
            _, snapshot = snapshot_of(manifest.snapshot, open_folder(parent_folder(path)))
            snapshot_bytes = _total(snapshot.files)
    except (CorruptFileError, StorageError) as error:
        problem = str(error)
    parts = () if problem else tuple(map(inspect_checkpoint, part_paths(manifest, path)))
    tables = {name: _table(entry) for name, entry in manifest.tables.items()}
    return CheckpointInspection(
        path=str(path),
        step=manifest.step,
        time=manifest.time,
        event_time=manifest.event_time,
        sequence=manifest.sequence,
        problem=problem,
        states=tuple(manifest.states),
        bytes=_total(manifest.files),
        snapshot=None if manifest.snapshot is None else manifest.snapshot.name.split("/")[1],
        snapshot_bytes=snapshot_bytes,
        segments=len(manifest.segments),
        segment_bytes=_total(manifest.segments),
        tables=tables | _joined(parts),
        config=dict(manifest.config),
        parts=parts,
    )


def read_row(source: StrPath | RestorePoint, table: str, id_: int) -> Entries | None:
    """The row that `id_` had in a saved table, None if it had none; reads only the files and segments it can be in."""
    bucket = int(bucket_of([id_])[0])
    with reading(source) as saved:
        if table not in saved.tables:
            known = ", ".join(map(repr, saved.tables)) or "none"
            raise InvalidArgumentError(f"table: {saved.where} has no {table!r}; it has {known}")
        found = EmbeddingTable(saved.tables[table].config.model_copy(update={"initial_capacity": 0}))
        saved.fill({table: found}, range(bucket, bucket + 1))
    return found.lookup_entry([id_]) if id_ in found else None


def _table(entry: TableEntry) -> TableInspection:
    return TableInspection(
        rows=entry.rows,
        shards=len(entry.shards),
        row_bytes=EmbeddingTable(entry.config.model_copy(update={"initial_capacity": 0})).row_bytes,
        layout=entry.layout,
        newest_event_time=max((shard.max_event_time for shard in entry.shards), default=0),
        config=entry.config,
    )


def _joined(parts: Iterable[CheckpointInspection]) -> dict[str, TableInspection]:
    """The tables of all parts, each with the sizes of all its parts."""
    tables: dict[str, TableInspection] = {}
    for part in parts:
        for name, table in part.tables.items():
            known = tables.get(name)
            tables[name] = table if known is None else _sum(known, table)
    return tables


def _sum(one: TableInspection, other: TableInspection) -> TableInspection:
    return replace(
        one,
        rows=one.rows + other.rows,
        shards=one.shards + other.shards,
        newest_event_time=max(one.newest_event_time, other.newest_event_time),
    )


def _total(files: tuple[FileEntry, ...]) -> int:
    return sum(entry.size for entry in files)
