"""The rows of tables in files by range of buckets, and the tables of a saved state, whatever kind of restore point it is."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from monolith import _core
from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError
from monolith.log import LogSegment, SegmentInfo, replay
from monolith.log.commit import Tables, named_tables
from monolith.log.segment_format import segment_name, sequence_of
from monolith.state.locks import in_use
from monolith.state.manifest import Manifest, ShardEntry, SnapshotManifest, TableEntry, check_sizes, read_listed
from monolith.state.model_dir import LOG, SNAPSHOTS, Lineage, ModelDir
from monolith.state.paths import base_name
from monolith.state.restore_points import RestorePoint, restore_point_of
from monolith.state.storage import Folder, StrPath
from monolith.state_bytes import State
from monolith.table import NUM_BUCKETS, EmbeddingTable, bucket_ranges, read_rows_into
from monolith.table.table_file import FileEntry, file_checksum

__all__ = [
    "ALL",
    "PartedSource",
    "TableSource",
    "group_tables",
    "joined_source",
    "open_source",
    "owned_ranges",
    "read_table_file",
    "reading",
    "saved_shard",
    "shard_buckets",
    "table_entry",
    "write_tables",
]

FILE_BYTES = 128 * 2**20
"""A table is divided into more files when they would be larger than about this."""
MAX_FILES = 64
_NAME = re.compile(r"(\d{4})-(\d{4})(\.\d+)?\.table")
ALL = (range(NUM_BUCKETS),)
"""Every bucket."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def group_tables(tables: Tables) -> dict[str, list[EmbeddingTable]]:
    """Return the shards of each table, by the name it has in log and checkpoints."""
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


def write_tables(
    folder: Folder, place: str, tables: dict[str, list[EmbeddingTable]]
) -> tuple[list[FileEntry], dict[str, TableEntry]]:
    """Write all rows of `tables`, given as the shards of each, below `place`. Returns the files, and the tables with theirs."""
    files: list[FileEntry] = []
    entries: dict[str, TableEntry] = {}
    for number, (name, shards) in enumerate(tables.items()):
        # A name may be long and hold any character: the number is unique, the rest is for people.
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]
        written = _write_table(folder, f"{place}/{number:03d}-{readable}", shards)
        files += written
        entries[name] = table_entry(shards, tuple(entry.name for entry in written))
    return files, entries


def table_entry(shards: Sequence[EmbeddingTable], files: tuple[str, ...] = ()) -> TableEntry:
    """Describe a table for a manifest, without the state of its shards."""
    admission = shards[0].admission
    return TableEntry(
        config=shards[0].config,
        layout=shards[0].layout,
        rows=sum(map(len, shards)),
        files=files,
        admission=None if admission is None else admission.config,
    )


def _write_table(folder: Folder, place: str, shards: Sequence[EmbeddingTable]) -> list[FileEntry]:
    """Write the rows of the table with these `shards` to `<place>/<first bucket>-<last bucket>[.<shard>].table`.

    Safe while the table trains: each row is whole, as of some moment of the call. Files without rows are left out.
    """

    def write(job: tuple[int, range]) -> FileEntry | None:
        number, buckets = job
        shard = f".{number}" if len(shards) > 1 else ""
        name = f"{place}/{buckets.start:04d}-{buckets.stop - 1:04d}{shard}.table"
        return _write(folder, name, shards[number], buckets)

    jobs = [(number, buckets) for number in range(len(shards)) for buckets in _ranges(shards)]
    return [entry for entry in in_parallel(write, jobs) if entry is not None]


def read_table_file(folder: Folder, entry: FileEntry, table: EmbeddingTable, buckets: range) -> None:
    """Upsert the rows of a file that are in `buckets`. The file must be unaltered."""
    check_sizes(folder, (entry,))
    with folder.local(entry.name) as path:
        read_rows_into(table, path, buckets, checksum=entry.checksum)


