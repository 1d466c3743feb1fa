"""`ParquetArchive`: Parquet files with a copy of the joiner's output, for training in batch before the stream."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from monolith.console import RareWarnings
from monolith.data.join.config import JoinConfig
from monolith.data.join.records import RefusedRecord
from monolith.data.join.unit import dead_letter_headers
from monolith.durable import sync_to_disk
from monolith.errors import ConfigError, CorruptFileError, StorageError, StreamGapError
from monolith.streams.stream import Offset, Stream, StreamWriter

__all__ = ["POSITIONS_KEY", "ParquetArchive", "stream_positions"]

POSITIONS_KEY = b"monolith.stream"
"""Key in the metadata of a Parquet file. The value is JSON: `partition`, `first_offset` and `next_offset`."""

_NAME = re.compile(r"(.+)-(\d{5})-(\d{20})-(\d{20})\.parquet")
_FILE_BYTES = 256 << 20
_POLL_RECORDS = 20_000
_log = logging.getLogger(__name__)


def stream_positions(files: Iterable[str | os.PathLike[str]]) -> dict[str, int]:
    """Return where a stream continues after Parquet files of a joiner: the next offset of each partition.

    Raises:
        CorruptFileError: a file is not of a joiner, or cannot be read.
        StreamGapError: a file between two others is missing.

    Example:
        >>> stream_positions([])
        {}
    """
    parts: dict[str, list[tuple[int, int, str]]] = {}
    for path in sorted(os.fspath(file) for file in files):
        covered = _covered(path)
        parts.setdefault(covered["partition"], []).append((covered["first_offset"], covered["next_offset"], path))
    positions = {}
    for partition, ranges in sorted(parts.items()):
        ranges.sort()
        for (_, end, path), (start, _, other) in pairwise(ranges):
            if start != end:
                raise StreamGapError(
                    f"{partition}: {path} ends before offset {end:,} and {other} begins at {start:,}; a file is missing, or "
                    "there are files of two joiners in the folder"
                )
        positions[partition] = ranges[-1][1]
    return positions


def _covered(path: str) -> dict[str, Any]:
    try:
        metadata = pa.parquet.read_schema(path).metadata or {}
        covered: dict[str, Any] = json.loads(metadata[POSITIONS_KEY])
        return {
            "partition": str(covered["partition"]),
            **{name: int(covered[name]) for name in ("first_offset", "next_offset")},
        }
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error
    except (KeyError, ValueError, TypeError, pa.ArrowException):
        raise CorruptFileError(
            f"{path}: has no positions of a stream; expected a Parquet file that `monolith join` has written"
        ) from None


class ParquetArchive:
    """Copies partitions of a stream of JSON records into Parquet files.

    A file has the records from one offset to another and nothing else, and is there completely or not at all. So it does not
    matter when the process is killed: the next one continues after the last file.
    """

    def __init__(
        self,
        config: JoinConfig,
        stream: Stream,
        partitions: Sequence[str],
        dead_letters: StreamWriter | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert config.parquet is not None
        self._config, self._dead_letters, self._clock = config.parquet, dead_letters, clock
        columns = {**self._config.columns, **config.added_columns}
        self._schema = pa.schema([(name, _arrow_type(text)) for name, text in columns.items()])
        self._folder = Path(self._config.folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be made: {error.strerror}") from error
        self._warnings = RareWarnings(_log, seconds=30.0)
        self._parts = {name: _Part(name, self._last_offset(name)) for name in partitions}
        self.rejected = 0
        """Records that do not fit the columns."""
        self._reader = stream.reader()
        positions: dict[str, Offset] = {}
        for name, part in self._parts.items():
            positions[name] = "start" if part.first is None else part.first
        self._reader.assign(positions)

    def advance(self, *, finish: bool = False) -> None:
        """Read what is new, and write the files that are complete. With `finish` also those that are not."""
        while batches := self._reader.poll(min(_POLL_RECORDS, self._config.rows_per_file), 0):
            for records in batches:
                part = self._parts[records.partition]
                part.first = records.offsets[0] if part.first is None else part.first
                part.since = self._clock() if not part.values else part.since
                part.values += records.values
                part.offsets += records.offsets
                part.size += sum(map(len, records.values))
                part.end = records.next_offset
                if len(part.values) >= self._config.rows_per_file or part.size >= _FILE_BYTES:
                    self._write(part)
        for part in self._parts.values():
            if part.values and (finish or self._clock() - part.since >= self._config.file_secs):
                self._write(part)

    def close(self) -> None:
        """Release the reader. Records that are in no file yet will be read again."""
        self._reader.close()

    def _last_offset(self, partition: str) -> int | None:
        """Return where the files of a partition end. None if there are none."""
        topic, _, number = partition.rpartition("/")
        ends = [
            int(found[4])
            for path in self._folder.iterdir()
            if (found := _NAME.fullmatch(path.name)) and (found[1], int(found[2])) == (topic, int(number))
        ]
        return max(ends, default=None)

    def _write(self, part: _Part) -> None:
        assert part.first is not None
        table = self._table(part)
        covered = {"partition": part.name, "first_offset": part.first, "next_offset": part.end}
        table = table.replace_schema_metadata({POSITIONS_KEY: json.dumps(covered).encode()})
        topic, _, number = part.name.rpartition("/")
        path = self._folder / f"{topic}-{int(number):05d}-{part.first:020d}-{part.end:020d}.parquet"
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:
                pa.parquet.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            sync_to_disk(self._folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        part.begin()

    def _table(self, part: _Part) -> pa.Table:
        try:
            return self._parsed(part.values)
        except pa.ArrowException:
            pass
        fit = []
        for offset, value in zip(part.offsets, part.values, strict=True):
            try:
                self._parsed([value])
            except pa.ArrowException as error:
                self._reject(part.name, offset, value, str(error).partition("\n")[0])
            else:
                fit.append(value)
        return self._parsed(fit)

    def _reject(self, partition: str, offset: int, value: bytes, why: str) -> None:
        self.rejected += 1
        self._warnings.warn("%s:%d does not fit parquet.columns and is in no file: %s", partition, offset, why)
        if self._dead_letters is not None:
            refused = RefusedRecord("parquet", partition, offset, None, value)
            self._dead_letters.append(value, headers=dead_letter_headers(refused))

    def _parsed(self, values: list[bytes]) -> pa.Table:
        if not values:
            return self._schema.empty_table()
        # Arrow takes a line for a record.
        lines = b"\n".join(
            [value if b"\n" not in value else json.dumps(json.loads(value)).encode() for value in values]
        )
        return pa.json.read_json(
            io.BytesIO(lines),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            parse_options=pa.json.ParseOptions(explicit_schema=self._schema, unexpected_field_behavior="ignore"),
        )


class _Part:
    """Records of a partition that are in no file yet."""

    def __init__(self, name: str, end: int | None) -> None:
        self.name = name
        self.end = 0 if end is None else end
        self.first = end
        """Where the next file begins. None: with the first record that the stream has."""
        self.begin(end)

    def begin(self, first: int | None = -1) -> None:
        """Begin the next file."""
        self.first = self.end if first == -1 else first
        self.values: list[bytes] = []
        self.offsets: list[int] = []
        self.size, self.since = 0, 0.0


def _arrow_type(text: str) -> pa.DataType:
    depth = text.count("list<")
    if text.count(">") != depth:
        raise ConfigError(f"parquet.columns: expected a type such as list<int64>, got {text!r}")
    kind = getattr(pa, {"bool": "bool_"}.get(inner := text.strip("<>").rpartition("<")[2], inner))()
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind
