"""The original's record files: Example, ExampleBatch or Instance messages behind any of their headers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Literal, Self

import torch
from google.protobuf.message import Message
from pydantic import model_validator

from monolith import _core
from monolith.config import Config
from monolith.data.sources.column import Column, checked_columns
from monolith.data.sources.output import OutputFile
from monolith.data.sources.records import RecordSource, take_batch
from monolith.data.sources.streams import Compression
from monolith.errors import CorruptFileError, InvalidArgumentError, SchemaError
from monolith.features.batch import Batch

__all__ = ["INVALID_LABEL", "RecordFileSource", "RecordHeader", "RecordWriter", "data_source_key", "parse_records"]

INVALID_LABEL = float(torch.finfo(torch.float32).min)
"""The label of a row that has none: the lowest float32."""

MessageFormat = Literal["example", "example_batch", "instance"]
_FORMATS = {
    "example": _core.RecordFormat.EXAMPLE,
    "example_batch": _core.RecordFormat.EXAMPLE_BATCH,
    "instance": _core.RecordFormat.INSTANCE,
}
_LINE_ID_NUMBERS = ("uid", "req_time", "item_id", "chnid", "is_draw", "rank")
_DEFAULTS = {
    "label": INVALID_LABEL,
    "instance_weight": 1.0,
    "data_source_key": 0.0,
    "line_id.sample_rate": 1.0,
    **{f"line_id.{name}": 0.0 for name in _LINE_ID_NUMBERS},
}


class RecordHeader(Config):
    """What stands before the length of each record; all integers are little-endian u64.

    Example:
        >>> RecordHeader(sort_id=True, kafka_dump=True).empty().hex()
        '00000000000000000000000000000000'
    """

    lagrangex: bool = False
    """One integer with message type and data source key; excludes the others."""
    kafka_dump_prefix: bool = False
    """One integer: if 0, another one that is ignored follows; otherwise the size of the sort id."""
    sort_id: bool = False
    """The size of the sort id (unless the prefix had it) and as many bytes, ignored."""
    kafka_dump: bool = False
    """One integer, ignored."""

    @model_validator(mode="after")
    def _lagrangex_stands_alone(self) -> Self:
        if self.lagrangex and (self.kafka_dump_prefix or self.sort_id or self.kafka_dump):
            raise ValueError("lagrangex excludes kafka_dump_prefix, sort_id and kafka_dump")
        return self

    def empty(self) -> bytes:
        """The header a writer that has nothing to say puts before a record."""
        return bytes(8 * (self.lagrangex + 2 * self.kafka_dump_prefix + self.sort_id + self.kafka_dump))


class RecordFileSource(RecordSource):
    """Batches from the original's record files.

    A column's field is the name of a feature; `label`, `instance_weight`, `data_source_key` and `line_id.<field>` are the
    fields of the message itself, and `slot_<n>` or `fc_slot_<n>` the ids of slot n of an Instance. Ids come out as fid
    version 2. A missing label is `INVALID_LABEL`, a missing or non-positive weight 1, a missing LineId field its default.

    `paths`, `max_corrupt` and shards are as in `TFRecordSource`. With a lagrangex header each record says itself whether it
    is an Instance or an Example. The rows of an ExampleBatch are cut into batches of `batch_size` like all others.

    Example:
        >>> import tempfile
        >>> from monolith.proto import example_pb2
        >>> example = example_pb2.Example(label=[1.0])
        >>> example.named_feature.add(name="user").feature.fid_v2_list.value.append(7)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RecordWriter(f"{folder}/rows", header=RecordHeader(sort_id=True)) as writer:
        ...         writer.write(example)
        ...     columns = [Column(name="user"), Column(name="label", dtype="float32", shape=(1,))]
        ...     source = RecordFileSource(f"{folder}/rows", columns, batch_size=2, header=RecordHeader(sort_id=True))
        ...     (batch,) = source
        >>> batch["user"].to_lists(), batch["label"].tolist()
        ([[7]], [[1.0]])
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        columns: Iterable[Column],
        *,
        batch_size: int,
        format: MessageFormat = "example",  # noqa: A002 - the word of the file formats
        header: RecordHeader | None = None,
        compression: Compression = "infer",
        max_corrupt: int = 0,
        drop_remainder: bool = False,
        max_record_bytes: int = 128 << 20,
    ) -> None:
        header = header or RecordHeader()
        if header.lagrangex and format == "example_batch":
            raise InvalidArgumentError("format: a lagrangex header tells Instance from Example, it has no ExampleBatch")
        super().__init__(
            paths,
            columns,
            batch_size=batch_size,
            format=_format(format),
            framing=_core.FramingOptions(tfrecord=False, **header.model_dump(), max_record_bytes=max_record_bytes),
            by_header=header.lagrangex,
            defaults=_DEFAULTS,
            compression=compression,
            max_corrupt=max_corrupt,
            drop_remainder=drop_remainder,
        )


