"""Tables in formats that other programs read: Parquet, safetensors, and a plain `nn.Embedding`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.numpy import save
from torch import nn

from monolith.console import Progress
from monolith.durable import sync_to_disk
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, SchemaError, StorageError
from monolith.table.arrays import Ids, id_array
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.entries import Entries
from monolith.urls import local_path

__all__ = [
    "IdEmbedding",
    "RowColumns",
    "export_parquet",
    "export_safetensors",
    "fresh_slots",
    "import_parquet",
    "insert",
    "replacing_files",
    "row_batches",
]

_CONFIG = b"monolith.table_config"
_SEAL = b"monolith.table_rows"
_SLOT = re.compile(r"\d+/\w+")
_BATCH = 65536


@dataclass(frozen=True, kw_only=True)
class RowColumns:
    """Some rows of a table."""

    ids: np.ndarray
    """int64 [n]."""
    times: np.ndarray
    """int64 [n]: event time of the last write, seconds."""
    values: np.ndarray
    """float32 [n, dim]: stored weights."""
    slots: dict[str, np.ndarray]
    """Optimizer state by `<segment>/<slot>`: [n, width], float32 or int64."""

    def where(self, chosen: np.ndarray) -> RowColumns:
        """The rows for which `chosen`, bool [n], is true."""
        slots = {name: slot[chosen] for name, slot in self.slots.items()}
        return RowColumns(ids=self.ids[chosen], times=self.times[chosen], values=self.values[chosen], slots=slots)


def insert(table: EmbeddingTable, rows: RowColumns) -> None:
    """Insert rows with weights, optimizer state and times. The last of equal ids wins."""
    if table.config.skip_zero_rows:
        rows = rows.where(np.any(rows.values, axis=1))
    entries = Entries(
        ids=torch.from_numpy(rows.ids),
        found=torch.ones(len(rows.ids), dtype=torch.bool),
        values=torch.from_numpy(rows.values),
        slots={name: torch.from_numpy(slot) for name, slot in rows.slots.items()},
        times=torch.from_numpy(rows.times),
    )
    table.insert_rows(rows.ids, rows.times, table.encode(entries))


def row_batches(table: EmbeddingTable, batch_size: int = 65536) -> Iterator[RowColumns]:
    """Yield all rows of `table` in batches. Safe during training: each row is read whole."""
    for entries in table.iter_batches(batch_size):
        yield RowColumns(
            ids=entries.ids.numpy(),
            times=entries.times.numpy(),
            values=entries.values.numpy(),
            slots={name: slot.numpy() for name, slot in entries.slots.items()},
        )


def fresh_slots(config: TableConfig) -> dict[str, np.ndarray]:
    """Each slot of a row that has had no gradient: [1, width]. It is the same for all ids."""
    table = EmbeddingTable(config.model_copy(update={"initial_capacity": 0}))
    if config.mode == "training":
        table.reinitialize([0])
    return {name: slot.numpy()[:1] for name, slot in table.lookup_entry([0]).slots.items()}


@contextlib.contextmanager
def replacing_files(paths: Sequence[Path]) -> Iterator[list[IO[bytes]]]:
    """Open a file to write for each path. On exit all are synced and renamed, on an error none is.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     target = Path(folder, "new", "a.bin")
        ...     with replacing_files([target]) as (file,):
        ...         size = file.write(b"abc")
        ...     target.read_bytes()
        b'abc'
    """
    suffix = f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = [path.with_name(path.name + suffix) for path in paths]
    try:
        for folder in {path.parent for path in paths}:
            folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            files: list[IO[bytes]] = [opened.enter_context(path.open("xb")) for path in temporary]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for source, target in zip(temporary, paths, strict=True):
            source.replace(target)
        for folder in {path.parent for path in paths}:
            sync_to_disk(folder)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{error.filename or paths[0]}: cannot write: {error.strerror or error}") from error
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):  # most often it has its name by now
                path.unlink()


def export_parquet(table: EmbeddingTable, path: str | Path, *, progress: Progress | None = None) -> Path:
    """Write all rows to one Parquet file, a batch at a time, and return its path. Safe during training: each row is
    read whole.

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
        config: the table to build. None takes the one in the file.
        optimizer_state: False takes the weights only. A file without any slot is read as if it were False.
            Without a column `times`, all times are 0.
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
    """Returns the columns to read. State of other optimizers, or an incomplete one, is refused rather than ignored."""
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
    """Returns a column of lists as [n, width]. Variable-length lists are accepted if all have this length."""
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
    """Counts and checksums of what was written: Parquet checks its pages, but not the footer that locates them."""

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


