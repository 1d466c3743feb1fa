"""Reading what is in a checkpoint or a model_dir without loading it, and verifying all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pydantic import JsonValue

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, MonolithError, StorageError
from monolith.log import LogReader
from monolith.log.segment_format import sequence_of
from monolith.state.index import read_checkpoint_state
from monolith.state.locks import MARK
from monolith.state.manifest import MANIFEST, Manifest, TableEntry, read_listed
from monolith.state.model_dir import DENSE_ONLY, SERVERS, SNAPSHOTS, ModelDir
from monolith.state.paths import base_name
from monolith.state.restore_points import RestorePoint, find_restore_point
from monolith.state.storage import Folder, LocalFolder, StrPath, open_folder
from monolith.state.tables import read_table_file, reading
from monolith.table import NUM_BUCKETS, EmbeddingTable, Entries, TableConfig, bucket_of
from monolith.table.table_file import FileEntry

__all__ = [
    "CheckpointInspection",
    "Problem",
    "TableInspection",
    "Verification",
    "inspect_checkpoint",
    "read_row",
    "verify",
]


@dataclass(frozen=True, kw_only=True)
class TableInspection:
    """One table of a checkpoint."""

    rows: int
    """When it was saved. Training may have continued meanwhile."""
    shards: int
    row_bytes: int
    """Of one row, with weights and optimizer state."""
    layout: str
    """What a row consists of."""
    newest_event_time: int
    config: TableConfig

    @property
    def bytes(self) -> int:
        """Of all rows, whether they are in files of the checkpoint, in its snapshot, or in the log."""
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
    """Of the log. 0 without one."""
    problem: str | None
    """Why it cannot be restored. None if all files exist. Contents are verified when they are read."""
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
    """What parameter servers have written for it. Their tables are counted in `tables`."""


def inspect_checkpoint(path: StrPath) -> CheckpointInspection:
    """Read what the checkpoint at `path` consists of.

    Example:
        >>> from monolith.state import write_checkpoint
        >>> _ = write_checkpoint("memory://run-3/model.ckpt-8", state={}, step=8, config={"clip_norm": 1.0})
        >>> found = inspect_checkpoint("memory://run-3/model.ckpt-8")
        >>> found.step, found.config, found.problem
        (8, {'clip_norm': 1.0}, None)
    """
    home, name = ModelDir.around(path), base_name(path)
    manifest = home.manifest(name)
    problem, snapshot_bytes = None, 0
    try:
        home.check(name)
        if manifest.snapshot is not None:
            snapshot_bytes = home.snapshot_of(manifest)[1].size
    except (CorruptFileError, StorageError) as error:
        problem = str(error)
    parts = () if problem else tuple(map(inspect_checkpoint, home.parts(name)))
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
    """Read the row that `id_` had in a saved table, or None if it had none. Reads only the files it can be in."""
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
    """Return the tables of all parts, each with the sizes of all its parts."""
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


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong."""

    path: str
    """The checkpoint, snapshot, log or folder that it was found in."""
    error: str


@dataclass(kw_only=True)
class Verification:
    """How much `verify` has read, and what is wrong with it."""

    checkpoints: int = 0
    snapshots: int = 0
    segments: int = 0
    servers: int = 0
    """Folders of parameter servers."""
    ranks: int = 0
    """Folders of ranks."""
    unfinished: list[str] = field(default_factory=list)
    """Checkpoints and snapshots without a manifest, as a crash leaves them. They are no problem, since nothing refers to them."""
    problems: list[Problem] = field(default_factory=list)


def verify(path: StrPath, *, progress: Callable[[str], object] = lambda what: None) -> Verification:
    """Read everything in a model_dir, a checkpoint or the folder of a log, and report what is wrong with it.

    Every file is compared with its checksum, every chain of segments is walked, and the newest state must be reachable. Nothing
    is changed, and only one file of a table is in memory at a time.

    Args:
        path: A model_dir or a checkpoint, local or a URL, or the local folder of a log.
        progress: Called with the name of what is read next.

    Raises:
        InvalidArgumentError: There is nothing at `path` that can be checked.

    Example:
        >>> from monolith.state import verify, write_checkpoint
        >>> _ = write_checkpoint("memory://run-9/model.ckpt-5", state={"w": 1.0}, step=5)
        >>> found = verify("memory://run-9")
        >>> found.checkpoints, found.problems
        (1, [])
    """
    found = Verification()
    folder = open_folder(path)
    if isinstance(folder, LocalFolder) and folder.path.is_file():
        raise InvalidArgumentError(f"{folder}: expected a model_dir, a checkpoint or the folder of a log, got a file")
    if folder.size(MANIFEST) is not None:
        home = ModelDir.around(path)
        _verify_checkpoint(home, base_name(path), found, progress)
    elif isinstance(folder, LocalFolder) and any(map(sequence_of, folder.names())):
        _verify_log(LogReader(folder.path), found, progress)
    else:
        _verify(ModelDir(path), found, progress)
    if not (found.checkpoints or found.snapshots or found.segments or found.problems or found.servers or found.ranks):
        raise InvalidArgumentError(
            f"{folder}: expected a model_dir, a checkpoint or the folder of a log; there is nothing"
        )
    return found


