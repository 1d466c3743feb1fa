"""Tables from the original's dumps: the files its checkpoints keep in `model.ckpt-<step>.assets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from google.protobuf.message import DecodeError

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.original.dump.dump_files import DumpFiles, Progress, find_shards, plain_pieces
from monolith.original.dump.entry_dump import EntryReader
from monolith.original.dump.records import Records, split_records
from monolith.original.dump.snappy_stream import unpacked_blocks
from monolith.proto import table_dump_pb2
from monolith.table.admission import AdmissionFilter
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.exchange import insert

__all__ = ["dump_counts", "import_dump", "import_multi_dump"]

_JOINED = 4 << 20


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
        prefix: path or URL; several for a table that was spread over parameter servers. If an id occurs more than once,
            the last one counts, in the order of prefixes and files.
        config: the table to build. Its dims and optimizers must be those of the dump.
        admission: the filter of the new table; rows of the dump are not asked about.
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
        configs: the tables to build, by their names in the dump; others in the dump are skipped.
        admission: filters of the new tables, by the same names.
        optimizer_state, progress: as in `import_dump`.

    Raises also `InvalidArgumentError` for a table that the dump does not have.
    """
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
    files = DumpFiles([path for each in prefixes for path in find_shards(each)], progress)
    contents = [_contents(path) for each in prefixes for path in find_shards(f"{each}.meta")]
    if len(files.paths) != len(contents):
        raise CorruptFileError(
            f"{prefix}: {len(files.paths)} files of rows, but {len(contents)} .meta files beside them"
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


def _by_table(records: Iterator[Records], tables: list[tuple[str, int]], path: str) -> Iterator[tuple[str, Records]]:
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
