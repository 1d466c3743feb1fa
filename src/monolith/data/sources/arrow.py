"""Arrow arrays as batch columns, without a copy where types and nulls allow it, and Python iterables as sources."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.dlpack import from_dlpack

from monolith.data.sources.source import Column, Source, SourcePosition, checked_columns, nested_entries
from monolith.errors import InvalidArgumentError, SchemaError
from monolith.features import Ragged
from monolith.features.batch import Batch

__all__ = [
    "IteratorSource",
    "arrow_type",
    "columns_of",
    "decoded_dictionary_bytes",
    "decompressed_bytes",
    "missing_value",
    "require_values",
    "slice_rows",
    "to_batch",
]

_TYPES = {"int64": pa.int64(), "float32": pa.float32(), "float64": pa.float64(), "bytes": pa.binary()}


def arrow_type(column: Column) -> pa.DataType:
    """Return the type of an Arrow array that fits the column exactly.

    Example:
        >>> arrow_type(Column(name="tags", dtype="bytes", nested=True))
        ListType(list<item: binary>)
    """
    kind = _TYPES[column.dtype]
    lists = (column.nested + (column.shape is None and column.dtype != "bytes")) if not column.shape else 1
    for _ in range(lists):
        kind = pa.list_(kind)
    return kind


def columns_of(schema: pa.Schema) -> list[Column]:
    """Return a column for each field of `schema`: lists are ragged, lists of lists nested, everything else one value per row.

    Example:
        >>> [c.dtype for c in columns_of(pa.schema([("id", pa.int32()), ("tags", pa.list_(pa.string()))]))]
        ['int64', 'bytes']
    """
    return [_column_of(field) for field in schema]


def _column_of(field: pa.Field) -> Column:
    kind, depth = field.type, 0
    shape: tuple[int, ...] = ()
    if pa.types.is_fixed_size_list(kind):
        shape, kind = (kind.list_size,), kind.value_type
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = _is_text(kind)
    if depth + text > 2 or (shape and (depth or text)):
        raise SchemaError(f"column {field.name!r}: {field.type} cannot be a column of a batch; leave it out of columns")
    if text:
        return Column(name=field.name, dtype="bytes", nested=depth == 1)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise SchemaError(
            f"column {field.name!r}: {field.type} cannot be a column of a batch; cast it, or leave it out of columns"
        )
    integers = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    dtype = "int64" if integers else "float64" if kind == pa.float64() else "float32"
    return Column.model_validate(
        {"name": field.name, "dtype": dtype, "nested": depth == 2, "shape": None if depth else shape}
    )


def to_batch(table: pa.Table, columns: Sequence[Column]) -> Batch:
    """Return the rows of `table` as a batch. A column that is missing or cannot be converted raises `SchemaError`.

    Example:
        >>> table = pa.table({"user": [1, 2], "tags": [[5], None]})
        >>> batch = to_batch(table, [Column(name="user", shape=()), Column(name="tags")])
        >>> batch["user"].tolist(), batch["tags"].to_lists()
        ([1, 2], [[5], []])
    """
    batch: Batch = {}
    for column in columns:
        index = table.schema.get_field_index(column.source)
        if index < 0:
            raise SchemaError(
                f"column {column.name!r}: there is no {column.source!r}; there are {', '.join(table.column_names)}"
            )
        chunks = table.column(index)
        array = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
        try:
            batch.update(_entries(column, array))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(f"column {column.name!r}: {array.type} cannot become {column.dtype}: {error}") from None
    return batch


# Numbers of fields and of kinds of messages, from Message.fbs of the Arrow format.
_VERSION, _KIND, _HEADER, _BODY_LENGTH, _CUSTOM_METADATA = range(5)
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_DATA, _BUFFERS, _COMPRESSION = 1, 2, 3
_V5 = 4


def decompressed_bytes(stream: bytes) -> tuple[int, bool]:
    """Return how many bytes reading an Arrow IPC stream allocates to decompress buffers, and whether it has dictionaries.

    A compressed buffer says its length, and Arrow allocates so much before it decompresses anything.

    Raises:
        ValueError: the stream is damaged.

    Example:
        >>> table = pa.table({"user": [7] * 1000})
        >>> sink = pa.BufferOutputStream()
        >>> with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        ...     writer.write_table(table)
        >>> decompressed_bytes(sink.getvalue().to_pybytes())
        (8000, False)
    """
    total, position, has_dictionaries = 0, 0, False
    while position + 4 <= len(stream):
        size = _number(stream, "<i", position)
        position += 4
        if size == -1:
            size = _number(stream, "<i", position)
            position += 4
        if size == 0:
            break
        root, body = _target(stream, position), position + size
        kind = _field(stream, root, _KIND, "<B")
        length = _field(stream, root, _BODY_LENGTH, "<q")
        if size < 0 or length < 0:
            raise ValueError("a message has a negative length")
        has_dictionaries |= kind == _DICTIONARY_BATCH
        if kind in (_DICTIONARY_BATCH, _RECORD_BATCH):
            if _field(stream, root, _VERSION, "<h") < _V5 and _field_position(stream, root, _CUSTOM_METADATA):
                raise ValueError("batches of format V4 with metadata may be compressed in a way of their own; write V5")
            batch = _table(stream, root, _HEADER)
            batch = _table(stream, batch, _DATA) if kind == _DICTIONARY_BATCH else batch
            if _field_position(stream, batch, _COMPRESSION):
                total += _lengths_before_buffers(stream, batch, body)
        position = body + length
    return total, has_dictionaries


def _lengths_before_buffers(stream: bytes, batch: int, body: int) -> int:
    buffers = _table(stream, batch, _BUFFERS)
    total = 0
    for index in range(_number(stream, "<I", buffers)):
        entry = buffers + 4 + 16 * index
        offset, length = _number(stream, "<q", entry), _number(stream, "<q", entry + 8)
        if length > 0:
            # -1 says that it is not compressed. Arrow refuses other negative lengths.
            total += max(0, _number(stream, "<q", body + offset))
    return total


def _number(data: bytes, kind: str, position: int) -> int:
    # struct counts negative positions from the end.
    if position < 0:
        raise ValueError("a position is outside of the stream")
    try:
        number: int = struct.unpack_from(kind, data, position)[0]
    except struct.error:
        raise ValueError("a position is outside of the stream") from None
    return number


def _field_position(data: bytes, table: int, field: int) -> int:
    """Return where a field of a FlatBuffers table is. 0 if it has none."""
    vtable = table - _number(data, "<i", table)
    slot = 4 + 2 * field
    offset = _number(data, "<H", vtable + slot) if slot < _number(data, "<H", vtable) else 0
    return table + offset if offset else 0


def _field(data: bytes, table: int, field: int, kind: str) -> int:
    position = _field_position(data, table, field)
    return _number(data, kind, position) if position else 0


def _target(data: bytes, position: int) -> int:
    return position + _number(data, "<I", position)


def _table(data: bytes, table: int, field: int) -> int:
    """Return where the table, or the vector, is that a field refers to."""
    position = _field_position(data, table, field)
    if not position:
        raise ValueError("a field is missing")
    return _target(data, position)


def decoded_dictionary_bytes(table: pa.Table) -> int:
    """Return the bytes of the strings in columns with a dictionary, each as often as rows refer to it.

    Example:
        >>> decoded_dictionary_bytes(pa.table({"tag": pa.array(["hello", "hello", "you"]).dictionary_encode()}))
        13
    """
    total = 0
    for column in table.columns:
        if not pa.types.is_dictionary(column.type):
            continue
        if not _is_text(column.type.value_type):
            # Lists can hold as much as strings, and numbers are as long as what refers to them or a little more.
            if pa.types.is_nested(column.type.value_type):
                raise SchemaError(f"{column.type} cannot be a column of a batch")
            continue
        for chunk in column.chunks:
            lengths = pc.cast(pc.fill_null(pc.binary_length(chunk.dictionary), 0), pa.int64())
            total += pc.sum(pc.take(lengths, chunk.indices)).as_py() or 0
    return total


def slice_rows(batch: Batch, begin: int, end: int) -> Batch:
    """Return the rows [begin, end) of a batch, sharing its memory.

    Example:
        >>> slice_rows({"tags": Ragged.from_lists([[1], [2, 3], [4]])}, 1, 3)["tags"].to_lists()
        [[2, 3], [4]]
    """
    part: Batch = {}
    for name, rows in batch.items():
        if isinstance(rows, torch.Tensor):
            part[name] = rows[begin:end]
        else:
            splits = rows.offsets.numpy()[begin : end + 1]
            part[name] = Ragged(rows.values[splits[0] : splits[-1]], splits - splits[0])
    return part


def _entries(column: Column, array: pa.Array) -> Batch:
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    if column.dtype == "bytes":
        return _string_entries(column, array)
    if column.shape is not None:
        return {column.name: _fixed(column, array)}
    if not column.nested:
        values, splits = _rows(column, array)
        return {column.name: Ragged(_numbers(column, values), splits)}
    inner, list_splits = _rows(column, array)
    values, splits = _rows(column, inner)
    lengths = Ragged(np.diff(splits), list_splits)
    return nested_entries(column, Ragged(_numbers(column, values), splits[list_splits]), lengths)


def _string_entries(column: Column, array: pa.Array) -> Batch:
    lists = None
    if column.nested:
        array, lists = _rows(column, array)
    if not _is_text(array.type):
        raise _wrong(column, array, "strings" if lists is None else "lists of strings")
    array = pc.cast(pc.fill_null(array, b"" if pa.types.is_binary(array.type) else ""), pa.large_binary())
    _, offsets, data = array.buffers()
    splits = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    size = int(splits[-1] - splits[0])
    data = pa.py_buffer(b"") if data is None else data
    values = from_dlpack(pa.Array.from_buffers(pa.uint8(), size, [None, data], offset=int(splits[0])))
    splits = splits - splits[0]
    if lists is None:
        return {column.name: Ragged(values, splits)}
    return nested_entries(column, Ragged(values, splits[lists]), Ragged(np.diff(splits), lists))


def _fixed(column: Column, array: pa.Array) -> torch.Tensor:
    shape = column.shape or ()
    width = math.prod(shape)
    if not _is_list(array.type) and not pa.types.is_fixed_size_list(array.type):
        if width != 1:
            raise _wrong(column, array, f"lists of {width}")
        return _numbers(column, _filled(column, array)).reshape(-1, *shape)
    if array.null_count:
        if column.default is None:
            raise SchemaError(f"row {_first_null(array)} of the batch: {missing_value(column)}")
        filler = pa.scalar([column.default] * width, pa.list_(array.type.value_type))
        array = pc.if_else(pc.is_valid(array), pc.cast(array, filler.type), filler)
    values, splits = _rows(column, array)
    lengths = np.diff(splits)
    if (lengths != width).any():
        row = int((lengths != width).argmax())
        raise SchemaError(f"column {column.name!r}: row {row} of the batch has {lengths[row]} values, expected {width}")
    return _numbers(column, _filled(column, values)).reshape(-1, *shape)


def _rows(column: Column, array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Return the elements of a list array and its offsets. A null row is empty. Without lists, each value is a row."""
    if not _is_list(array.type) and not pa.types.is_fixed_size_list(array.type):
        if column.nested:
            raise _wrong(column, array, "lists")
        valid = np.asarray(array.is_valid())
        return array.drop_null(), np.concatenate([[0], valid.cumsum()])
    if array.null_count or pa.types.is_fixed_size_list(array.type):
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), dtype=np.int64)
        return pc.list_flatten(array), np.concatenate([[0], lengths.cumsum()])
    offsets = array.offsets.to_numpy().astype(np.int64, copy=False)
    return array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])), offsets - offsets[0]


