"""A table as a Parquet file, for whatever reads Parquet, and back."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from monolith.errors import ConfigError, CorruptFileError, SchemaError, StorageError
from monolith.original.dump.dump_files import Progress
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.exchange.output_files import replacing_files
from monolith.table.exchange.rows import RowColumns, fresh_slots, insert, row_batches
from monolith.urls import local_path

__all__ = ["export_parquet", "import_parquet"]

_CONFIG = b"monolith.table_config"
_SEAL = b"monolith.table_rows"
_SLOT = re.compile(r"\d+/\w+")
_BATCH = 65536


def export_parquet(table: EmbeddingTable, path: str | Path, *, progress: Progress | None = None) -> Path:
    """Write all rows to one Parquet file, a batch at a time, and return its path. Safe beside training, each row whole.

    Columns: `ids` int64, `values` fixed-size list of float32, `times` int64 seconds, and each optimizer slot under its name,
    as `0/norm`. The table's configuration is in the file's metadata, so `import_parquet` needs nothing else.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> table = EmbeddingTable(TableConfig(name="user", segments=(Segment(dim=4),)))
        >>> table.reinitialize([1, 2]).tolist()
        [0, 0]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = export_parquet(table, f"{folder}/user.parquet")
        ...     columns = pq.read_table(file).column_names
        ...     copy = import_parquet(file)
        >>> columns, len(copy)
        (['ids', 'times', 'values', '0/norm'], 2)
    """
    target, described = Path(local_path(path, "path")), table.config.model_dump_json()
    seal, schema = _Seal(described.encode()), _schema(table).with_metadata({_CONFIG: described})
    with (
        replacing_files([target]) as (file,),
        pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        for rows in row_batches(table, _BATCH):
            writer.write_batch(_record_batch(rows, schema))
            seal.add(rows)
            if progress:
                progress(seal.rows, max(seal.rows, len(table)))
        writer.add_key_value_metadata({_SEAL.decode(): seal.text()})
    return target


def import_parquet(
    path: str | Path,
    config: TableConfig | None = None,
    *,
    optimizer_state: bool = True,
    progress: Progress | None = None,
) -> EmbeddingTable:
    """A new table from a Parquet file with the columns of `export_parquet`, written by us or by anyone.

    Args:
        path: the file.
        config: the table to build; None takes the one in the file.
        optimizer_state: False takes the weights only. A file without any slot is read as if it were False; one without
            `times` as if they were 0.
        progress: called with the rows read so far, and with all there are.

    Raises `SchemaError` for columns that do not fit the table, `CorruptFileError` for a damaged file.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return _read(file, str(path), config, optimizer_state, progress)
    except FileNotFoundError as error:
        raise StorageError(f"{path}: cannot read: {error.strerror}") from error
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        if isinstance(error, StorageError):
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise StorageError(f"{path}: cannot read: {error.strerror}") from error
        raise CorruptFileError(f"{path}: damaged, or not a Parquet file: {error}") from None


def _read(
    file: pq.ParquetFile, name: str, config: TableConfig | None, optimizer_state: bool, progress: Progress | None
) -> EmbeddingTable:
    metadata = file.metadata.metadata or {}
    seal = _Seal(metadata.get(_CONFIG, b""))
    config = config or _stored_config(metadata, name)
    fresh = fresh_slots(config)
    columns = _columns(file.schema_arrow, fresh if optimizer_state else {}, name)
    table = EmbeddingTable(config)
    for batch in file.iter_batches(_BATCH, columns=columns):
        rows = _rows(batch, config, fresh, name)
        insert(table, rows)
        seal.add(rows, columns)
        if progress:
            progress(seal.rows, file.metadata.num_rows)
    if _SEAL in metadata:
        seal.check(metadata[_SEAL], file.schema_arrow.names, name)
    return table


def _stored_config(metadata: dict[bytes, bytes], name: str) -> TableConfig:
    if _CONFIG not in metadata:
        raise SchemaError(f"{name}: it does not say what table it holds; give its configuration")
    try:
        return TableConfig.from_json(metadata[_CONFIG].decode())
    except ConfigError as error:
        raise CorruptFileError(f"{name}: its configuration cannot be read: {error}") from None


