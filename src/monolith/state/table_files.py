"""The rows of tables in files by range of buckets, so that a part of them can be read without the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from monolith import _core
from monolith.errors import CorruptFileError
from monolith.state.manifest import TableEntry, check_sizes
from monolith.state.storage import Folder
from monolith.table import EmbeddingTable, bucket_ranges, read_rows_into
from monolith.table.buckets import NUM_BUCKETS
from monolith.table.table_file import FileEntry, file_checksum

__all__ = ["buckets_of", "in_parallel", "read_table_file", "write_table_files", "write_tables"]

FILE_BYTES = 128 * 2**20
"""About as long as a file gets before a table is spread over more of them."""
MAX_FILES = 64
_NAME = re.compile(r"(\d{4})-(\d{4})(\.\d+)?\.table")

Item = TypeVar("Item")
Result = TypeVar("Result")


def write_tables(
    folder: Folder, place: str, tables: dict[str, list[EmbeddingTable]]
) -> tuple[list[FileEntry], dict[str, TableEntry]]:
    """Write all rows of `tables`, given as the shards of each, below `place`: the files, and which belong to what."""
    files: list[FileEntry] = []
    entries: dict[str, TableEntry] = {}
    for number, (name, shards) in enumerate(tables.items()):
        # A name may be long and hold anything: the number tells tables apart, the rest is for people.
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40]
        written = write_table_files(folder, f"{place}/{number:03d}-{readable}", shards)
        files += written
        entries[name] = table_entry(shards, tuple(entry.name for entry in written))
    return files, entries


def table_entry(shards: Sequence[EmbeddingTable], files: tuple[str, ...] = ()) -> TableEntry:
    """A table as manifests describe it, but for the state of its shards."""
    admission = shards[0].admission
    return TableEntry(
        config=shards[0].config,
        layout=shards[0].layout,
        rows=sum(map(len, shards)),
        files=files,
        admission=None if admission is None else admission.config,
    )


def write_table_files(folder: Folder, place: str, shards: Sequence[EmbeddingTable]) -> list[FileEntry]:
    """Write the rows of one table, whose parts are `shards`, to `<place>/<first bucket>-<last bucket>[.<shard>].table`.

    Safe beside training: each row is whole, of some moment of the call. Files without rows are left out.
    """

    def write(job: tuple[int, range]) -> FileEntry | None:
        number, buckets = job
        shard = f".{number}" if len(shards) > 1 else ""
        name = f"{place}/{buckets.start:04d}-{buckets.stop - 1:04d}{shard}.table"
        return _write(folder, name, shards[number], buckets)

    jobs = [(number, buckets) for number in range(len(shards)) for buckets in _ranges(shards)]
    return [entry for entry in in_parallel(write, jobs) if entry is not None]


def read_table_file(folder: Folder, entry: FileEntry, table: EmbeddingTable, buckets: range) -> None:
    """Upsert the rows of `buckets` that a file has; the file must be as it was written."""
    check_sizes(folder, (entry,))
    with folder.local(entry.name) as path:
        read_rows_into(table, path, buckets, checksum=entry.checksum)


def buckets_of(name: str) -> range:
    """The buckets a table file is about, by its name.

    Example:
        >>> buckets_of("tables/000-item/1024-2047.3.table")
        range(1024, 2048)
    """
    found = _NAME.fullmatch(name.rpartition("/")[2])
    if found is None:
        raise CorruptFileError(f"{name!r}: expected the name of a table file, such as '0000-4095.table'")
    return range(int(found[1]), int(found[2]) + 1)


def in_parallel(call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`call` of each item, two at a time: one waits for the disk while the other computes.

    Example:
        >>> in_parallel(abs, [-1, 2])
        [1, 2]
    """
    with ThreadPoolExecutor(2, thread_name_prefix="monolith-checkpoint") as threads:
        return list(threads.map(call, items))


def _ranges(shards: Sequence[EmbeddingTable]) -> list[range]:
    """Never across the border of two shards that own equal parts, so that each of their files comes from one of them."""
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
