"""Record files: tf.train.Example in TFRecord files, and the original's messages with any of their headers."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Self

import torch
from google.protobuf.message import Message
from pydantic import model_validator

from monolith import _core
from monolith.config import Config
from monolith.data.sources.compressed_files import (
    Compression,
    OutputFile,
    StreamDamage,
    compression_of,
    open_file,
    read_stream,
)
from monolith.data.sources.source import Column, FileSource, SourcePosition, checked_columns
from monolith.errors import CorruptFileError, InvalidArgumentError, MonolithError, SchemaError
from monolith.features.batch import Batch

__all__ = [
    "INVALID_LABEL",
    "MESSAGE_DEFAULTS",
    "RecordFileSource",
    "RecordHeader",
    "RecordSource",
    "RecordWriter",
    "TFRecordSource",
    "TFRecordWriter",
    "data_source_key",
    "parse_records",
    "take_batch",
]

_CHUNK_BYTES = 4 << 20
_log = logging.getLogger(__name__)


class RecordSource(FileSource):
    """Base of `TFRecordSource` and `RecordFileSource`: batches from files of framed, serialized rows.

    Shards take whole files in turn, or records in turn if there are fewer files than shards.
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        columns: Iterable[Column],
        *,
        batch_size: int,
        format: _core.RecordFormat,  # noqa: A002 - the word of the file formats
        framing: _core.FramingOptions,
        by_header: bool,
        defaults: dict[str, float],
        compression: Compression,
        max_corrupt: int,
        drop_remainder: bool,
    ) -> None:
        self.columns = checked_columns(columns)
        self._specs = [
            column.to_core(None if column.shape is None else defaults.get(column.source)) for column in self.columns
        ]
        self._format, self._framing, self._by_header = format, framing, by_header
        self._new_parser()
        compression_of("", compression)
        self._compression = compression
        super().__init__(paths, batch_size=batch_size, drop_remainder=drop_remainder, max_corrupt=max_corrupt)

    @property
    def skipped(self) -> int:
        """Records left out so far because they were damaged or did not fit the columns."""
        return int(self._position["skipped"])

    def _start(self) -> SourcePosition:
        first, _, _ = self._share()
        return {"file": first, "url": "", "offset": 0, "record": 0, "row": 0, "skipped": 0}

    def _share(self) -> tuple[int, int, int]:
        """Return the first file of this shard, the step to its next one, and the step between its records."""
        by_record = len(self.files) < self._shard_count
        return (0, 1, self._shard_count) if by_record else (self._shard_index, self._shard_count, 1)

    def _new_parser(self) -> _core.RecordParser:
        return _core.RecordParser(self._format, self._by_header, self._specs)

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        parser = self._new_parser()
        _, step, _ = self._share()
        at = dict(position)
        for index in range(int(position["file"]), len(self.files), step):
            if index != at["file"]:
                at.update(file=index, offset=0, record=0, row=0)
            at["url"] = self.files[index]
            for _ in self._fill(parser, at):
                yield take_batch(parser, self.columns), dict(at)
        if parser.rows() and not self._drop_remainder:
            yield take_batch(parser, self.columns), {**at, "file": len(self.files), "url": ""}

    def _fill(self, parser: _core.RecordParser, at: SourcePosition) -> Iterator[None]:
        """Read one file from `at` on, keeping `at` after the last record used, and yield whenever a batch is full."""
        _, _, stride = self._share()
        record, row = int(at["record"]), int(at["row"])
        for start, chunk in self._chunks(at):
            frame = (self._shard_index - record) % stride if stride > 1 else 0
            while frame < len(chunk):
                frame, row, problem, message = parser.add(chunk, frame, row, self._batch_size, stride)
                at.update(offset=start + chunk.next_start(frame), record=record + min(frame, len(chunk)), row=row)
                if problem != _core.Problem.NONE:
                    self._skip(at, start + chunk.next_start(frame - stride), problem, message)
                elif parser.rows() == self._batch_size:
                    yield
            record += len(chunk)

    def _chunks(self, at: SourcePosition) -> Iterator[tuple[int, _core.Chunk]]:
        """Yield chunks of the current file, cut into frames, each with its offset."""
        start, data, needed = int(at["offset"]), b"", 0
        with open_file(str(at["url"]), self._compression, start) as stream:
            while True:
                try:
                    piece = read_stream(stream, max(_CHUNK_BYTES, needed - len(data)))
                except StreamDamage as damage:
                    self._skip(at, start, _core.Problem.CORRUPT, f"{damage}; the rest of the file is lost")
                    return
                data += piece
                chunk = _core.split_frames(data, 0, self._framing, not piece)
                yield start, chunk
                if not piece or chunk.lost:
                    return
                start, needed, data = start + chunk.consumed, chunk.needed, data[chunk.consumed :]

    def _skip(self, at: SourcePosition, offset: int, problem: _core.Problem, message: str) -> None:
        at["skipped"] = int(at["skipped"]) + 1
        where = f"{at['url']}: record at byte {offset}: {message}"
        if int(at["skipped"]) > self._max_corrupt:
            error: type[MonolithError] = CorruptFileError if problem == _core.Problem.CORRUPT else SchemaError
            hint = f"{at['skipped']} bad records, max_corrupt is {self._max_corrupt}"
            raise error(f"{where} ({hint})")
        _log.warning("%s; skipped", where)


def take_batch(parser: _core.RecordParser, columns: Sequence[Column]) -> Batch:
    """Return the rows the parser holds, as a batch."""
    batch: Batch = {}
    for column, arrays in zip(columns, parser.take(), strict=True):
        batch.update(column.entries(*arrays))
    return batch


INVALID_LABEL = float(torch.finfo(torch.float32).min)
"""The label of a row that has none: the lowest float32."""

