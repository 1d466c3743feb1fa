"""Tables from and to the dumps that the original writes next to its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError

from monolith.console import Progress
from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.original.dump_entries import EntryReader, EntryWriter
from monolith.original.dump_files import (
    DumpFiles,
    DumpRecords,
    SnappyStreamWriter,
    find_shards,
    framed,
    has_dump,
    plain_pieces,
    shard_name,
    split_records,
    unpacked_blocks,
)
from monolith.proto import table_dump_pb2
from monolith.table.admission import AdmissionFilter
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.exchange import insert, replacing_files, row_batches
from monolith.urls import local_path

__all__ = ["dump_counts", "export_dump", "export_multi_dump", "import_dump", "import_multi_dump"]

_JOINED = 4 << 20
_BATCH = 16384
_MOST_SHARDS = 99_999


def import_dump(
    prefix: str | Sequence[str],
    config: TableConfig,
    *,
    admission: AdmissionFilter | None = None,
    optimizer_state: bool = True,
    progress: Progress | None = None,
) -> EmbeddingTable:
    """A new table from a single-table dump of the original, the files `<prefix>-00000-of-00001` and so on.

    Args:
        prefix: path or URL. Give several for a table that was spread over parameter servers. If an id occurs more than once,
            the last one counts, in the order of prefixes and files.
        config: the table to build. Its dims and optimizers must be those of the dump.
        admission: the filter of the new table, which is not applied to the rows of the dump.
        optimizer_state: False takes the weights only, for a table with other optimizers.
        progress: called with the bytes read so far, and with all there are.

    Raises `CorruptFileError` for missing parts and damaged records, `InvalidArgumentError` for rows that do not fit.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from monolith.original import export_dump
        >>> table = EmbeddingTable(TableConfig(name="user", segments=(Segment(dim=4),)))
        >>> table.reinitialize([1, 2], event_time=1700000000).tolist()
        [0, 0]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = export_dump(table, f"{folder}/user")
        ...     copy = import_dump(f"{folder}/user", table.config)
        >>> copy.lookup([1]).tolist() == table.lookup([1]).tolist()
        True
    """
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
    files = DumpFiles([path for each in prefixes for path in find_shards(each)], progress)
    reader = EntryReader(config, optimizer_state=optimizer_state)
    table = EmbeddingTable(config, admission=admission)
    for path in files.paths:
        with files.reading(path) as read:
            for records in split_records(plain_pieces(read), path):
                insert(table, reader.read(records))
    return table


def import_multi_dump(
    prefix: str | Sequence[str],
    configs: Mapping[str, TableConfig],
    *,
    admission: Mapping[str, AdmissionFilter] | None = None,
    optimizer_state: bool = True,
    progress: Progress | None = None,
) -> dict[str, EmbeddingTable]:
    """New tables from a multi-table dump of the original, by their names in the dump.

    Args:
        prefix: path or URL of `<prefix>-00000-of-00001` and `<prefix>.meta-00000-of-00001`, or several of them.
        configs: the tables to build, by their names in the dump. Other tables of the dump are skipped.
        admission: filters of the new tables, by the same names.
        optimizer_state, progress: as in `import_dump`.

    Raises also `InvalidArgumentError` for a table that the dump does not have.
    """
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
    files = DumpFiles([path for each in prefixes for path in find_shards(each)], progress)
    contents = [_contents(path) for each in prefixes for path in find_shards(f"{each}.meta")]
    if len(files.paths) != len(contents):
        raise CorruptFileError(
            f"{prefix}: {len(files.paths)} files of rows, but {len(contents)} .meta files next to them"
        )
    _check_names(prefixes, configs, contents)
    readers = {name: EntryReader(config, optimizer_state=optimizer_state) for name, config in configs.items()}
    filters = admission or {}
    tables = {name: EmbeddingTable(config, admission=filters.get(name)) for name, config in configs.items()}
    for path, tables_in_file in zip(files.paths, contents, strict=True):
        with files.reading(path) as read:
            records = split_records(_joined(unpacked_blocks(read, path)), path)
            for name, some in _by_table(records, tables_in_file, path):
                if name in tables:
                    insert(tables[name], readers[name].read(some))
    return tables


def dump_counts(prefix: str) -> dict[str, int]:
    """How many rows each table of a multi-table dump has, read from its small `.meta` files."""
    counts: dict[str, int] = {}
    for path in find_shards(f"{prefix}.meta"):
        for name, entries in _contents(path):
            counts[name] = counts.get(name, 0) + entries
    return counts


def _contents(path: str) -> list[tuple[str, int]]:
    """Name and number of entries of each table in one file, in their order."""
    tables = []
    with DumpFiles([path]).reading(path) as read:
        for records in split_records(plain_pieces(read), path):
            for place, (start, end) in enumerate(zip(records.starts, records.ends, strict=True)):
                try:
                    table = table_dump_pb2.MultiHashTableMetadata.FromString(records.data[start:end])
                except DecodeError:
                    raise CorruptFileError(f"{records.where(place)}: not a MultiHashTableMetadata message") from None
                tables.append((table.table_name, table.num_entries))
    return tables


def _check_names(
    prefixes: list[str], configs: Mapping[str, TableConfig], contents: list[list[tuple[str, int]]]
) -> None:
    there = sorted({name for tables in contents for name, _ in tables})
    missing = sorted(set(configs) - set(there))
    if missing:
        raise InvalidArgumentError(
            f"{', '.join(prefixes)}: no table {', '.join(map(repr, missing))}; it has {', '.join(map(repr, there))}"
        )


def _by_table(
    records: Iterator[DumpRecords], tables: list[tuple[str, int]], path: str
) -> Iterator[tuple[str, DumpRecords]]:
    """The records with the table they belong to: each file says how many of each follow one another."""
    queue = iter(tables)
    name, left = "", 0
    for some in records:
        at = 0
        while at < len(some.starts):
            while left == 0:
                name, left = next(queue, ("", -1))
            if left < 0:
                raise CorruptFileError(f"{path}: more rows than its .meta file says; they belong to different dumps")
            count = min(left, len(some.starts) - at)
            yield name, some.part(at, at + count)
            at, left = at + count, left - count
    missing = left + sum(entries for _, entries in queue)
    if missing:
        raise CorruptFileError(f"{path}: {missing} rows fewer than its .meta file says; copy the dump again")


def _joined(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Small blocks as larger pieces, so that there is enough to do at a time."""
    waiting: list[bytes] = []
    size = 0
    for block in blocks:
        waiting.append(block)
        size += len(block)
        if size >= _JOINED:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def export_dump(
    table: EmbeddingTable, prefix: str, *, shards: int | None = None, progress: Progress | None = None
) -> list[Path]:
    """Write a table as a single-table dump of the original and return its files. See `import_dump`.

    Args:
        table: it may be trained meanwhile. Each row is consistent.
        prefix: path of the files without `-00000-of-00001`, in the original's checkpoints
            `model.ckpt-<step>.assets/<table name>` with `-` for `:` and `/`.
        shards: number of files, by default one per million rows and at most 4.
        progress: called with the rows written so far, and with all there are.
    """
    count = _checked_shards(shards, len(table))
    writer = EntryWriter(table.config)
    paths = _paths(prefix, count)
    done = 0
    with replacing_files(paths) as files:
        for rows, file in zip(row_batches(table, _BATCH), cycle(files)):
            for records in writer.write(rows):
                file.write(framed(records))
            done += len(rows.ids)
            if progress:
                progress(done, max(done, len(table)))
    return paths


