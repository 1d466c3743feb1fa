"""Tables into the original's dumps, so that what was trained here can go on there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np

from monolith.errors import InvalidArgumentError
from monolith.original.dump.dump_files import Progress, has_dump, shard_name
from monolith.original.dump.entry_dump import EntryWriter
from monolith.original.dump.records import framed
from monolith.original.dump.snappy_stream import SnappyStreamWriter
from monolith.proto import table_dump_pb2
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.exchange import replacing_files, row_batches
from monolith.urls import local_path

__all__ = ["export_dump", "export_multi_dump"]

_BATCH = 16384
_MOST_SHARDS = 99_999


def export_dump(
    table: EmbeddingTable, prefix: str, *, shards: int | None = None, progress: Progress | None = None
) -> list[Path]:
    """Write a table as a single-table dump of the original and return its files; see `import_dump`.

    Args:
        table: training goes on beside it; each row is whole.
        prefix: path of the files without `-00000-of-00001`, in the original's checkpoints
            `model.ckpt-<step>.assets/<table name>` with `-` for `:` and `/`.
        shards: number of files; None takes one per million rows, at most 4.
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

    Arguments are as in `export_dump`; the `.meta` files are written beside the others.
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