def export_safetensors(table: EmbeddingTable, path: str | Path) -> Path:
    """Write all rows to one safetensors file and return its path. Row i of every tensor belongs to `ids[i]`.

    Tensors are named like the columns of `export_parquet`. The configuration is in the metadata as `table_config`. All rows are
    in memory twice during the call: use Parquet for a large table.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from safetensors.torch import load_file
        >>> table = EmbeddingTable(TableConfig(name="user", segments=(Segment(dim=4),)))
        >>> table.reinitialize([7]).tolist()
        [0]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tensors = load_file(export_safetensors(table, f"{folder}/user.safetensors"))
        >>> sorted(tensors), tensors["values"].shape
        (['0/norm', 'ids', 'times', 'values'], torch.Size([1, 4]))
    """
    target = Path(local_path(path, "path"))
    data = save(table.to_numpy(), metadata={"table_config": table.config.model_dump_json()})
    with replacing_files([target]) as (file,):
        file.write(data)
    return target


class IdEmbedding(nn.Module):
    """`nn.Embedding` over the ids a table had, as `EmbeddingTable.lookup` read them.

    Position 0 stands for every id that is not in `ids`: it is zero, and as `padding_idx` stays zero in training. Position
    i + 1 is `ids[i]`, and `ids` ascend. A training table reads initial values for ids without a row, this reads zeros, as a
    serving table does.

    Shapes: ids [*] -> float32 [*, dim].

    Example:
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from monolith.table import Ones
        >>> table = EmbeddingTable(TableConfig(name="user", segments=(Segment(dim=2, initializer=Ones()),)))
        >>> table.reinitialize([50, -3]).tolist()
        [0, 0]
        >>> frozen = IdEmbedding.from_table(table)
        >>> frozen.ids.tolist(), frozen.positions(torch.tensor([50, 7])).tolist()
        ([-3, 50], [2, 0])
        >>> frozen(torch.tensor([50, 7])).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """

    ids: torch.Tensor
    """int64 [n], ascending."""

    def __init__(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        if ids.dtype != torch.int64 or ids.ndim != 1 or bool((ids[1:] <= ids[:-1]).any()):
            raise InvalidArgumentError("ids: expected int64 [n], ascending and each once")
        if values.ndim != 2 or len(values) != len(ids):
            raise InvalidArgumentError(f"values: expected [{len(ids)}, dim], one row per id, got {list(values.shape)}")
        self.register_buffer("ids", ids)
        weight = torch.cat([values.new_zeros(1, values.shape[1]), values])
        self.embedding = nn.Embedding(len(weight), weight.shape[1], padding_idx=0, _weight=weight)

    @classmethod
    def from_table(cls, table: EmbeddingTable, ids: Ids | None = None) -> IdEmbedding:
        """The embeddings of `ids`, or of every id that has a row now."""
        wanted = [batch.ids.numpy() for batch in table.iter_batches()] if ids is None else [id_array(ids).reshape(-1)]
        unique = np.unique(np.concatenate([np.empty(0, np.int64), *wanted]))
        return cls(torch.from_numpy(unique), table.lookup(unique))

    def positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the row of each id in `embedding.weight`, int64 of the shape of `ids`. 0 if it has none."""
        if not len(self.ids):
            return torch.zeros_like(ids)
        near = torch.searchsorted(self.ids, ids).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[near] == ids, near + 1, 0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of `ids`."""
        embedded: torch.Tensor = self.embedding(self.positions(ids))
        return embedded