def _columns(schema: pa.Schema, slots: Iterable[str], name: str) -> list[str]:
    """The columns to read; the state of other optimizers, or half of one, is refused rather than left out."""
    there = set(schema.names)
    stateful = any(_SLOT.fullmatch(column) for column in there)
    wanted = ["ids", "values", *(slots if stateful else ())]
    missing = [column for column in wanted if column not in there]
    if missing:
        raise SchemaError(
            f"{name}: no column {missing[0]!r}; it has {', '.join(sorted(there))}. "
            "For other optimizers, import without optimizer state"
        )
    return [*wanted, "times"] if "times" in there else wanted


def _rows(batch: pa.RecordBatch, config: TableConfig, fresh: dict[str, np.ndarray], name: str) -> RowColumns:
    n = batch.num_rows
    there = set(batch.schema.names)
    slots = {
        slot: _matrix(batch, slot, row.dtype, row.shape[1], name) if slot in there else np.repeat(row, n, axis=0)
        for slot, row in fresh.items()
    }
    times = _vector(batch, "times", name) if "times" in there else np.zeros(n, np.int64)
    if n and (times.min() < 0 or times.max() >= 2**32):
        raise SchemaError(f"{name}: column 'times': expected seconds since 1970 in [0, 2**32)")
    values = _matrix(batch, "values", np.dtype(np.float32), config.dim, name)
    return RowColumns(ids=_vector(batch, "ids", name), times=times, values=values, slots=slots)


def _vector(batch: pa.RecordBatch, column: str, name: str) -> np.ndarray:
    array = batch.column(column)
    if array.type != pa.int64() or array.null_count:
        raise SchemaError(f"{name}: column {column!r}: expected int64 without nulls, got {array.type}")
    return _writable(array)


def _matrix(batch: pa.RecordBatch, column: str, dtype: np.dtype[np.generic], width: int, name: str) -> np.ndarray:
    """A column of lists, [n, width]; lists of any length are accepted if all have this one."""
    array = batch.column(column)
    expected = pa.from_numpy_dtype(dtype)
    is_list = pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type)
    if not is_list or array.type.value_type != expected or array.null_count:
        raise SchemaError(f"{name}: column {column!r}: expected lists of {expected} without nulls, got {array.type}")
    if pa.types.is_list(array.type) and len(array) and set(array.value_lengths().unique().to_pylist()) != {width}:
        raise SchemaError(f"{name}: column {column!r}: expected {width} numbers in each list")
    flat = array.flatten()
    if flat.null_count or len(flat) != len(array) * width:
        raise SchemaError(f"{name}: column {column!r}: expected {width} numbers in each list, got {array.type}")
    return _writable(flat).reshape(-1, width)


def _writable(array: pa.Array) -> np.ndarray:
    return np.array(array.to_numpy(zero_copy_only=False))


def _schema(table: EmbeddingTable) -> pa.Schema:
    def lists(dtype: np.dtype[np.generic], width: int) -> pa.DataType:
        return pa.list_(pa.field("element", pa.from_numpy_dtype(dtype), nullable=False), width)

    fields = [("ids", pa.int64()), ("times", pa.int64()), ("values", lists(np.dtype(np.float32), table.dim))]
    fields += [(slot, lists(row.dtype, row.shape[1])) for slot, row in fresh_slots(table.config).items()]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


def _record_batch(rows: RowColumns, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(rows.ids), pa.array(rows.times)]
    for field, matrix in zip(list(schema)[2:], (rows.values, *rows.slots.values()), strict=True):
        arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Seal:
    """What was written, in numbers: Parquet checks its pages, but not the footer that says where they lie."""

    def __init__(self, config: bytes) -> None:
        self.rows = 0
        self._config = zlib.crc32(config)
        self._sums: dict[str, int] = {}

    def add(self, rows: RowColumns, columns: Iterable[str] | None = None) -> None:
        named = {"ids": rows.ids, "times": rows.times, "values": rows.values, **rows.slots}
        self.rows += len(rows.ids)
        for column in columns or named:
            self._sums[column] = zlib.crc32(np.ascontiguousarray(named[column]).data, self._sums.get(column, 0))

    def text(self) -> str:
        return json.dumps({"rows": self.rows, "config": self._config, "crc32": self._sums})

    def check(self, stored: bytes, columns: list[str], name: str) -> None:
        """Hold what was read against what was written, in a file that has `columns`."""
        try:
            seal = json.loads(stored)
            same = (seal["rows"], seal["config"]) == (self.rows, self._config) and set(seal["crc32"]) <= set(columns)
            same = same and all(seal["crc32"][column] == found for column, found in self._sums.items())
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise CorruptFileError(f"{name}: the rows are not those that were written; the file is damaged")
