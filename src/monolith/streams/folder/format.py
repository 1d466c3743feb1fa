"""The bytes of a segment of a folder stream: a header, then batches of records. docs/formats.md has them as a table.

A batch holds its records by column (lengths, timestamps, then all values, all keys, all headers), so it is parsed by a few calls
of NumPy and one slice per record. Its header has a checksum of its own, so a damaged length is never believed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from monolith import _core
from monolith.errors import CorruptFileError
from monolith.streams.batching_writer import MAX_RECORD_BYTES
from monolith.streams.stream import Headers, NewRecord

__all__ = [
    "BATCH_HEADER",
    "BatchHeader",
    "Columns",
    "MAX_BATCH_BYTES",
    "SEGMENT_HEADER",
    "SEGMENT_OFFSETS",
    "StreamSegmentHeader",
    "closing_mark",
    "decode_batch",
    "encode_batch",
    "stream_segment_name",
]

SEGMENT_OFFSETS = 1 << 20
"""A segment has offsets below its first one plus this. After a power cut writing continues there: see `StreamSegmentHeader`."""
MAX_BATCH_BYTES = 2 * MAX_RECORD_BYTES

_SEGMENT = struct.Struct("<8sII16s16sqq")
_SEGMENT_MAGIC = b"MONOSTRM"
_VERSION = 1
SEGMENT_HEADER = _SEGMENT.size

_BATCH = struct.Struct("<4sIIIIIqqqQII")
_BATCH_MAGIC = b"MSB1"
BATCH_HEADER = _BATCH.size
# Behind the magic and the checksum of the header.
_CHECKED = 8
_HAS_KEYS, _HAS_HEADERS, _CLOSED = 1, 2, 4
_HEADER_SIZES = struct.Struct("<HI")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSegmentHeader:
    """The first 64 bytes of a segment. They are on disk before its first record is written."""

    stream: bytes
    """Identity of the stream, 16 random bytes."""
    boot: bytes
    """The start of the operating system in which it was made, 16 bytes. What was written since may be lost in a power cut."""
    base: int
    """Offset of its first record."""
    previous_end: int
    """Offset after the last record of the segment before. Smaller than `base` if writing continued after a power cut: offsets
    between may have been read before it, and are not given to other records."""

    def pack(self) -> bytes:
        """Return the bytes."""
        packed = _SEGMENT.pack(_SEGMENT_MAGIC, 0, _VERSION, self.stream, self.boot, self.base, self.previous_end)
        return packed[:8] + struct.pack("<I", _core.crc32c(packed[12:])) + packed[12:]

    @classmethod
    def unpack(cls, data: bytes, where: str) -> Self:
        """Raises `CorruptFileError` if these are not the bytes of a header. `where` is the file."""
        if len(data) < SEGMENT_HEADER or data[:8] != _SEGMENT_MAGIC:
            raise CorruptFileError(f"{where}: is not a segment of a stream")
        _, crc, version, stream, boot, base, previous_end = _SEGMENT.unpack_from(data)
        if _core.crc32c(data[12:SEGMENT_HEADER]) != crc:
            raise CorruptFileError(f"{where}: the checksum of its header is wrong; the file is damaged")
        if version != _VERSION:
            raise CorruptFileError(f"{where}: has version {version}, this release reads version {_VERSION}")
        return cls(stream=stream, boot=boot, base=base, previous_end=previous_end)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchHeader:
    """The first 64 bytes of a batch."""

    size: int
    """Of the batch with this header."""
    count: int
    first_offset: int
    max_timestamp: int
    durable: int
    """So many bytes of the file were on disk for certain when the batch was written."""
    body_crc: int
    has_keys: bool
    has_headers: bool
    closed: bool
    """Whether it is the mark of a writer that closed the segment, which was then on disk as a whole."""
    value_bytes: int
    key_bytes: int

    @property
    def end_offset(self) -> int:
        """Offset after its last record."""
        return self.first_offset + self.count

    @classmethod
    def unpack(cls, data: bytes, at: int = 0) -> Self | None:
        """Return the header at byte `at` of `data`, or None if the bytes there are none, or damaged."""
        packed = data[at : at + BATCH_HEADER]
        if len(packed) < BATCH_HEADER or packed[:4] != _BATCH_MAGIC:
            return None
        _, crc, body_crc, size, count, flags, first, _, newest, durable, value_bytes, key_bytes = _BATCH.unpack(packed)
        if _core.crc32c(packed[_CHECKED:]) != crc or not BATCH_HEADER <= size <= MAX_BATCH_BYTES:
            return None
        return cls(
            size=size,
            count=count,
            first_offset=first,
            max_timestamp=newest,
            durable=durable,
            body_crc=body_crc,
            has_keys=bool(flags & _HAS_KEYS),
            has_headers=bool(flags & _HAS_HEADERS),
            closed=bool(flags & _CLOSED),
            value_bytes=value_bytes,
            key_bytes=key_bytes,
        )

    def body_is_sound(self, data: bytes | memoryview, at: int = 0) -> bool:
        """Return whether the body behind the header at byte `at` of `data` is there and has the right checksum."""
        body = memoryview(data)[at + BATCH_HEADER : at + self.size]
        return len(body) == self.size - BATCH_HEADER and _core.crc32c(body) == self.body_crc


@dataclass(slots=True)
class Columns:
    """Records of one partition, by column, with contiguous offsets."""

    first_offset: int
    values: list[bytes]
    timestamps: list[int]
    keys: list[bytes | None]
    headers: list[Headers] | None

    def part(self, start: int, stop: int) -> Columns:
        """Return the records from `start` to `stop`."""
        if start == 0 and stop >= len(self.values):
            return self
        return Columns(
            self.first_offset + start,
            self.values[start:stop],
            self.timestamps[start:stop],
            self.keys[start:stop],
            None if self.headers is None else self.headers[start:stop],
        )


def stream_segment_name(base: int) -> str:
    """Return the file name of the segment whose first offset is `base`. Names sort as the offsets do.

    Example:
        >>> stream_segment_name(7)
        '00000000000000000007.segment'
    """
    return f"{base:020}.segment"


def encode_batch(records: Sequence[NewRecord], first_offset: int, durable: int) -> bytes:
    """Return the bytes of a batch with at least one record."""
    body, has_keys, has_headers, oldest, newest, value_bytes, key_bytes = _core.encode_records(records)
    flags = _HAS_KEYS * has_keys | _HAS_HEADERS * has_headers
    return _pack(body, len(records), flags, first_offset, oldest, newest, durable, value_bytes, key_bytes)


def closing_mark(next_offset: int, size: int) -> bytes:
    """Return the mark of a writer that closes a segment of `size` bytes, all of which are on disk."""
    return _pack(b"", 0, _CLOSED, next_offset, -1, -1, size, 0, 0)


def _pack(
    body: bytes, count: int, flags: int, first: int, oldest: int, newest: int, durable: int, values: int, keys: int
) -> bytes:
    size = BATCH_HEADER + len(body)
    fields = (size, count, flags, first, oldest, newest, durable, values, keys)
    packed = _BATCH.pack(_BATCH_MAGIC, 0, _core.crc32c(body), *fields)
    return b"".join((packed[:4], struct.pack("<I", _core.crc32c(packed[_CHECKED:])), packed[_CHECKED:], body))


def decode_batch(header: BatchHeader, data: bytes, at: int, where: str) -> Columns:
    """Return the records of the batch at byte `at` of `data`, whose checksum is right.

    Raises:
        CorruptFileError: its lengths do not fit together. `where` is the file and the position of the batch.
    """
    count, start = header.count, at + BATCH_HEADER
    fixed = count * (12 + 4 * header.has_keys + 4 * header.has_headers)
    if fixed + header.value_bytes + header.key_bytes > header.size - BATCH_HEADER:
        raise CorruptFileError(f"{where}: {count} records do not fit into {header.size} bytes; the file is damaged")
    lengths = np.frombuffer(data, "<u4", count, start)
    timestamps = np.frombuffer(data, "<i8", count, start + 4 * count).tolist()
    key_lengths = np.frombuffer(data, "<i4", count, start + 12 * count) if header.has_keys else None
    begin = start + fixed
    values = _slices(data, lengths, begin, header.value_bytes, where)
    begin += header.value_bytes
    keys: list[bytes | None] = [None] * count
    if key_lengths is not None:
        found: list[bytes] = _slices(data, np.maximum(key_lengths, 0), begin, header.key_bytes, where)
        none = (key_lengths < 0).tolist()
        keys = [None if absent else key for absent, key in zip(none, found, strict=True)]
    begin += header.key_bytes
    headers = None
    if header.has_headers:
        sizes = np.frombuffer(data, "<u4", count, start + fixed - 4 * count)
        packed = _slices(data, sizes, begin, at + header.size - begin, where)
        headers = [_unpack_headers(each, where) for each in packed]
    return Columns(header.first_offset, values, timestamps, keys, headers)


def _slices(data: bytes, lengths: np.ndarray, begin: int, total: int, where: str) -> list[bytes]:
    edges = np.empty(len(lengths) + 1, dtype=np.int64)
    edges[0] = begin
    np.cumsum(lengths, out=edges[1:])
    edges[1:] += begin
    if edges[-1] != begin + total:
        raise CorruptFileError(f"{where}: the lengths of its records do not add up; the file is damaged")
    return [data[a:b] for a, b in pairwise(edges.tolist())]


def _unpack_headers(packed: bytes, where: str) -> Headers:
    if not packed:
        return ()
    found, at = [], 0
    try:
        while at < len(packed):
            name_size, size = _HEADER_SIZES.unpack_from(packed, at)
            begin = at + _HEADER_SIZES.size
            at = begin + name_size + size
            found.append((packed[begin : begin + name_size].decode(), packed[begin + name_size : at]))
    except (struct.error, UnicodeDecodeError):
        at = -1
    if at != len(packed):
        raise CorruptFileError(f"{where}: the headers of a record are damaged")
    return tuple(found)
