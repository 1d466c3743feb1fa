"""TFRecord framing in bulk: a stream of bytes into records whose checksums hold, and records into framed bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from monolith import _core
from monolith.errors import CorruptFileError

__all__ = ["Records", "framed", "split_records"]

_HEADER, _FOOTER = 12, 4
_MAX_RECORD = 128 << 20


@dataclass(frozen=True, kw_only=True)
class Records:
    """Some consecutive records of a file."""

    data: bytes
    """Where they lie, among other bytes."""
    starts: np.ndarray
    """int64 [n]: where each record begins in `data`."""
    ends: np.ndarray
    """int64 [n]: where each record ends."""
    name: str
    """The file."""
    first: int
    """Number of the first of them in the file."""

    def where(self, place: int) -> str:
        """The file and the number of a record, for messages."""
        return f"{self.name}: record {self.first + place}"

    def part(self, begin: int, end: int) -> Records:
        """The records [begin, end) of these."""
        return Records(
            data=self.data,
            starts=self.starts[begin:end],
            ends=self.ends[begin:end],
            name=self.name,
            first=self.first + begin,
        )


def split_records(pieces: Iterable[bytes], name: str) -> Iterator[Records]:
    """The records of a stream that arrives in pieces; damage is a `CorruptFileError`."""
    reader = _Splitter(name)
    for piece in pieces:
        records = reader.add(piece)
        if len(records.starts):
            yield records
    reader.finish()


class _Splitter:
    def __init__(self, name: str) -> None:
        self._name, self._first, self._rest = name, 0, b""
        # Most records have the same length, so most headers have been checked before.
        self._lengths: dict[bytes, int] = {}

    def add(self, piece: bytes) -> Records:
        data = self._rest + piece
        starts: list[int] = []
        ends: list[int] = []
        at = 0
        while at + _HEADER <= len(data):
            header = data[at : at + _HEADER]
            length = self._lengths.get(header)
            if length is None:
                length = self._checked_length(header, len(starts))
            end = at + _HEADER + length
            if end + _FOOTER > len(data):
                break
            starts.append(at + _HEADER)
            ends.append(end)
            at = end + _FOOTER
        records = Records(
            data=data,
            starts=np.array(starts, np.int64),
            ends=np.array(ends, np.int64),
            name=self._name,
            first=self._first,
        )
        self._check_payloads(records, starts, ends)
        self._rest = data[at:]
        self._first += len(starts)
        return records

    def finish(self) -> None:
        if self._rest:
            raise CorruptFileError(f"{self._name}: the file ends in the middle of record {self._first}")

    def _checked_length(self, header: bytes, place: int) -> int:
        length, stored = struct.unpack("<QI", header)
        if _core.masked_crc32c(header[:8]) != stored:
            raise CorruptFileError(f"{self._name}: the length of record {self._first + place} is damaged")
        if length > _MAX_RECORD:
            raise CorruptFileError(
                f"{self._name}: record {self._first + place} has {length} bytes, the limit is {_MAX_RECORD}"
            )
        if len(self._lengths) < 1024:
            self._lengths[header] = length
        return int(length)

    def _check_payloads(self, records: Records, starts: list[int], ends: list[int]) -> None:
        data, checksum = records.data, _core.masked_crc32c
        found = np.array([checksum(data[a:b]) for a, b in zip(starts, ends, strict=True)], np.uint32)
        footers = np.frombuffer(data, np.uint8)[records.ends[:, None] + np.arange(_FOOTER)]
        stored = np.ascontiguousarray(footers).view("<u4").reshape(-1)
        wrong = np.flatnonzero(found != stored)
        if len(wrong):
            raise CorruptFileError(
                f"{records.where(int(wrong[0]))}: the checksum does not match, the record is damaged"
            )


def framed(records: np.ndarray) -> bytes:
    """Records of one size, uint8 [n, size], with lengths and checksums.

    Example:
        >>> framed(np.zeros((0, 8), np.uint8))
        b''
    """
    n, size = records.shape
    length = struct.pack("<Q", size)
    header = np.frombuffer(length + struct.pack("<I", _core.masked_crc32c(length)), np.uint8)
    payload = records.tobytes()
    checksums = [_core.masked_crc32c(payload[i * size : (i + 1) * size]) for i in range(n)]
    out = np.empty((n, _HEADER + size + _FOOTER), np.uint8)
    out[:, :_HEADER] = header
    out[:, _HEADER:-_FOOTER] = records
    out[:, -_FOOTER:] = np.array(checksums, "<u4").view(np.uint8).reshape(n, _FOOTER)
    return out.tobytes()