def _filled(column: Column, array: pa.Array) -> pa.Array:
    if not array.null_count:
        return array
    if column.default is None:
        row = _first_null(array) // math.prod(column.shape or ())
        raise SchemaError(f"row {row} of the batch: {missing_value(column)}")
    return pc.fill_null(array, pa.scalar(column.default, array.type))


def _numbers(column: Column, array: pa.Array) -> torch.Tensor:
    kind = array.type
    if array.null_count:
        raise SchemaError(f"column {column.name!r}: a list has a null among its values")
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not number or (pa.types.is_floating(kind) and column.dtype == "int64"):
        raise _wrong(column, array, column.dtype)
    if kind == pa.uint64() and column.dtype == "int64":
        # Ids use all 64 bits and keep them.
        array = array.view(pa.int64())
    wanted = _TYPES[column.dtype]
    return from_dlpack(array if array.type == wanted else pc.cast(array, wanted))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def _wrong(column: Column, array: pa.Array, wanted: str) -> SchemaError:
    return SchemaError(f"column {column.name!r}: expected {wanted}, {column.source!r} is {array.type}")


def missing_value(column: Column) -> str:
    """Return what is wrong with a row that has no value in a column with a shape and without a default.

    Example:
        >>> missing_value(Column(name="label", shape=()))
        "column 'label' has no value; leave the row out of the data. A feature, but not a label, may have a default instead"
    """
    return (
        f"column {column.name!r} has no value; leave the row out of the data. A feature, but not a label, may have a default "
        "instead"
    )


