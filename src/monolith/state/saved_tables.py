"""The rows of saved tables: those of one checkpoint, or of one and the checkpoints of servers that belong to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from monolith.errors import CorruptFileError
from monolith.log import LogSegment, replay
from monolith.state.checkpoint_folder import read_listed
from monolith.state.manifest import TableEntry
from monolith.state.storage import Folder
from monolith.state.table_files import buckets_of, in_parallel, read_table_file
from monolith.table import NUM_BUCKETS, EmbeddingTable
from monolith.table.table_file import FileEntry

__all__ = ["ALL", "PartedSource", "TableSource", "joined_source"]

ALL = (range(NUM_BUCKETS),)
"""Every bucket."""


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
    ranges: tuple[range, ...] = ALL
    """The buckets whose rows count; others may be there, and are left alone."""
    owned: int = NUM_BUCKETS
    """How many buckets it was saved with."""

    def within(self, ranges: Sequence[range]) -> TableSource:
        """The same source with the rows of `ranges` alone."""
        return dataclasses.replace(self, ranges=_common(self.ranges, ranges))

    def read(self, name: str) -> bytes:
        """A file of the checkpoint itself."""
        return read_listed(self.checkpoint, self.checkpoint_files, name)

    def rows_in(self, name: str, buckets: range) -> int:
        """About how many rows a table has in `buckets`; no more than its files could hold, whatever they say."""
        entry = self.tables[name]
        size = sum(file.size for file in (*self.row_files.get(name, ()), *self.segments))
        wanted = sum(map(len, _common(self.ranges, [buckets])))
        return min(entry.rows, size // 12) * wanted // max(self.owned, 1)

    def fill(self, tables: Mapping[str, EmbeddingTable], buckets: range) -> None:
        """Give empty `tables`, by their names in the source, the rows they had there in `buckets`."""
        for owned in _common(self.ranges, [buckets]):
            self._fill(tables, owned)

    def _fill(self, tables: Mapping[str, EmbeddingTable], buckets: range) -> None:
        jobs = [
            (entry, table)
            for name, table in tables.items()
            for entry in self.row_files.get(name, ())
            if _common([buckets_of(entry.name)], [buckets])
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


@dataclass(frozen=True, kw_only=True)
class PartedSource(TableSource):
    """The tables of a checkpoint together with those of its parts; made by `joined_source`."""

    own: TableSource
    parts: tuple[TableSource, ...]

    def within(self, ranges: Sequence[range]) -> TableSource:
        """The same source with the rows of `ranges` alone; parts that have none of them are left out."""
        return joined_source(self.own.within(ranges), [part.within(ranges) for part in self.parts])

    def read(self, name: str) -> bytes:
        """A file of the checkpoint itself, or of one of its parts."""
        number, _, file = name.rpartition("/")
        return self.parts[int(number)].read(file) if number else self.own.read(name)

    def rows_in(self, name: str, buckets: range) -> int:
        """About how many rows a table has in `buckets`."""
        return sum(source.rows_in(name, buckets) for source in (self.own, *self.parts) if name in source.tables)

    def fill(self, tables: Mapping[str, EmbeddingTable], buckets: range) -> None:
        """Give empty `tables`, by their names in the source, the rows they had there in `buckets`."""
        for source in (self.own, *self.parts):
            source.fill({name: table for name, table in tables.items() if name in source.tables}, buckets)


def joined_source(own: TableSource, parts: Iterable[TableSource]) -> PartedSource:
    """The tables of `own` and of `parts`; a table is in `own`, or its rows are spread over parts."""
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
    """With files named after the number of the part they are in."""
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