class RecordWriter(OutputFile):
    """Writes one of the original's record files to a path or URL: gzip by the suffix .gz, zlib by .zz.

    See `RecordFileSource` for an example.
    """

    def __init__(self, url: str, *, header: RecordHeader | None = None) -> None:
        self._header = header or RecordHeader()
        super().__init__(url)

    def write(self, record: bytes | Message, *, is_instance: bool = False, data_source_key: int = 0) -> None:
        """Append one record: a message, or the bytes of one. The rest goes into a lagrangex header."""
        payload = record if isinstance(record, bytes) else record.SerializeToString()
        header = self._header.empty()
        if self._header.lagrangex:
            if not 0 <= data_source_key < 2**32 or data_source_key & 0xFF:
                raise InvalidArgumentError(
                    f"data_source_key: expected 32 bits, the low 8 zero, got {data_source_key:#x}"
                )
            header = struct.pack("<Q", data_source_key | (not is_instance))
        self._write(header + struct.pack("<Q", len(payload)) + payload)


def data_source_key(flow: str) -> int:
    """The data source key of a data flow: Java's hash code of its name in the upper 24 of 32 bits.

    Example:
        >>> hex(data_source_key("abc"))
        '0x1786200'
    """
    units = struct.unpack(f"<{len(flow.encode('utf-16-le')) // 2}H", flow.encode("utf-16-le"))
    code = 0
    for unit in units:
        code = (31 * code + unit) & 0xFFFFFFFF
    return (code << 8) & 0xFFFFFFFF


def parse_records(
    records: Sequence[bytes],
    columns: Iterable[Column],
    *,
    format: MessageFormat | Literal["tf_example"] = "example",  # noqa: A002 - the word of the file formats
) -> Batch:
    """Serialized messages, such as those of a queue, into one batch; columns are as in `RecordFileSource`.

    Example:
        >>> from monolith.proto import example_pb2
        >>> record = example_pb2.Example(label=[1.0]).SerializeToString()
        >>> parse_records([record], [Column(name="label", dtype="float32", shape=())])
        {'label': tensor([1.])}
    """
    checked = checked_columns(columns)
    defaults = {} if format == "tf_example" else _DEFAULTS
    specs = [column.to_core(None if column.shape is None else defaults.get(column.source)) for column in checked]
    parser = _core.RecordParser(_format(format), False, specs)
    chunk = _core.join_messages(list(records))
    frame, _, problem, message = parser.add(chunk, 0, 0, 2**62, 1)
    if problem == _core.Problem.NONE:
        return take_batch(parser, checked)
    error = CorruptFileError if problem == _core.Problem.CORRUPT else SchemaError
    raise error(f"records[{frame - 1}]: {message}")


def _format(name: str) -> _core.RecordFormat:
    if name == "tf_example":
        return _core.RecordFormat.TF_EXAMPLE
    if name not in _FORMATS:
        raise InvalidArgumentError(f"format: expected one of {', '.join(_FORMATS)}, got {name!r}")
    return _FORMATS[name]