def _verify(home: ModelDir, found: Verification, progress: Callable[[str], object]) -> None:
    top = home.folder
    for name in top.names():
        inside = top.inside(name)
        if inside.size(MANIFEST) is not None:
            _verify_checkpoint(home, name, found, progress)
        elif inside.size(MARK) is not None:
            found.unfinished.append(str(inside))
    with _noting(found, top):
        index = read_checkpoint_state(str(top))
        if index is not None and index.model_checkpoint_path not in {problem.path for problem in found.problems}:
            home.home_of(index.model_checkpoint_path).manifest(base_name(index.model_checkpoint_path))
    if home.keeps_log:
        for name in home.snapshots():
            _verify_snapshot(home, name, found, progress)
        _verify_log(home.log, found, progress)
        _verify_newest(home, found)
        for name in top.inside(SERVERS).names():
            part = ModelDir(f"{home}/{SERVERS}/{name}")
            if _is_of_rank(part):
                found.ranks += 1
            else:
                found.servers += 1
            _verify(part, found, progress)
        if top.inside(DENSE_ONLY).names():
            _verify(ModelDir(f"{home}/{DENSE_ONLY}"), found, progress)


def _is_of_rank(home: ModelDir) -> bool:
    """Return whether a rank has written the newest state of `home`. If it is damaged, that is found elsewhere."""
    try:
        source = find_restore_point(home).state().get("source")
    except MonolithError:
        return False
    return isinstance(source, dict) and "rank" in source


def _verify_newest(home: ModelDir, found: Verification) -> None:
    """Check that a run or server could continue from its newest state. Damaged files were found before."""
    try:
        find_restore_point(home)
    except InvalidArgumentError:
        pass  # there is nothing yet
    except LogGapError as error:
        if not any(problem.path == str(home.log.folder) for problem in found.problems):
            found.problems.append(Problem(path=str(home), error=str(error)))
    except MonolithError as error:
        if not found.problems:
            found.problems.append(Problem(path=str(home), error=str(error)))


def _verify_checkpoint(home: ModelDir, name: str, found: Verification, progress: Callable[[str], object]) -> None:
    folder = home.inside(name)
    progress(str(folder))
    found.checkpoints += 1
    with _noting(found, folder):
        manifest = home.check(name)
        _verify_files(folder, manifest.files, manifest.tables)
        _verify_listed_segments(home, manifest, str(folder))
        for part in home.parts(name):
            if not part.startswith(f"{home.path}/{SERVERS}/"):  # those are verified where they are
                _verify_checkpoint(home.home_of(part), base_name(part), found, progress)


def _verify_snapshot(home: ModelDir, name: str, found: Verification, progress: Callable[[str], object]) -> None:
    folder = home.inside(f"{SNAPSHOTS}/{name}")
    if folder.size(MANIFEST) is None:
        found.unfinished.append(str(folder))
        return
    progress(str(folder))
    found.snapshots += 1
    with _noting(found, folder):
        snapshot = home.snapshot(name)
        _verify_files(folder, snapshot.files, snapshot.tables)


def _verify_log(reader: LogReader, found: Verification, progress: Callable[[str], object]) -> None:
    for verdict in reader.verify():
        progress(f"segment {verdict.sequence} of {reader.folder}")
        found.segments += 1
        if verdict.error is not None:
            found.problems.append(Problem(path=str(reader.folder), error=verdict.error))


def _verify_files(folder: Folder, files: tuple[FileEntry, ...], tables: Mapping[str, TableEntry]) -> None:
    owners = {name: entry for entry in tables.values() for name in entry.files}
    for file in files:
        if file.name in owners:
            # A table of its own for each file, which is freed before the next one is read.
            config = owners[file.name].config.model_copy(update={"initial_capacity": 0})
            read_table_file(folder, file, EmbeddingTable(config), range(NUM_BUCKETS))
        else:
            read_listed(folder, files, file.name)


def _verify_listed_segments(home: ModelDir, manifest: Manifest, path: str) -> None:
    """Check that the segments in the log are those that the checkpoint was written with. `_verify_log` reads them."""
    for entry in manifest.segments:
        info = home.log.info(sequence_of(base_name(entry.name)) or 0)
        if f"crc32c:{info.checksum:08x}" != entry.checksum:
            raise CorruptFileError(f"{info.path}: is not the segment that {path} was written with")


@contextlib.contextmanager
def _noting(found: Verification, folder: Folder) -> Iterator[None]:
    """Note what is wrong with `folder`, unless training has removed it meanwhile."""
    try:
        yield
    except MonolithError as error:
        if folder.names():
            found.problems.append(Problem(path=str(folder), error=str(error)))
