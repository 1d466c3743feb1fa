"""Messages of streams as rows of batches and back: JSON, Arrow, and the original's Example, ExampleBatch and Instance."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import orjson
import pyarrow as pa
import torch
from google.protobuf.message import Message

from monolith import _core
from monolith.data.sources.arrow import arrow_type, decoded_dictionary_bytes, decompressed_bytes, to_batch
from monolith.data.sources.records import MESSAGE_DEFAULTS, RecordHeader, take_batch
from monolith.data.sources.source import Column, checked_columns
from monolith.data.transforms.rows import concat_rows
from monolith.errors import InvalidArgumentError, SchemaError
from monolith.features import Batch, Ragged, num_rows
from monolith.features.batch import column_of
from monolith.proto import example_pb2, feature_pb2, instance_pb2

__all__ = ["BadMessage", "LONGEST_MESSAGE", "MessageDecoder", "MessageEncoder", "StreamFormat", "decode_messages"]

StreamFormat = Literal["json", "arrow", "example", "example_batch", "instance"]
"""How the value of a record is written. "arrow" and "example_batch" hold many rows, the others one. See docs/formats.md."""

LONGEST_MESSAGE = 8 << 20
"""Records that are longer are bad ones, unless a reader says otherwise."""

_CORE_FORMATS = {
    "json": _core.RecordFormat.JSON,
    "example": _core.RecordFormat.EXAMPLE,
    "example_batch": _core.RecordFormat.EXAMPLE_BATCH,
    "instance": _core.RecordFormat.INSTANCE,
}
_MANY_ROWS = ("arrow", "example_batch")
_MAX_ARROW_ROWS = 1 << 20
_MAX_EXPANSION = 8
"""An Arrow record may need this many times `max_record_bytes` when it is decompressed, and as much for its dictionaries."""


class BadMessage(NamedTuple):
    """A message that cannot be rows of the columns."""

    number: int
    """Its index among the messages."""
    reason: str
    """What is wrong with it."""


class MessageDecoder:
    r"""Appends the rows of messages to columns, and hands them out as batches.

    A bad message is an answer, not an exception: not of the format, without a column or with values of another type, longer
    than `max_record_bytes`, or with NaN or infinity in a column of floats (unless `finite` is False). None of its rows is kept.

    Args:
        columns: what to take from a row. `Column.field` is the key of the JSON object, the column of the Arrow table or the
            name of the feature, with the reserved names of `RecordFileSource`.
        format: see `StreamFormat`.
        header: the original's messages may have a header and their length before them, as in record files.
        max_record_bytes: longer messages are bad, and those of Arrow that need more than eight times as much when they are
            decompressed, or when their dictionaries are decoded.
        finite: whether NaN and infinity are bad.

    Example:
        >>> decoder = MessageDecoder([Column(name="user", shape=()), Column(name="tags")])
        >>> messages = [b'{"user": 1, "tags": [5, 6]}', b'{"user": "me"}', b'{"user": 2}']
        >>> decoder.add(messages)
        BadMessage(number=1, reason='field \'user\': expected an integer of 64 bits, got "me"')
        >>> decoder.add(messages, 2)
        >>> batch = decoder.take()
        >>> batch["user"].tolist(), batch["tags"].to_lists()
        ([1, 2], [[5, 6], []])
    """

    def __init__(
        self,
        columns: Iterable[Column],
        *,
        format: StreamFormat = "json",  # noqa: A002 - the word of the file formats
        header: RecordHeader | None = None,
        max_record_bytes: int = LONGEST_MESSAGE,
        finite: bool = True,
    ) -> None:
        self.columns = checked_columns(columns)
        self.format, self.finite, self._max_bytes = _checked_format(format, header), finite, max_record_bytes
        self._header = None if header is None else _core.RecordHeader(**header.model_dump())
        self._next, self._row = 0, 0
        self._values: Sequence[bytes] | None = None
        self._messages: _core.Messages | None = None
        self._tables: list[Batch] = []
        self._open: tuple[bytes, pa.Table] | None = None
        self.spans: list[tuple[int, int, int]] = []
        """Of Arrow: the messages that the rows of the last `add` came from, as number, first row and rows."""
        self._parser = None
        if format != "arrow":
            defaults = {} if format == "json" else MESSAGE_DEFAULTS
            specs = [
                column.to_core(None if column.shape is None else defaults.get(column.source), finite=finite)
                for column in self.columns
            ]
            by_header = header is not None and header.lagrangex
            self._parser = _core.RecordParser(_CORE_FORMATS[format], by_header, specs)

    @property
    def rows(self) -> int:
        """Rows appended since the last `take`."""
        return sum(map(num_rows, self._tables)) if self._parser is None else self._parser.rows()

    @property
    def position(self) -> tuple[int, int]:
        """Index of the message that was to be read next in the last `add`, and the row in it."""
        return self._next, self._row

    def add(
        self, messages: Sequence[bytes], first: int = 0, row: int = 0, *, max_rows: int | None = None
    ) -> BadMessage | None:
        """Append the rows of `messages` from row `row` of message `first` on, until there are `max_rows` rows.

        Stops behind a bad message and returns it. `position` says where to continue, with the same list.
        """
        limit = 2**62 if max_rows is None else max_rows
        if self._parser is None:
            return self._add_tables(messages, first, row, limit)
        if self._messages is None or messages is not self._values:
            self._messages = _core.Messages(messages, max_bytes=self._max_bytes, header=self._header)
            self._values = messages
        self._next, self._row, problem, text = self._parser.add_messages(self._messages, first, row, limit)
        return None if problem == _core.Problem.NONE else BadMessage(self._next - 1, text)

    def _add_tables(self, messages: Sequence[bytes], first: int, row: int, limit: int) -> BadMessage | None:
        """Append tables. They are converted together, because converting 26 columns costs as much for one row as for hundreds."""
        found: list[tuple[int, int, pa.Table]] = []
        number, left, bad = first, limit - self.rows, None
        while number < len(messages) and left > 0 and bad is None:
            try:
                message = messages[number]
                # Reading goes on in the middle of a message that did not fit into the last batch.
                was_open = self._open is not None and self._open[0] is message
                table = self._open[1] if self._open is not None and was_open else self._read_table(message)
            except SchemaError as error:
                bad = BadMessage(number, str(error))
                break
            part = table.slice(row, left)
            found.append((number, row, part))
            left -= part.num_rows
            if row + part.num_rows < table.num_rows:
                self._open, row = (message, table), row + part.num_rows
            else:
                self._open, number, row = None, number + 1, 0
        bad = self._convert(found) or bad
        if bad is not None:
            self._open, number, row = None, bad.number + 1, 0
        self._next, self._row = number, row
        return bad

    def _convert(self, found: list[tuple[int, int, pa.Table]]) -> BadMessage | None:
        """Append the rows of tables, up to the first that does not fit the columns. `spans` says which."""
        self.spans = []
        if not found:
            return None
        try:
            batch = self._batch_of(pa.concat_tables([table for _, _, table in found]))
        except (SchemaError, pa.ArrowException):
            pass
        else:
            self._tables.append(batch)
            self.spans = [(number, row, table.num_rows) for number, row, table in found]
            return None
        for number, row, table in found:
            try:
                self._tables.append(self._batch_of(table))
            except SchemaError as error:
                return BadMessage(number, str(error))
            self.spans.append((number, row, table.num_rows))
        return None

    def _read_table(self, message: bytes) -> pa.Table:
        if len(message) > self._max_bytes:
            raise SchemaError(f"the record has {len(message)} bytes, more than max_record_bytes, {self._max_bytes}")
        most = _MAX_EXPANSION * self._max_bytes
        try:
            decompressed, has_dictionaries = decompressed_bytes(message)
        except ValueError as error:
            raise SchemaError(f"not an Arrow IPC stream: {error}") from None
        if decompressed > most:
            raise SchemaError(f"the record needs {decompressed} bytes when it is decompressed, more than {most}")
        try:
            with pa.ipc.open_stream(message) as reader:
                table = reader.read_all()
            # Offsets come from outside, and are not looked at again.
            table.validate(full=True)
        except (pa.ArrowException, OSError, MemoryError, ValueError, TypeError) as error:
            text = str(error) or repr(error)
            raise SchemaError(f"not an Arrow IPC stream: {text.splitlines()[0]}") from None
        if table.num_rows > _MAX_ARROW_ROWS:
            raise SchemaError(f"the record has {table.num_rows} rows, more than {_MAX_ARROW_ROWS}")
        if has_dictionaries and (decoded := decoded_dictionary_bytes(table)) > most:
            raise SchemaError(f"the record needs {decoded} bytes when its dictionaries are decoded, more than {most}")
        return table

    def _batch_of(self, table: pa.Table) -> Batch:
        batch = to_batch(table, self.columns)
        for column in self.columns if self.finite else ():
            values = batch[column.name]
            flat = values.values if isinstance(values, Ragged) else values
            if flat.is_floating_point() and not bool(torch.isfinite(flat).all()):
                raise SchemaError(f"field {column.source!r} has a value that is NaN or infinite")
        return batch

    def take(self) -> Batch:
        """Return the rows appended as a batch, and begin with none."""
        if self._parser is not None:
            return take_batch(self._parser, self.columns)
        tables, self._tables = self._tables, []
        if not tables:
            return to_batch(
                pa.table({column.source: pa.array([], arrow_type(column)) for column in self.columns}), self.columns
            )
        return tables[0] if len(tables) == 1 else concat_rows(tables)


def decode_messages(
    messages: Sequence[bytes],
    columns: Iterable[Column],
    *,
    format: StreamFormat = "json",  # noqa: A002 - the word of the file formats
    header: RecordHeader | None = None,
) -> Batch:
    """Return the rows of all messages as one batch. See `MessageDecoder` for the arguments.

    Raises:
        SchemaError: a message is bad.

    Example:
        >>> decode_messages([b'{"user": 7}'], [Column(name="user", shape=())])["user"].tolist()
        [7]
    """
    decoder = MessageDecoder(columns, format=format, header=header, max_record_bytes=2**62)
    bad = decoder.add(messages)
    if bad is not None:
        raise SchemaError(f"messages[{bad.number}]: {bad.reason}")
    return decoder.take()


def _checked_format(format: str, header: RecordHeader | None) -> StreamFormat:  # noqa: A002 - the word of the file formats
    if format not in get_args(StreamFormat):
        raise InvalidArgumentError(f"format: expected one of {', '.join(get_args(StreamFormat))}, got {format!r}")
    if header is not None and format in ("json", "arrow"):
        raise InvalidArgumentError(f"header: {format} messages have none; leave it out")
    if header is not None and header.lagrangex and format == "example_batch":
        raise InvalidArgumentError("format: a lagrangex header tells Instance from Example, it has no ExampleBatch")
    return format  # type: ignore[return-value]


Row = Mapping[str, Any]
"""Values by field: a number, a string, bytes, a list or a list of lists. None is the same as no value."""


class MessageEncoder:
    """Writes rows as messages that a `MessageDecoder` of the same columns reads.

    Numbers come back as they were, with all bits of int64. In JSON a string must be UTF-8, and no number NaN or infinite. In
    the original's messages a column without shape becomes ids, one with a shape numbers.

    Example:
        >>> encoder = MessageEncoder([Column(name="user", shape=()), Column(name="tags")])
        >>> encoder.encode_row({"user": 7, "tags": [5]})
        b'{"user":7,"tags":[5]}'
        >>> encoder.encode_batch({"user": torch.tensor([1, 2]), "tags": Ragged.from_lists([[5], []])})
        [b'{"user":1,"tags":[5]}', b'{"user":2,"tags":[]}']
    """

    def __init__(
        self,
        columns: Iterable[Column],
        *,
        format: StreamFormat = "json",  # noqa: A002 - the word of the file formats
        header: RecordHeader | None = None,
    ) -> None:
        self.columns = checked_columns(columns)
        self.format, self._header = _checked_format(format, header), header

    def encode_row(self, row: Row) -> bytes:
        """Return one row, values by field, as one message. Fields that are no column are left out."""
        return self.encode_rows([row])[0]

    def encode_rows(self, rows: Sequence[Row]) -> list[bytes]:
        """Return rows as messages: one for each row, or a single one with all rows in the formats that hold many."""
        match self.format:
            case "json":
                return [self._json(row) for row in rows]
            case "arrow":
                arrays = [
                    self._arrow_array([row.get(column.source) for row in rows], column) for column in self.columns
                ]
                return [_ipc(pa.table(arrays, names=[column.source for column in self.columns]))]
            case "example":
                return [self._framed(self._example(row)) for row in rows]
            case "instance":
                return [self._framed(self._instance(row), is_instance=True) for row in rows]
            case _:
                return [self._framed(self._example_batch(rows))]

    def encode_batch(self, batch: Batch, *, rows_per_message: int | None = None) -> list[bytes]:
        """Return the rows of a batch as messages. `rows_per_message` is for the formats that hold many, by default all."""
        rows = num_rows(batch)
        size = max(rows, 1) if rows_per_message is None else rows_per_message
        if size < 1:
            raise InvalidArgumentError(f"rows_per_message: expected 1 or more, got {size}")
        if self.format == "arrow":
            arrays = [_arrow_of(batch, column) for column in self.columns]
            table = pa.table(arrays, names=[column.source for column in self.columns])
            return [_ipc(table.slice(begin, size)) for begin in range(0, rows, size)]
        lists = [_lists_of(batch, column, self.format == "json") for column in self.columns]
        names = [column.source for column in self.columns]
        plain = [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]
        if self.format in _MANY_ROWS:
            return [self.encode_rows(plain[begin : begin + size])[0] for begin in range(0, rows, size)]
        if self.format == "json":
            return [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in plain]
        return self.encode_rows(plain)

    def _json(self, row: Row) -> bytes:
        fields = {}
        for column in self.columns:
            value = row.get(column.source)
            if value is None:
                continue
            if column.dtype == "bytes":
                value = _texts(value, column)
            elif column.dtype != "int64":
                _require_finite(value, column)
            fields[column.source] = value
        try:
            return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError as error:
            raise SchemaError(f"row: cannot be JSON: {error}") from None

    def _arrow_array(self, values: Sequence[Any], column: Column) -> pa.Array:
        try:
            return pa.array(values, arrow_type(column))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise SchemaError(f"column {column.name!r}: {error}") from None

    def _framed(self, message: Message, *, is_instance: bool = False) -> bytes:
        payload = message.SerializeToString()
        if self._header is None:
            return payload
        header = struct.pack("<Q", not is_instance) if self._header.lagrangex else self._header.empty()
        return header + struct.pack("<Q", len(payload)) + payload

    def _example(self, row: Row) -> example_pb2.Example:
        example = example_pb2.Example()
        for column in self.columns:
            value = row.get(column.source)
            if value is None or _set_own_field(example, column, value):
                continue
            feature = example.named_feature.add(name=column.source).feature
            _set_feature(feature, column, value)
        return example

    def _instance(self, row: Row) -> instance_pb2.Instance:
        instance = instance_pb2.Instance()
        for column in self.columns:
            value = row.get(column.source)
            if value is None or _set_own_field(instance, column, value):
                continue
            _set_instance_feature(instance.feature.add(name=column.source), column, value)
        return instance

    def _example_batch(self, rows: Sequence[Row]) -> example_pb2.ExampleBatch:
        batch = example_pb2.ExampleBatch(batch_size=len(rows))
        line_ids = [example_pb2.Example() for _ in rows]
        for column in self.columns:
            field = column.source
            if field == "data_source_key":
                raise SchemaError("field 'data_source_key': an ExampleBatch has one for all rows; leave it out")
            if field.startswith("line_id."):
                for example, row in zip(line_ids, rows, strict=True):
                    if row.get(field) is not None:
                        _set_own_field(example, column, row[field])
                continue
            target = batch.named_feature_list.add(name="__LABEL__" if field == "label" else field)
            for row in rows:
                feature = target.feature.add()
                if row.get(field) is not None:
                    _set_feature(feature, column, row[field], plain=field in ("label", "instance_weight"))
        if any(column.source.startswith("line_id.") for column in self.columns):
            target = batch.named_feature_list.add(name="__LINE_ID__")
            for example in line_ids:
                target.feature.add().bytes_list.value.append(example.line_id.SerializeToString())
        return batch


def _ipc(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _require_finite(value: Any, column: Column) -> None:  # noqa: ANN401 - values of any nesting
    if isinstance(value, list | tuple | np.ndarray):
        for part in value:
            _require_finite(part, column)
    elif not math.isfinite(value):
        raise SchemaError(f"field {column.source!r}: JSON has no {value}; leave the row out, or use another format")


def _texts(value: Any, column: Column) -> Any:  # noqa: ANN401 - a string or a list of them
    if isinstance(value, list | tuple):
        return [_texts(part, column) for part in value]
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise SchemaError(f"field {column.source!r}: {value[:32]!r} is not UTF-8, as JSON needs; use arrow") from None


def _arrow_of(batch: Batch, column: Column) -> pa.Array:
    values = column_of(batch, column.name)
    if column.dtype == "bytes":
        return pa.array(_lists_of(batch, column, False), arrow_type(column))
    if isinstance(values, torch.Tensor):
        flat = pa.array(values.detach().reshape(-1).numpy())
        return pa.FixedSizeListArray.from_arrays(flat, math.prod(column.shape or ())) if column.shape else flat
    if not column.nested:
        return values.to_arrow()
    lengths = _ragged(batch, column.output_names()[1])
    inner = pa.LargeListArray.from_arrays(_splits(lengths.values.numpy()), pa.array(values.values.numpy()))
    return pa.LargeListArray.from_arrays(pa.array(lengths.offsets.numpy()), inner)


def _splits(lengths: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def _ragged(batch: Batch, name: str) -> Ragged:
    rows = column_of(batch, name)
    if not isinstance(rows, Ragged):
        raise InvalidArgumentError(f"column {name!r}: expected Ragged, got a tensor; give the Column its shape")
    return rows


def _lists_of(batch: Batch, column: Column, for_json: bool) -> list[Any]:
    """Return the value of each row, with lists of fixed shapes flat."""
    rows = column_of(batch, column.name)
    if column.dtype == "bytes":
        strings: list[Any] = _strings_of(batch, column)
        return [_texts(value, column) for value in strings] if for_json else strings
    flat = rows.values if isinstance(rows, Ragged) else rows
    if for_json and flat.is_floating_point() and not bool(torch.isfinite(flat).all()):
        raise SchemaError(f"field {column.source!r}: JSON has no NaN and no infinity; use another format")
    if isinstance(rows, torch.Tensor):
        if column.shape is None:
            raise InvalidArgumentError(
                f"column {column.name!r}: expected Ragged, got a tensor; give the Column its shape"
            )
        array = rows.detach().numpy().reshape(len(rows), -1)
        # Scalars of NumPy are written with the digits that float32 needs, those of Python with twice as many.
        exact = list if for_json and array.dtype == np.float32 else np.ndarray.tolist
        return list(exact(array[:, 0])) if not column.shape else [exact(row) for row in array]
    values = list(rows.values.numpy()) if for_json and flat.dtype == torch.float32 else rows.values.tolist()
    lists = [values[begin:end] for begin, end in itertools.pairwise(rows.offsets.tolist())]
    if not column.nested:
        return lists
    lengths = _ragged(batch, column.output_names()[1]).to_lists()
    return [_cut(row, sizes) for row, sizes in zip(lists, lengths, strict=True)]


def _strings_of(batch: Batch, column: Column) -> list[Any]:
    rows = _ragged(batch, column.name)
    data = rows.values.numpy().tobytes()
    strings = [data[begin:end] for begin, end in itertools.pairwise(rows.offsets.tolist())]
    if not column.nested:
        return strings
    lengths = _ragged(batch, column.output_names()[1]).to_lists()
    return [_cut(row, sizes) for row, sizes in zip(strings, lengths, strict=True)]


def _cut(values: Any, sizes: Sequence[int]) -> list[Any]:  # noqa: ANN401 - a list or bytes
    return [values[begin:end] for begin, end in itertools.pairwise([0, *itertools.accumulate(sizes)])]


def _as_list(value: Any) -> list[Any]:  # noqa: ANN401 - a value or a list of them
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _unsigned(values: Iterable[int]) -> list[int]:
    return [value % 2**64 for value in values]


def _set_own_field(
    message: example_pb2.Example | instance_pb2.Instance,
    column: Column,
    value: Any,  # noqa: ANN401 - as in the row
) -> bool:
    """Set a field of the message itself. Returns False if the column is a feature."""
    field = column.source
    try:
        if field == "label":
            message.label.extend(_as_list(value))
        elif field in ("instance_weight", "data_source_key"):
            setattr(message, field, _as_list(value)[0])
        elif field.startswith("line_id."):
            _set_line_id(message, field.removeprefix("line_id."), value)
        else:
            return False
    except (TypeError, ValueError, AttributeError) as error:
        raise SchemaError(f"field {field!r}: {error}") from None
    return True


def _set_line_id(
    message: example_pb2.Example | instance_pb2.Instance,
    name: str,
    value: Any,  # noqa: ANN401 - as in the row
) -> None:
    line_id = message.line_id
    descriptor = line_id.DESCRIPTOR.fields_by_name.get(name)
    if descriptor is None:
        raise SchemaError(f"field 'line_id.{name}': a LineId has no such field")
    if isinstance(value, bytes):
        value = value.decode()
    values = _as_list(value)
    if descriptor.type == descriptor.TYPE_FIXED64:
        values = _unsigned(values)
    target = getattr(line_id, name)
    if hasattr(target, "extend"):
        target.extend(values)
    else:
        setattr(line_id, name, values[0])


def _set_feature(
    feature: feature_pb2.Feature,
    column: Column,
    value: Any,  # noqa: ANN401 - as in the row
    *,
    plain: bool = False,
) -> None:
    ids = column.shape is None and not plain
    kind = {"int64": "fid_v2" if ids else "int64", "float32": "float", "float64": "double", "bytes": "bytes"}[
        column.dtype
    ]
    try:
        if column.dtype == "bytes":
            feature.bytes_list.value.extend(map(_as_bytes, _as_list(value)))
        elif column.nested:
            lists = getattr(feature, f"{kind}_lists")
            lists.SetInParent()
            for part in value:
                lists.list.add().value.extend(_unsigned(part) if kind == "fid_v2" else part)
        else:
            values = getattr(feature, f"{kind}_list")
            values.SetInParent()
            values.value.extend(_unsigned(_as_list(value)) if kind == "fid_v2" else _as_list(value))
    except (TypeError, ValueError) as error:
        raise SchemaError(f"field {column.source!r}: {error}") from None


def _set_instance_feature(
    feature: instance_pb2.Feature,
    column: Column,
    value: Any,  # noqa: ANN401 - as in the row
) -> None:
    ids = column.dtype == "int64" and column.shape is None
    try:
        if column.dtype == "bytes":
            feature.bytes_value.extend(map(_as_bytes, _as_list(value)))
        elif column.nested:
            for part in value:
                if ids:
                    feature.fid_list.add().value.extend(_unsigned(part))
                else:
                    feature.float_list.add().value.extend(part)
        elif ids:
            feature.fid.extend(_unsigned(_as_list(value)))
        elif column.dtype == "int64":
            feature.int64_value.extend(_as_list(value))
        else:
            feature.float_value.extend(_as_list(value))
    except (TypeError, ValueError) as error:
        raise SchemaError(f"field {column.source!r}: {error}") from None