def export_multi_dump(
    tables: Sequence[EmbeddingTable], prefix: str, *, shards: int | None = None, progress: Progress | None = None
) -> list[Path]:
    """Write tables as one multi-table dump of the original, under their names, and return its files.

    Arguments are as in `export_dump`. The `.meta` files are written next to the others.
    """
    total = sum(len(table) for table in tables)
    count = _checked_shards(shards, total)
    names = [table.name for table in tables]
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"tables: expected different names, got {names}")
    writers = [EntryWriter(table.config) for table in tables]
    data, meta = _paths(prefix, count), _paths(f"{prefix}.meta", count)
    done = 0
    # Rows before .meta: as long as the last .meta file is missing, so is the dump.
    with replacing_files([*data, *meta]) as files:
        streams = [SnappyStreamWriter(file.write) for file in files[:count]]
        for table, writer in zip(tables, writers, strict=True):
            entries = [0] * count
            for rows, shard in zip(row_batches(table, _BATCH), cycle(range(count))):
                for records in writer.write(rows):
                    streams[shard].write(framed(records))
                entries[shard] += len(rows.ids)
                done += len(rows.ids)
                if progress:
                    progress(done, max(done, total))
            for shard, file in enumerate(files[count:]):
                file.write(_metadata(table.name, entries[shard]))
        for stream in streams:
            stream.finish()
    return [*data, *meta]


def _metadata(name: str, entries: int) -> bytes:
    message = table_dump_pb2.MultiHashTableMetadata(table_name=name, num_entries=entries).SerializeToString()
    return framed(np.frombuffer(message, np.uint8).reshape(1, -1))


def _checked_shards(shards: int | None, rows: int) -> int:
    if shards is None:
        return min(4, max(1, rows // 1_000_000))
    if not 1 <= shards <= _MOST_SHARDS:
        raise InvalidArgumentError(f"shards: expected 1..{_MOST_SHARDS} files, got {shards}")
    return shards


def _paths(prefix: str, shards: int) -> list[Path]:
    if has_dump(prefix):
        raise InvalidArgumentError(f"{prefix}: there is a dump of that name; remove it or choose another prefix")
    return [Path(local_path(shard_name(prefix, shard, shards), "prefix")) for shard in range(shards)]