MessageFormat = Literal["example", "example_batch", "instance"]
_FORMATS = {
    "example": _core.RecordFormat.EXAMPLE,
    "example_batch": _core.RecordFormat.EXAMPLE_BATCH,
    "instance": _core.RecordFormat.INSTANCE,
}
_LINE_ID_NUMBERS = ("uid", "req_time", "item_id", "chnid", "is_draw", "rank")
MESSAGE_DEFAULTS = {
    "label": INVALID_LABEL,
    "instance_weight": 1.0,
    "data_source_key": 0.0,
    "line_id.sample_rate": 1.0,
    **{f"line_id.{name}": 0.0 for name in _LINE_ID_NUMBERS},
}
"""What a missing field of the original's messages is, for columns without a default."""


class RecordHeader(Config):
    """What precedes the length of each record. All integers are little-endian u64.

    Example:
        >>> RecordHeader(sort_id=True, kafka_dump=True).empty().hex()
        '00000000000000000000000000000000'
    """

    lagrangex: bool = False
    """One integer with message type and data source key. It excludes the others."""
    kafka_dump_prefix: bool = False
    """One integer. If it is 0, another one that is ignored follows, otherwise it is the size of the sort id."""
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
        """Return a header of zeros."""
        return bytes(8 * (self.lagrangex + 2 * self.kafka_dump_prefix + self.sort_id + self.kafka_dump))


class RecordFileSource(RecordSource):
    """Batches from the original's record files.

    A column's field is the name of a feature. `label`, `instance_weight`, `data_source_key` and `line_id.<field>` are the
    fields of the message itself, and `slot_<n>` or `fc_slot_<n>` the ids of slot n of an Instance. Ids come out as fid
    version 2. A missing label is `INVALID_LABEL`, a missing or non-positive weight 1, a missing LineId field its default.

    `paths`, `max_corrupt` and shards are as in `TFRecordSource`. With a lagrangex header each record tells whether it
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
        self.format, self.header = format, header
        if header.lagrangex and format == "example_batch":
            raise InvalidArgumentError("format: a lagrangex header tells Instance from Example, it has no ExampleBatch")
        super().__init__(
            paths,
            columns,
            batch_size=batch_size,
            format=_format(format),
            framing=_core.FramingOptions(tfrecord=False, **header.model_dump(), max_record_bytes=max_record_bytes),
            by_header=header.lagrangex,
            defaults=MESSAGE_DEFAULTS,
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
    """Return the data source key of a data flow: Java's hash code of its name in the upper 24 of 32 bits.

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
    """Parse serialized messages, such as those of a queue, into one batch. Columns are as in `RecordFileSource`.

    Example:
        >>> from monolith.proto import example_pb2
        >>> record = example_pb2.Example(label=[1.0]).SerializeToString()
        >>> parse_records([record], [Column(name="label", dtype="float32", shape=())])
        {'label': tensor([1.])}
    """
    checked = checked_columns(columns)
    defaults = {} if format == "tf_example" else MESSAGE_DEFAULTS
    specs = [column.to_core(None if column.shape is None else defaults.get(column.source)) for column in checked]
    parser = _core.RecordParser(_format(format), False, specs)
    messages = _core.Messages(records, max_bytes=2**62, header=None)
    frame, _, problem, message = parser.add_messages(messages, 0, 0, 2**62)
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


class TFRecordSource(RecordSource):
    """Batches from TFRecord files of tf.train.Example. All checksums are verified.

    `paths`: URLs, globs, folders, or "-" for standard input. A column without a shape may be missing in a record. One with a
    shape needs a default for that. At most `max_corrupt` records that are damaged or do not fit the columns are skipped, then
    `CorruptFileError` or `SchemaError` is raised. When a length is damaged, the rest of its file is lost and counts as one
    record.

    Example:
        >>> import tempfile
        >>> from monolith.proto import tf_example_pb2
        >>> example = tf_example_pb2.Example()
        >>> example.features.feature["user"].int64_list.value.append(7)
        >>> example.features.feature["tags"].int64_list.value.extend([1, 2])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with TFRecordWriter(f"{folder}/rows.tfrecord.gz") as writer:
        ...         writer.write(example)
        ...     columns = [Column(name="user", shape=()), Column(name="tags")]
        ...     (batch,) = TFRecordSource(f"{folder}/*.gz", columns, batch_size=2)
        >>> batch["user"].tolist(), batch["tags"].to_lists()
        ([7], [[1, 2]])
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        columns: Iterable[Column],
        *,
        batch_size: int,
        compression: Compression = "infer",
        max_corrupt: int = 0,
        drop_remainder: bool = False,
        max_record_bytes: int = 128 << 20,
    ) -> None:
        super().__init__(
            paths,
            columns,
            batch_size=batch_size,
            format=_core.RecordFormat.TF_EXAMPLE,
            framing=_core.FramingOptions(
                tfrecord=True,
                lagrangex=False,
                kafka_dump_prefix=False,
                sort_id=False,
                kafka_dump=False,
                max_record_bytes=max_record_bytes,
            ),
            by_header=False,
            defaults={},
            compression=compression,
            max_corrupt=max_corrupt,
            drop_remainder=drop_remainder,
        )


class TFRecordWriter(OutputFile):
    """Writes a TFRecord file to a path or URL: gzip by the suffix .gz, zlib by .zz. See `TFRecordSource` for an example."""

    def write(self, record: bytes | Message) -> None:
        """Append one record: a message, or the bytes of one."""
        payload = record if isinstance(record, bytes) else record.SerializeToString()
        length = struct.pack("<Q", len(payload))
        self._write(length + _checksum(length) + payload + _checksum(payload))


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", _core.masked_crc32c(data))