def require_values(table: pa.Table, columns: Sequence[Column], where: Callable[[int], str]) -> None:
    """Raise `SchemaError` if a row has no value in a column that needs one. `where` says which row of the source it is.

    Example:
        >>> require_values(pa.table({"label": [1, None]}), [Column(name="label", shape=(), default=0)], str)
    """
    for column in columns:
        index = table.schema.get_field_index(column.source)
        if column.shape is not None and column.default is None and index >= 0 and table.column(index).null_count:
            raise SchemaError(f"{where(_first_null(table.column(index)))}: {missing_value(column)}")


def _first_null(array: pa.Array | pa.ChunkedArray) -> int:
    return int(pc.index(pc.is_null(array), True).as_py())


Rows = Iterable[Mapping[str, Any]]


class IteratorSource(Source):
    """Batches from a Python iterable, or from a function that returns a new one for each epoch.

    With `columns` and `batch_size` the items are rows, mappings from field to a value, a list or None. Without them the items
    are batches and passed on. Resuming and sharding count items, so the iterable must give the same ones every time.

    Example:
        >>> rows = [{"user": 1, "tags": [5]}, {"user": 2, "tags": []}, {"user": 3, "tags": [6, 7]}]
        >>> columns = [Column(name="user", shape=()), Column(name="tags")]
        >>> [batch["tags"].to_lists() for batch in IteratorSource(rows, columns, batch_size=2)]
        [[[5], []], [[6, 7]]]
    """

    def __init__(
        self,
        items: Rows | Callable[[], Rows],
        columns: Iterable[Column] | None = None,
        *,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> None:
        if (columns is None) != (batch_size is None):
            raise InvalidArgumentError("columns and batch_size: give both for rows, or none of them for batches")
        if batch_size is not None and batch_size < 1:
            raise InvalidArgumentError(f"batch_size: expected 1 or more, got {batch_size}")
        if isinstance(items, Iterator):
            raise InvalidArgumentError(
                f"items: a {type(items).__name__} can be read only once; give a list, or a function that returns a new iterator"
            )
        self.columns = None if columns is None else checked_columns(columns)
        self._items, self._batch_size, self._drop_remainder = items, batch_size, drop_remainder
        super().__init__()

    def _start(self) -> SourcePosition:
        return {"item": 0}

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        items = self._items() if callable(self._items) else self._items
        done = int(position["item"])
        mine = itertools.islice(items, self._shard_index, None, self._shard_count)
        rest = itertools.islice(mine, done, None)
        if self.columns is None or self._batch_size is None:
            for batch in rest:
                done += 1
                yield dict(batch), {"item": done}
            return
        while rows := list(itertools.islice(rest, self._batch_size)):
            if self._drop_remainder and len(rows) < self._batch_size:
                return
            batch = _rows_to_batch(rows, self.columns, done)
            done += len(rows)
            yield batch, {"item": done}


def _rows_to_batch(rows: list[Mapping[str, Any]], columns: Sequence[Column], first: int) -> Batch:
    arrays = []
    for column in columns:
        try:
            arrays.append(pa.array([row.get(column.source) for row in rows], arrow_type(column)))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise SchemaError(f"column {column.name!r}: rows {first}..{first + len(rows) - 1}: {error}") from None
    try:
        return to_batch(pa.table(arrays, names=[column.source for column in columns]), columns)
    except SchemaError as error:
        raise SchemaError(f"rows {first}..{first + len(rows) - 1}: {error}") from None
