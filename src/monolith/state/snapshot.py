"""Snapshots: all rows of all tables, in files by range of buckets, written while they train and made exact by the log.

A scan of tables that train shows each row at some moment between its begin and its end. The segments of the log after the last
one committed before the begin hold every row that changed since. Replayed up to a cut made after the end, they give each row the
value it had at that cut. The scan may therefore begin and end anywhere, and training does not wait for it.
"""

from __future__ import annotations

import re
import time as clock
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from monolith import _core
from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.log import ChangeLog
from monolith.log.commit import Tables, named_tables
from monolith.state.locks import WriterMark
from monolith.state.manifest import MANIFEST, SnapshotManifest, TableEntry, check_sizes
from monolith.state.model_dir import SNAPSHOTS, ModelDir
from monolith.state.storage import Folder, StrPath
from monolith.table import EmbeddingTable, bucket_ranges, read_rows_into
from monolith.table.buckets import NUM_BUCKETS
from monolith.table.table_file import FileEntry, file_checksum

__all__ = [
    "OpenSnapshot",
    "buckets_of",
    "group_tables",
    "in_parallel",
    "read_table_file",
    "table_entry",
    "write_snapshot",
    "write_tables",
]

FILE_BYTES = 128 * 2**20
"""A table is divided into more files when they would be larger than about this."""
MAX_FILES = 64
_NAME = re.compile(r"(\d{4})-(\d{4})(\.\d+)?\.table")

Item = TypeVar("Item")
Result = TypeVar("Result")


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
class OpenSnapshot:
    """A snapshot with all rows written, but not yet closed by a cut of the log.

    Pass it to the next `begin_checkpoint`, or `abandon` it.
    """

    model_dir: ModelDir
    name: str
    mark: WriterMark
    sequence: int
    time: float
    files: tuple[FileEntry, ...]
    tables: dict[str, TableEntry]

    def close(self, closed_by: int) -> SnapshotManifest:
        """Complete it. `closed_by` is the number of a segment that was cut after `write_snapshot` had returned."""
        manifest = SnapshotManifest(
            sequence=self.sequence, closed_by=closed_by, time=self.time, files=self.files, tables=self.tables
        )
        self.model_dir.write(f"{SNAPSHOTS}/{self.name}", manifest)
        self.mark.release()
        return manifest

    def abandon(self) -> None:
        """Remove it, unless it was closed."""
        snapshots = self.model_dir.folder.inside(SNAPSHOTS)
        if snapshots.inside(self.name).size(MANIFEST) is None:
            snapshots.remove(self.name)
        self.mark.release()


def write_snapshot(
    model_dir: StrPath | ModelDir, tables: Tables, log: ChangeLog, *, time: float | None = None
) -> OpenSnapshot:
    """Write all rows of `tables` into a new folder of `<model_dir>/snapshots`, on any thread, while others train and commit.

    `log` is the log of these tables in `<model_dir>/log`. `time` is now in seconds since 1970, by default from the clock.
    """
    home, groups = ModelDir.of(model_dir), group_tables(tables)
    sequence, began = log.sequence, clock.time() if time is None else time
    # Several snapshots may begin after the same segment: on other lines, or because nothing was committed meanwhile.
    taken, name, number = set(home.snapshots()), f"{sequence:020d}", 1
    while name in taken:
        name, number = f"{sequence:020d}-{number}", number + 1
    snapshots = home.folder.inside(SNAPSHOTS)
    mark = WriterMark(snapshots.inside(name))
    try:
        files, entries = write_tables(snapshots.inside(name), "tables", groups)
    except BaseException:
        snapshots.remove(name)
        mark.release()
        raise
    return OpenSnapshot(
        model_dir=home, name=name, mark=mark, sequence=sequence, time=began, files=tuple(files), tables=entries
    )


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
