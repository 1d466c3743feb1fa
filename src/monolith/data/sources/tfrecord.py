"""TFRecord files of tf.train.Example, read and written without TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from monolith import _core
from monolith.data.sources.column import Column
from monolith.data.sources.output import OutputFile
from monolith.data.sources.records import RecordSource
from monolith.data.sources.streams import Compression

__all__ = ["TFRecordSource", "TFRecordWriter"]


class TFRecordSource(RecordSource):
    """Batches from TFRecord files of tf.train.Example; all checksums are checked.

    `paths`: URLs, globs, folders, or "-" for standard input. A column without a shape may be missing in a record; one with
    a shape must have a default for that. At most `max_corrupt` records that are damaged or do not fit the columns are
    skipped, then `CorruptFileError` or `SchemaError` is raised; when a length is damaged, the rest of its file is lost and
    counts as one.

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
