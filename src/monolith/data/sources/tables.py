"""Tables: delimited text (CSV, TSV) and Parquet, read by Arrow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fsspec.implementations.local import LocalFileSystem

from monolith.data.sources.arrow import arrow_type, columns_of, require_values, slice_rows, to_batch
from monolith.data.sources.compressed_files import Compression, StreamDamage, compression_of, open_file, read_stream
from monolith.data.sources.files import STDIN
from monolith.data.sources.source import Column, FileSource, SourcePosition, checked_columns
from monolith.errors import CorruptFileError, InvalidArgumentError, SchemaError, StorageError
from monolith.features.batch import Batch, nearest_column
from monolith.urls import filesystem_of

__all__ = ["CsvSource", "ParquetSource"]

_log = logging.getLogger(__name__)
# Besides the caller's columns a table has the number of each row in its file: rows may be skipped, but positions must not shift.
_ROW = "\0row"
_DELIMITERS = (",", ";", "\t", "|", " ")
_HEADER_BYTES = 1000
_SHOWN_CHARACTERS = 80  # of a text, in a message


class CsvSource(FileSource):
    """Batches from delimited text with a header line, or with the names of all its fields in `names`.

    `paths`: URLs, globs, folders, or "-" for standard input. Files are decompressed by their suffix. An empty field is missing:
    the default of a column with a shape, an empty row otherwise. Ragged columns are texts like `3|1|4`, split at
    `list_separator`. Texts are split only in a column with `nested=True`. A text with a separator in another is logged once. At
    most `max_corrupt` rows that have too few or too many fields, or a field that is not a number, are
    skipped. Shards take whole files in turn, or rows in turn if there are fewer files than shards.

    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "rows.tsv").write_text("user\\ttags\\n1\\t5\\n2\\t\\n3\\t6|7\\n")
        ...     columns = [Column(name="user", shape=()), Column(name="tags")]
        ...     (batch,) = CsvSource(f"{folder}/rows.tsv", columns, batch_size=4, delimiter="\\t")
        >>> batch["user"].tolist(), batch["tags"].to_lists()
        ([1, 2, 3], [[5], [], [6, 7]])
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        columns: Iterable[Column],
        *,
        batch_size: int,
        delimiter: str = ",",
        names: Sequence[str] | None = None,
        list_separator: str = "|",
        compression: Compression = "infer",
        max_corrupt: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        self.columns = checked_columns(columns)
        for column in self.columns:
            if column.nested and column.dtype != "bytes":
                raise InvalidArgumentError(f"column {column.name!r}: delimited text has no lists of lists of numbers")
        # Under their own names once they have a type: two columns may be made of one field.
        self._typed_columns = [column.model_copy(update={"field": None}) for column in self.columns]
        self._delimiter, self._names, self._separator = delimiter, names, list_separator
        compression_of("", compression)
        self._compression = compression
        self._told: set[str] = set()
        super().__init__(paths, batch_size=batch_size, drop_remainder=drop_remainder, max_corrupt=max_corrupt)

    @property
    def skipped(self) -> int:
        """Rows left out in the files read to their end."""
        return int(self._position["skipped"])

    def _by_row(self) -> bool:
        return len(self.files) < self._shard_count

    def _start(self) -> SourcePosition:
        return {"file": 0 if self._by_row() else self._shard_index, "url": "", "row": 0, "skipped": 0}

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        held: list[pa.Table] = []
        for at, table in self._tables(position):
            held.append(table)
            rows = sum(part.num_rows for part in held)
            while rows >= self._batch_size:
                joined = pa.concat_tables(held)
                batch = joined.slice(0, self._batch_size)
                held, rows = [joined.slice(self._batch_size)], rows - self._batch_size
                behind = batch.column(_ROW)[-1].as_py() + 1
                yield to_batch(batch, self._typed_columns), {**at, "row": behind}
        if sum(part.num_rows for part in held) and not self._drop_remainder:
            yield to_batch(pa.concat_tables(held), self._typed_columns), {**self._start(), "file": len(self.files)}

    def _tables(self, position: SourcePosition) -> Iterator[tuple[SourcePosition, pa.Table]]:
        """Yield typed rows from `position` on, block by block, with the file they are from."""
        at = dict(position)
        for index in range(int(position["file"]), len(self.files), 1 if self._by_row() else self._shard_count):
            first = int(at["row"]) if index == at["file"] else 0
            at.update(file=index, url=self.files[index], row=0)
            bad = _BadRows(
                self.files[index], self._max_corrupt, int(at["skipped"]), self._compression, header=self._names is None
            )
            for table in self._blocks(self.files[index], bad):
                if self._by_row():
                    mine = table.column(_ROW).to_numpy() % self._shard_count == self._shard_index
                    table = table.filter(pa.array(mine))
                # Also the rows before `first` are parsed: the bad ones among them count.
                typed = self._typed(table, bad)
                yield dict(at), typed.filter(pc.greater_equal(typed.column(_ROW), first))
            at["skipped"] = bad.count

    def _blocks(self, url: str, bad: _BadRows) -> Iterator[pa.Table]:
        import pyarrow.csv as csv

        fields = list(dict.fromkeys(column.source for column in self.columns))
        options = {
            "read_options": csv.ReadOptions(use_threads=False, column_names=self._names),
            "parse_options": csv.ParseOptions(delimiter=self._delimiter, invalid_row_handler=bad.wrong_fields),
            "convert_options": csv.ConvertOptions(
                include_columns=fields,
                column_types=dict.fromkeys(fields, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
            ),
        }
        with open_file(url, self._compression, 0) as stream:
            checked = _Checked(stream)
            with _our_errors(url, bad, fields, lambda: self._header_hint(checked.first_line, fields)):
                yield from self._numbered(csv.open_csv(pa.PythonFile(checked, mode="r"), **options))

    @staticmethod
    def _numbered(blocks: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        row = 0
        for block in blocks:
            table = pa.Table.from_batches([block])
            yield table.append_column(_ROW, pa.array(np.arange(row, row + table.num_rows)))
            row += table.num_rows

    def _header_hint(self, line: str, fields: Sequence[str]) -> str:
        """Return what to do about a field that the file does not have."""
        if self._names is not None:
            return f"`names` has {', '.join(map(repr, self._names))}"
        others = [mark for mark in _DELIMITERS if mark != self._delimiter and mark in line]
        if self._delimiter not in line and others:
            return f"its first line {line!r} has no {self._delimiter!r}: give delimiter={others[0]!r}"
        there = dict.fromkeys(line.split(self._delimiter))
        missing = next((field for field in fields if field not in there), fields[0])
        hint = nearest_column(there, missing)
        return f"{hint}{'' if hint.endswith('?') else '.'} A file without a header line needs `names`, those of all its fields"

    def _typed(self, table: pa.Table, bad: _BadRows) -> pa.Table:
        """Convert texts to numbers, and drop the rows where that fails."""
        wrong = {
            row: column
            for column in reversed(self.columns)
            for row in self._unparsable(column, table.column(column.source))
        }
        if wrong:
            first = min(wrong)
            text = table.column(wrong[first].source)[first].as_py()
            bad.not_numbers(table.column(_ROW)[first].as_py(), wrong[first], text, len(wrong))
            table = table.take(np.delete(np.arange(table.num_rows), sorted(wrong)))
        require_values(table, self.columns, lambda row: bad.at(table.column(_ROW)[row].as_py()))
        for column in self.columns:
            self._look_for_lists(column, table, bad)
        arrays = [self._parsed(column, table.column(column.source)) for column in self.columns]
        names = [column.name for column in self.columns]
        return pa.table([*arrays, table.column(_ROW)], names=[*names, _ROW])

    def _unparsable(self, column: Column, texts: pa.ChunkedArray) -> Iterator[int]:
        """Yield the rows that Arrow cannot read, found by halving, so that Arrow alone decides what a number is."""
        with contextlib.suppress(pa.ArrowInvalid):
            self._parsed(column, texts)
            return
        if len(texts) == 1:
            yield 0
            return
        half = len(texts) // 2
        yield from self._unparsable(column, texts.slice(0, half))
        yield from (half + row for row in self._unparsable(column, texts.slice(half)))

    def _look_for_lists(self, column: Column, table: pa.Table, bad: _BadRows) -> None:
        """Say once for each column of texts that a text looks like a list: it would be one id, where several were meant."""
        if column.dtype != "bytes" or column.nested or column.name in self._told:
            return
        row = pc.index(pc.match_substring(table.column(column.source), self._separator), True).as_py()
        if row >= 0:
            self._told.add(column.name)
            text = table.column(column.source)[row].as_py()
            _log.warning(
                "%s: column %r: %r is read as one text. If %r separates texts, give the Column nested=True; if not, give "
                "CsvSource another list_separator",
                bad.at(table.column(_ROW)[row].as_py()),
                column.name,
                _short(text),
                self._separator,
            )

    def _parsed(self, column: Column, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        kind = arrow_type(column)
        return pc.cast(pc.split_pattern(texts, self._separator) if pa.types.is_list(kind) else texts, kind)


class _BadRows:
    """Counts rows that are left out, up to a limit."""

    def __init__(self, url: str, limit: int, count: int, compression: Compression, *, header: bool) -> None:
        self._url, self._limit, self.count, self._compression, self._header = url, limit, count, compression, header
        self._left_out: list[int] = []

    def wrong_fields(self, row: Any) -> str:  # noqa: ANN401 - pyarrow.csv.InvalidRow
        """Arrow's callback for a row with too few or too many fields. Returning "error" ends the reading."""
        self.count += 1
        self._left_out.append(row.number)
        _log.warning(
            "%s: a row has %d fields, expected %d: %r",
            self._url,
            row.actual_columns,
            row.expected_columns,
            _short(row.text),
        )
        return "skip" if self.count <= self._limit else "error"

    def not_numbers(self, row: int, column: Column, text: str, count: int) -> None:
        self.count += count
        one, many = ("an integer", "integers") if column.dtype == "int64" else ("a number", "numbers")
        wanted = one if column.shape == () else f"{many} between list separators"
        where = f"{self.at(row)}: column {column.name!r}: expected {wanted}, got {_short(text)!r}"
        if self.count > self._limit:
            raise SchemaError(f"{where} (bad rows so far: {self.count}, max_corrupt is {self._limit})")
        _log.warning("%s; skipped, and %d more", where, count - 1)

    def at(self, row: int) -> str:
        """Return the file and line of a row, which is counted from 0 without the rows that Arrow has left out."""
        line = row + 1 + self._header
        for number in self._left_out:
            line += number <= line
        return f"{self._url}: line {self._with_blank(line)}"

    def _with_blank(self, line: int) -> int:
        """Count the blank lines too, which Arrow skips. Standard input cannot be read again: nothing is known of its lines."""
        if self._url == STDIN:
            return line
        with contextlib.suppress(OSError), open_file(self._url, self._compression, 0) as stream:
            for number, text in enumerate(stream, 1):
                line -= bool(text.strip(b"\r\n"))
                if not line:
                    return number
        return line


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


@contextlib.contextmanager
def _our_errors(url: str, bad: _BadRows, fields: Sequence[str], header_hint: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except pa.ArrowKeyError as error:
        field = next((name for name in fields if f"'{name}'" in str(error)), fields[0])
        raise SchemaError(f"{url}: there is no field {field!r}; {header_hint()}") from None
    except StreamDamage as damage:
        raise CorruptFileError(f"{url}: {damage}") from None
    except pa.ArrowInvalid as error:
        # A file without a byte is a file without rows.
        if "Empty CSV file" not in str(error):
            raise CorruptFileError(f"{url}: {error} ({bad.count} bad rows)") from None


class _Checked:
    """A stream whose damage raises an error of its own."""

    closed = False

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._begin = b""

    @property
    def first_line(self) -> str:
        """The header line, for error messages."""
        return self._begin.partition(b"\n")[0].decode(errors="replace").rstrip("\r")

    def read(self, size: int) -> bytes:
        data = read_stream(self._stream, size)
        self._begin = self._begin or data[:_HEADER_BYTES]
        return data

    def close(self) -> None:
        """Do nothing: the caller that opened the stream closes it."""


class ParquetSource(FileSource):
    """Batches from Parquet files. Only the requested columns are read, and at most one row group is held.

    `paths`: URLs, globs or folders. A column given by name alone has the type of the first file: numbers become tensors, lists
    `Ragged`, strings `Ragged` of bytes. Without `columns`, all columns are read. Row groups are assigned to shards in turn.

    Example:
        >>> import tempfile
        >>> import pyarrow.parquet
        >>> table = pa.table({"user": [1, 2, 3], "tags": [[5], [], [6, 7]], "label": [0.0, 1.0, 1.0]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pa.parquet.write_table(table, f"{folder}/part.parquet", row_group_size=1)
        ...     columns = [Column(name="user", shape=()), Column(name="tags")]
        ...     batches = list(ParquetSource(folder, columns, batch_size=2))
        >>> [batch["tags"].to_lists() for batch in batches]
        [[[5], []], [[6, 7]]]
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        columns: Iterable[Column | str] | None = None,
        *,
        batch_size: int,
        drop_remainder: bool = False,
    ) -> None:
        super().__init__(paths, batch_size=batch_size, drop_remainder=drop_remainder)
        if self.files == [STDIN]:
            raise InvalidArgumentError(
                "paths: Parquet cannot be read from standard input, it begins with its last bytes"
            )
        self.columns = checked_columns(self._typed(columns))

    def _typed(self, columns: Iterable[Column | str] | None) -> Sequence[Column]:
        """Return the columns, with the types of the first file for those given by name."""
        wanted = None if columns is None else ([columns] if isinstance(columns, str) else list(columns))
        if wanted is not None and not any(isinstance(column, str) for column in wanted):
            return cast("list[Column]", wanted)
        with _Parquet(self.files[0]) as file:
            schema = file.schema
        if wanted is None:
            return columns_of(schema)
        missing = [column for column in wanted if isinstance(column, str) and column not in schema.names]
        if missing:
            hint = nearest_column(dict.fromkeys(schema.names), missing[0])
            raise SchemaError(f"columns: {self.files[0]} has no column {missing[0]!r}; {hint}")
        return [columns_of(pa.schema([schema.field(c)]))[0] if isinstance(c, str) else c for c in wanted]

    def _start(self) -> SourcePosition:
        return {"file": 0, "url": "", "group": 0, "row": 0}

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        size = self._batch_size
        held = None
        for at, table in self._groups(position):
            row = int(at["row"])
            # A batch across two row groups is assembled first. The rest of the group is converted at once and cut.
            begin = 0 if held is None else min(size - held.num_rows, table.num_rows)
            if held is not None:
                held = pa.concat_tables([held, table.slice(0, begin)])
                if held.num_rows < size:
                    continue
                yield self._batch(held, at), {**at, "row": row + begin}
            end = table.num_rows - (table.num_rows - begin) % size
            if end > begin:
                batch = self._batch(table.slice(begin, end - begin), at)
            for first in range(0, end - begin, size):
                yield slice_rows(batch, first, first + size), {**at, "row": row + begin + first + size}
            held = table.slice(end) if end < table.num_rows else None
        if held is not None and not self._drop_remainder:
            yield self._batch(held, at), {**self._start(), "file": len(self.files)}

    def _batch(self, table: pa.Table, at: SourcePosition) -> Batch:
        try:
            return to_batch(table, self.columns)
        except SchemaError as error:
            raise SchemaError(f"{at['url']}: {error}") from None

    def _groups(self, position: SourcePosition) -> Iterator[tuple[SourcePosition, pa.Table]]:
        """Yield this shard's row groups from `position` on, each with the position of its first row."""
        fields = list(dict.fromkeys(column.source for column in self.columns))
        at = dict(position)
        for index in range(int(position["file"]), len(self.files)):
            if index != at["file"]:
                at = {"file": index, "url": "", "group": 0, "row": 0}
            at["url"] = self.files[index]
            with _Parquet(self.files[index]) as file:
                for group in range(int(at["group"]), file.num_groups):
                    # Counted from the file's own number, so that no shard has to open all files to know its part.
                    if (index + group) % self._shard_count == self._shard_index:
                        row = int(at["row"])
                        table = file.read(group, fields).slice(row)
                        where = partial(_group_row, f"{self.files[index]}: row group {group}", row)
                        require_values(table, self.columns, where)
                        yield {**at, "group": group}, table
                    at["row"] = 0


def _group_row(group: str, first: int, row: int) -> str:
    return f"{group}, row {first + row}"


STREAM_KEY = b"monolith.stream"
"""Key in the metadata of a Parquet file with the records of a stream that it has: `partition`, `first_offset`, `next_offset`."""


def stream_range(file: str) -> str | None:
    """Return, as JSON, which records of a stream a Parquet file has. None if it does not say."""
    with _Parquet(file) as parquet:
        text = (parquet.schema.metadata or {}).get(STREAM_KEY)
    return None if text is None else text.decode()


def newest_value(file: str, field: str) -> int | None:
    """Return the largest value of an integer column of a Parquet file. None if its statistics do not have it."""
    with _Parquet(file) as parquet:
        return parquet.largest(field)


class _Parquet:
    """An open Parquet file that raises this package's errors."""

    def __init__(self, url: str) -> None:
        import pyarrow.parquet as pq

        self._url = url
        filesystem, path = filesystem_of(url)
        try:
            # Arrow reads local files itself, without a detour through Python for each column.
            self._stream = None if isinstance(filesystem, LocalFileSystem) else filesystem.open(path)
            self._file = pq.ParquetFile(self._stream or path)
        except pa.ArrowInvalid as error:
            raise CorruptFileError(f"{url}: not a Parquet file: {error}") from None
        except OSError as error:
            raise StorageError(f"{url}: cannot read: {error}") from error
        self.num_groups: int = self._file.num_row_groups
        self.schema: pa.Schema = self._file.schema_arrow

    def read(self, group: int, fields: list[str]) -> pa.Table:
        try:
            return self._file.read_row_group(group, columns=fields)
        except (pa.ArrowException, OSError) as error:
            raise CorruptFileError(f"{self._url}: row group {group}: {error}") from None

    def largest(self, field: str) -> int | None:
        """Return the largest value of an integer column, None if the statistics of a row group do not have it."""
        metadata = self._file.metadata
        names = [metadata.schema.column(n).path for n in range(metadata.num_columns)]
        if field not in names:
            return None
        groups = [metadata.row_group(n).column(names.index(field)) for n in range(metadata.num_row_groups)]
        known = [one.statistics for one in groups if one.statistics is not None and one.statistics.has_min_max]
        values = [one.max for one in known if isinstance(one.max, int)]
        return max(values) if values and len(values) == len(groups) else None

    def __enter__(self) -> _Parquet:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._stream is not None:
            self._stream.close()
