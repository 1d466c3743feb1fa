"""Parquet files and datasets, read by Arrow one row group at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from monolith.data.sources.arrow import columns_of, slice_rows, to_batch
from monolith.data.sources.column import Column, checked_columns
from monolith.data.sources.file_source import FileSource
from monolith.data.sources.files import STDIN
from monolith.data.sources.source import Position
from monolith.errors import CorruptFileError, InvalidArgumentError, SchemaError, StorageError
from monolith.features.batch import Batch, nearest_column
from monolith.urls import filesystem_of

__all__ = ["ParquetSource"]


class ParquetSource(FileSource):
    """Batches from Parquet files; only the columns asked for are read, and never more than a row group is held.

    `paths`: URLs, globs or folders. A column given by name alone has the type of the first file: numbers become tensors, lists
    `Ragged`, strings `Ragged` of bytes. Without `columns`, all columns are read. Row groups are dealt out to shards in order.

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
        """Columns given by name with the type that the first file has for them."""
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

    def _start(self) -> Position:
        return {"file": 0, "url": "", "group": 0, "row": 0}

    def _read(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        size = self._batch_size
        held = None
        for at, table in self._groups(position):
            row = int(at["row"])
            # A batch over the edge of a row group is put together first; the rest of the group is converted at once and cut.
            begin = 0 if held is None else min(size - held.num_rows, table.num_rows)
            if held is not None:
                held = pa.concat_tables([held, table.slice(0, begin)])
                if held.num_rows < size:
                    continue
                yield to_batch(held, self.columns), {**at, "row": row + begin}
            end = table.num_rows - (table.num_rows - begin) % size
            if end > begin:
                batch = to_batch(table.slice(begin, end - begin), self.columns)
            for first in range(0, end - begin, size):
                yield slice_rows(batch, first, first + size), {**at, "row": row + begin + first + size}
            held = table.slice(end) if end < table.num_rows else None
        if held is not None and not self._drop_remainder:
            yield to_batch(held, self.columns), {**self._start(), "file": len(self.files)}

    def _groups(self, position: Position) -> Iterator[tuple[Position, pa.Table]]:
        """This shard's row groups from `position` on, each with the position of its first row."""
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
                        yield {**at, "group": group}, file.read(group, fields).slice(row)
                    at["row"] = 0


class _Parquet:
    """An open Parquet file whose errors are ours."""

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

    def __enter__(self) -> _Parquet:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._stream is not None:
            self._stream.close()
