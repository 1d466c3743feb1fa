"""Files of the original, made without the code that reads and writes them: protobuf for messages, a slow CRC for frames."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from google.protobuf.message import Message

from monolith import EmbeddingTable
from monolith.proto import table_dump_pb2


def crc32c(data: bytes) -> int:
    """CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> bytes:
    """The checksum as a TFRecord file has it."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord(payload: bytes) -> bytes:
    """One framed record."""
    length = struct.pack("<Q", len(payload))
    return length + masked_crc32c(length) + payload + masked_crc32c(payload)


def tfrecords(messages: Iterable[Message | bytes]) -> bytes:
    """The bytes of a TFRecord file."""
    return b"".join(tfrecord(m if isinstance(m, bytes) else m.SerializeToString()) for m in messages)


def snappy(plain: bytes, block: int = 1000) -> bytes:
    """TensorFlow's snappy stream, in blocks of any size."""
    blocks = [plain[i : i + block] for i in range(0, len(plain), block)]
    packed = [pa.compress(each, codec="snappy", asbytes=True) for each in blocks]
    return b"".join(struct.pack(">I", len(each)) + each for each in packed)


def entry(
    id_: int, num: Sequence[float], *opt: table_dump_pb2.SingleOptimizerDump, time: int | None = None
) -> table_dump_pb2.EntryDump:
    """An entry; without `opt` it has no optimizer state at all."""
    dump = table_dump_pb2.OptimizerDump(dump=opt) if opt else None
    return table_dump_pb2.EntryDump(id=id_, num=num, opt=dump, last_update_ts_sec=time)


def adagrad(*norm: float) -> table_dump_pb2.SingleOptimizerDump:
    """State of an Adagrad segment."""
    return table_dump_pb2.SingleOptimizerDump(adagrad=table_dump_pb2.AdagradOptimizerDump(norm=norm))


def write_dump(prefix: Path, *shards: Sequence[Message | bytes]) -> str:
    """A single-table dump, one sequence of entries per file."""
    for i, entries in enumerate(shards):
        Path(f"{prefix}-{i:05d}-of-{len(shards):05d}").write_bytes(tfrecords(entries))
    return str(prefix)


def write_multi_dump(prefix: Path, *shards: dict[str, Sequence[Message]]) -> str:
    """A multi-table dump, for each file the entries of every table."""
    for i, tables in enumerate(shards):
        name = f"-{i:05d}-of-{len(shards):05d}"
        entries = [each for table in tables.values() for each in table]
        counts = [
            table_dump_pb2.MultiHashTableMetadata(table_name=table, num_entries=len(rows))
            for table, rows in tables.items()
        ]
        Path(f"{prefix}{name}").write_bytes(snappy(tfrecords(entries)))
        Path(f"{prefix}.meta{name}").write_bytes(tfrecords(counts))
    return str(prefix)


def sorted_rows(table: EmbeddingTable) -> dict[str, np.ndarray]:
    """Every row in the order of ids, for comparing tables bit by bit."""
    columns = table.to_numpy()
    order = np.argsort(columns["ids"])
    return {name: column[order] for name, column in columns.items()}


def assert_same_rows(left: EmbeddingTable, right: EmbeddingTable) -> None:
    """Ids, weights, every slot and all times are equal, bit by bit."""
    rows, expected = sorted_rows(left), sorted_rows(right)
    assert list(rows) == list(expected)
    for name, column in expected.items():
        np.testing.assert_array_equal(rows[name].view(np.uint8), column.view(np.uint8), err_msg=name)