def buckets_of(name: str) -> range:
    """Return the buckets in the name of a table file.

    Example:
        >>> buckets_of("tables/000-item/1024-2047.3.table")
        range(1024, 2048)
    """
    found = _NAME.fullmatch(name.rpartition("/")[2])
    if found is None:
        raise CorruptFileError(f"{name!r}: expected the name of a table file, such as '0000-4095.table'")
    return range(int(found[1]), int(found[2]) + 1)


def in_parallel(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call `call` with each item, two at a time, so that one waits for the disk while the other computes.

    Example:
        >>> in_parallel(abs, [-1, 2])
        [1, 2]
    """
    jobs = list(items)
    if len(jobs) < 2:
        return [call(item) for item in jobs]
    with ThreadPoolExecutor(2, thread_name_prefix="monolith-checkpoint") as threads:
        return list(threads.map(call, jobs))


def _ranges(shards: Sequence[EmbeddingTable]) -> list[range]:
    """Divide the buckets, never across the border of two equal shards, so that each file comes from one of them."""
    size = sum(len(table) * (table.row_bytes + 12) for table in shards) // len(shards)
    each = max(1, min(MAX_FILES // len(shards), size // FILE_BYTES + 1))
    return [
        range(owned.start + part.start * len(owned) // NUM_BUCKETS, owned.start + part.stop * len(owned) // NUM_BUCKETS)
        for owned in bucket_ranges(len(shards))
        for part in bucket_ranges(each)
    ]


def _write(folder: Folder, name: str, table: EmbeddingTable, buckets: range) -> FileEntry | None:
    with folder.scratch() as scratch:
        path = scratch / "rows.table"
        size = table.save(path, buckets=buckets)
        written = _core.TableFile(str(path))
        if written.rows == 0:
            return None
        entry = FileEntry(name=name, size=size, checksum=file_checksum(written))
        folder.put(name, path)
    return entry


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """The tables of a saved state. Their rows are in files, and are changed by segments of the log, in order."""

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
    ranges: tuple[range, ...] = ALL
    """The buckets whose rows count. Rows of other buckets may exist and are ignored."""
    owned: int = NUM_BUCKETS
    """How many buckets it was saved with."""

    def within(self, ranges: Sequence[range]) -> TableSource:
        """Return the same source with the rows of `ranges` only."""
        return dataclasses.replace(self, ranges=_common(self.ranges, ranges))

    def read(self, name: str) -> bytes:
        """Read a file of the checkpoint itself."""
        return read_listed(self.checkpoint, self.checkpoint_files, name)

    def rows_in(self, name: str, buckets: range) -> int:
        """Estimate how many rows a table has in `buckets`, at most what its files can hold, whatever the manifest says."""
        entry = self.tables[name]
        size = sum(file.size for file in (*self.row_files.get(name, ()), *self.segments))
        wanted = sum(map(len, _common(self.ranges, [buckets])))
        return min(entry.rows, size // 12) * wanted // max(self.owned, 1)

    def fill(self, tables: Mapping[str, EmbeddingTable], buckets: range) -> None:
        """Fill empty `tables`, given by their names in the source, with their rows in `buckets`."""
        owned = _common(self.ranges, [buckets])
        jobs = [
            (entry, table, part)
            for part in owned
            for name, table in tables.items()
            for entry in self.row_files.get(name, ())
            if _common([buckets_of(entry.name)], [part])
        ]
        in_parallel(lambda job: read_table_file(self.rows, *job), jobs)
        for entry in self.segments if owned else ():
            with self.model_dir.local(entry.name) as path, LogSegment(path) as segment:
                if (segment.info.size, f"crc32c:{segment.info.checksum:08x}") != (entry.size, entry.checksum):
                    raise CorruptFileError(f"{path}: is not the segment that {self.where} was written with")
                replay(segment, tables, buckets=None if owned == ALL else owned)


@dataclass(frozen=True, kw_only=True)
class PartedSource(TableSource):
    """The tables of a checkpoint together with those of its parts. Made by `joined_source`."""

    own: TableSource
    parts: tuple[TableSource, ...]

    def within(self, ranges: Sequence[range]) -> TableSource:
        """Return the same source with the rows of `ranges` only. Parts that have none of them are left out."""
        return joined_source(self.own.within(ranges), [part.within(ranges) for part in self.parts])

    def read(self, name: str) -> bytes:
        """Read a file of the checkpoint itself, or of one of its parts."""
        number, _, file = name.rpartition("/")
        return self.parts[int(number)].read(file) if number else self.own.read(name)

    def rows_in(self, name: str, buckets: range) -> int:
        """Estimate how many rows a table has in `buckets`."""
        return sum(source.rows_in(name, buckets) for source in (self.own, *self.parts) if name in source.tables)

    def fill(self, tables: Mapping[str, EmbeddingTable], buckets: range) -> None:
        """Fill empty `tables`, given by their names in the source, with their rows in `buckets`."""
        for source in (self.own, *self.parts):
            source.fill({name: table for name, table in tables.items() if name in source.tables}, buckets)


def joined_source(own: TableSource, parts: Iterable[TableSource]) -> PartedSource:
    """Join the tables of `own` and of `parts`. A table is either in `own`, or its rows are distributed over parts."""
    tables = dict(own.tables)
    kept: list[TableSource] = []
    for part in parts:
        for name, entry in part.tables.items():
            if name in own.tables:
                raise CorruptFileError(f"{own.where}: table {name!r} is in the checkpoint and in a part of it")
            mine = _renamed(entry, len(kept)) if part.ranges else entry.model_copy(update={"shards": (), "rows": 0})
            tables[name] = _together(tables.get(name), mine, f"{own.where}: table {name!r}")
        kept += [part] * bool(part.ranges)
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(TableSource)}
    return PartedSource(**(fields | {"tables": tables}), own=own, parts=tuple(kept))


def _renamed(entry: TableEntry, number: int) -> TableEntry:
    """Prefix the names of its files with the number of the part they are in."""
    shards = tuple(
        shard if shard.admission is None else shard.model_copy(update={"admission": f"{number}/{shard.admission}"})
        for shard in entry.shards
    )
    return entry.model_copy(update={"shards": shards})


def _together(known: TableEntry | None, entry: TableEntry, where: str) -> TableEntry:
    if known is None:
        return entry
    if (known.layout, known.config.seed) != (entry.layout, entry.config.seed):
        raise CorruptFileError(f"{where} has other rows in one part than in another")
    return known.model_copy(update={"shards": (*known.shards, *entry.shards), "rows": known.rows + entry.rows})


def _common(left: Iterable[range], right: Sequence[range]) -> tuple[range, ...]:
    pairs = ((one, other) for one in left for other in right)
    common = (range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return tuple(found for found in common if found)


@contextlib.contextmanager
def reading(source: StrPath | RestorePoint, ranges: Sequence[range] = ALL) -> Iterator[TableSource]:
    """Provide what `open_source` returns, and keep retention from removing the checkpoint within the block."""
    if isinstance(source, RestorePoint) and source.checkpoint is None:
        yield open_source(source, ranges)
        return
    with in_use(source.folder if isinstance(source, RestorePoint) else source):
        yield open_source(source, ranges)


def open_source(source: StrPath | RestorePoint, ranges: Sequence[range] = ALL) -> TableSource:
    """Return the tables of a checkpoint or of another restore point, all of whose files must exist.

    Of the logs of ranks, only those are read that have rows in `ranges` of buckets. The others have no rows in the result.
    """
    if not isinstance(source, RestorePoint):
        if sequence_of(base_name(source)):
            return _of_log(restore_point_of(source), ranges)
        return _of_checkpoint(ModelDir.around(source), str(source))
    if source.checkpoint is None:
        return _of_log(source, ranges)
    return _of_checkpoint(source.home.home_of(source.checkpoint), source.checkpoint)


def _of_checkpoint(model_dir: ModelDir, path: str) -> TableSource:
    name = base_name(path)
    manifest, folder = model_dir.check(name), model_dir.inside(name)
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
        model_dir=model_dir.folder,
        segments=manifest.segments,
        ranges=ranges,
        owned=sum(map(len, ranges)),
    )
    parts = model_dir.parts(name)
    return joined_source(own, [_of_checkpoint(model_dir.home_of(part), part) for part in parts]) if parts else own


def _rows_of(
    manifest: Manifest, folder: Folder, model_dir: ModelDir
) -> tuple[Folder, Mapping[str, tuple[FileEntry, ...]]]:
    if manifest.snapshot is None:
        return folder, _files_by_table(manifest, str(folder))
    snapshot_folder, snapshot = model_dir.snapshot_of(manifest)
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


def _of_log(point: RestorePoint, ranges: Sequence[range]) -> TableSource:
    # The log of a run whose ranks hold the rows has none itself.
    own = _tables_at(point, rows=not point.parts)
    if not point.parts:
        return own
    parts = [_part_of_log(home, sequence, ranges) for home, sequence in point.home.cut_parts(point.sequence)]
    owned = sorted((one.start, one.stop) for part in parts for one in part.ranges)
    if [0, *(stop for _, stop in owned)] != [*(start for start, _ in owned), NUM_BUCKETS]:
        raise CorruptFileError(f"{own.where}: its parts have the buckets {owned}, expected each of {NUM_BUCKETS} once")
    return joined_source(own, parts)


def _part_of_log(home: ModelDir, sequence: int, ranges: Sequence[range]) -> TableSource:
    """Return what a rank had when it committed `sequence`, with the buckets that it says it owned."""
    point = restore_point_of(f"{home}/{LOG}/{segment_name(sequence)}", home)
    with home.log.read(sequence) as segment:
        owned = owned_ranges(segment.source(), str(segment.path))
    source = _tables_at(point, rows=bool(_common(owned, ranges)))
    return dataclasses.replace(source, ranges=owned, owned=sum(map(len, owned)))


def _tables_at(point: RestorePoint, *, rows: bool) -> TableSource:
    """Return the tables of a segment, with what leads to their rows if these are wanted."""
    home, model_dir = point.home, point.home.folder
    lineage = home.lineage(point.sequence) if rows else Lineage(segments=(home.log.info(point.sequence),))
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
        segments=lineage.segment_entries() if rows else (),
    )


def owned_ranges(source: State, where: str) -> tuple[range, ...]:
    """Return the buckets that the holder of the rows owned, which is in the `source` of what a rank writes.

    Example:
        >>> owned_ranges({"buckets": [[0, 2048]]}, "here")
        (range(0, 2048),)
    """
    pairs = source.get("buckets") if isinstance(source, dict) else None
    try:
        ranges = tuple(range(*pair) for pair in pairs)  # type: ignore[union-attr]
    except TypeError:
        raise CorruptFileError(f"{where}: expected the segment of a rank, with its buckets") from None
    if not all(0 <= one.start < one.stop <= NUM_BUCKETS for one in ranges):
        raise CorruptFileError(f"{where}: expected ranges of buckets below {NUM_BUCKETS}, got {pairs}")
    return ranges


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


def shard_buckets(count: int, buckets: range | None = None) -> list[range]:
    """Return the buckets of each of `count` shards in this process: all buckets divided, or the same `buckets` for each.

    Example:
        >>> shard_buckets(2), shard_buckets(1, range(1024))
        ([range(0, 2048), range(2048, 4096)], [range(0, 1024)])
    """
    return bucket_ranges(count) if buckets is None else [buckets] * count


def saved_shard(saved: Sequence[ShardEntry], buckets: range) -> ShardEntry | None:
    """Return the saved shard that had all ids of `buckets`, or None if they were in several."""
    for owned, entry in zip(bucket_ranges(max(len(saved), 1)), saved, strict=False):
        if owned.start <= buckets.start and buckets.stop <= owned.stop:
            return entry
    return None
