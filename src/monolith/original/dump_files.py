"""The files of a dump, `<prefix>-00000-of-00002` and so on: TFRecords, plain or in TensorFlow's snappy stream.

A snappy stream is a sequence of blocks: the packed size as a big-endian u32, then that many bytes of raw snappy. Records
continue across blocks. TensorFlow's reader unpacks a block into 256 KiB, so no written block may be larger.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import fsspec
import numpy as np
import pyarrow as pa

from monolith import _core
from monolith.console import Progress
from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.urls import checked_location, filesystem_of

__all__ = [
    "BLOCK",
    "DumpFiles",
    "DumpRecords",
    "SnappyStreamWriter",
    "find_shards",
    "framed",
    "has_dump",
    "plain_pieces",
    "shard_name",
    "split_records",
    "unpacked_blocks",
]

_PIECE = 4 << 20
BLOCK = 256 << 10
"""Plain bytes of a full block."""
_MAX_PACKED = 1 << 28
_MOST_EXPANSION = 32  # three bytes of snappy stand for at most 64
_HEADER, _FOOTER = 12, 4
_MAX_RECORD = 128 << 20


def shard_name(prefix: str, shard: int, shards: int) -> str:
    """Return the name of one file of a dump.

    Example:
        >>> shard_name("model.ckpt-7.assets/user", 0, 2)
        'model.ckpt-7.assets/user-00000-of-00002'
    """
    return f"{prefix}-{shard:05d}-of-{shards:05d}"


def find_shards(prefix: str) -> list[str]:
    """Return the files of the dump `prefix`, a path or URL, in order. Other files in the folder are ignored.

    Raises `InvalidArgumentError` if there is none, `CorruptFileError` if some are missing or belong to different dumps.
    """
    folder, _, base = prefix.rpartition("/")
    found = _parts(prefix)
    if not found:
        raise InvalidArgumentError(
            f"{prefix}: there is no dump of that name; expected {shard_name(base, 0, 1)} or the like in {folder or '.'}"
        )
    totals = sorted({int(match[2]) for match in found})
    if len(totals) > 1:
        raise CorruptFileError(
            f"{prefix}: files of dumps with {' and '.join(map(str, totals))} parts are in one folder; remove the older ones"
        )
    (shards,) = totals
    parts = {int(match[1]): match[0] for match in found}
    # The first gap is at most as far as there are files, whatever number a name claims.
    missing = next((shard for shard in range(shards) if shard not in parts), None)
    if missing is not None or len(found) != shards:
        what = "two files for one part" if missing is None else f"{shard_name(base, missing, shards)} is missing"
        raise CorruptFileError(f"{prefix}: expected {shards} parts, found {len(found)}: {what}; copy the dump again")
    return [f"{folder}/{parts[shard]}" if folder else parts[shard] for shard in range(shards)]


def has_dump(prefix: str) -> bool:
    """Tell whether there is any file of a dump of that name."""
    return bool(_parts(prefix))


def _parts(prefix: str) -> list[re.Match[str]]:
    """Return the names of the files of a dump, with number and total as groups."""
    folder, _, base = prefix.rpartition("/")
    pattern = re.compile(re.escape(base) + r"-(\d{5,9})-of-(\d{5,9})")
    return [match for name in _names(folder) if (match := pattern.fullmatch(name))]


def _names(folder: str) -> list[str]:
    try:
        system, path = filesystem_of(folder or ".")
        return [str(name).rstrip("/").rpartition("/")[2] for name in system.ls(path, detail=False)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, ImportError) as error:
        raise StorageError(f"{folder}: cannot list: {error}") from error


class DumpFiles:
    """Opens the files of a dump one after another and reports how much has been read."""

    def __init__(self, paths: list[str], progress: Progress | None = None) -> None:
        self.paths = paths
        self._progress, self._done = progress, 0
        self._total = sum(_size(path) for path in paths) if progress else 0

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Callable[[int], bytes]]:
        """Yield a function that reads up to a number of bytes of `path`, and none at the end."""
        try:
            with fsspec.open(checked_location(path), "rb") as file:
                yield lambda size: self._counted(file.read(size))
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{path}: cannot read: {error}") from error

    def _counted(self, data: bytes) -> bytes:
        self._done += len(data)
        if self._progress and data:
            self._progress(self._done, self._total)
        return data


def _size(path: str) -> int:
    try:
        system, inner = filesystem_of(path)
        return int(system.size(inner))
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error}") from error


def plain_pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield the bytes of a plain file in chunks of a few megabytes."""
    while piece := read(_PIECE):
        yield piece


def unpacked_blocks(read: Callable[[int], bytes], name: str) -> Iterator[bytes]:
    """Yield the plain bytes of a snappy stream, block by block. Raises `CorruptFileError` if it is damaged."""
    while header := read(4):
        size = struct.unpack(">I", header)[0] if len(header) == 4 else -1
        if size > _MAX_PACKED:
            raise CorruptFileError(
                f"{name}: a snappy block of {size} bytes; the file is damaged or not a snappy stream"
            )
        packed = read(size) if size >= 0 else b""
        if len(packed) < size or size < 0:
            raise CorruptFileError(f"{name}: the file ends in the middle of a snappy block")
        yield _unpacked(packed, name)


def _unpacked(packed: bytes, name: str) -> bytes:
    size = _plain_size(packed)
    if size is None or size > _MOST_EXPANSION * len(packed):
        raise CorruptFileError(f"{name}: a snappy block is damaged, or the file is not a snappy stream")
    try:
        plain: bytes = pa.decompress(packed, size, codec="snappy", asbytes=True)
    except (OSError, pa.ArrowException) as error:
        raise CorruptFileError(f"{name}: a snappy block is damaged: {error}") from None
    return plain


def _plain_size(packed: bytes) -> int | None:
    """Return the varint that snappy data begins with."""
    size = 0
    for i, byte in enumerate(packed[:5]):
        size |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return size
    return None


class SnappyStreamWriter:
    """Compresses what is written into blocks. `finish` writes the last one, which may be short."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write, self._plain = write, bytearray()

    def write(self, data: bytes) -> None:
        """Append plain bytes."""
        self._plain += data
        full = len(self._plain) // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            self._pack(bytes(self._plain[start : start + BLOCK]))
        del self._plain[:full]

    def finish(self) -> None:
        """Write the rest."""
        if self._plain:
            self._pack(bytes(self._plain))
        self._plain.clear()

    def _pack(self, plain: bytes) -> None:
        packed = pa.compress(plain, codec="snappy", asbytes=True)
        self._write(struct.pack(">I", len(packed)) + packed)


@dataclass(frozen=True, kw_only=True)
class DumpRecords:
    """Consecutive records of a file."""

    data: bytes
    """The bytes that contain them."""
    starts: np.ndarray
    """int64 [n]: where each record begins in `data`."""
    ends: np.ndarray
    """int64 [n]: where each record ends."""
    name: str
    """The file."""
    first: int
    """Number of the first of them in the file."""

    def where(self, place: int) -> str:
        """Return the file and the number of a record, for messages."""
        return f"{self.name}: record {self.first + place}"

    def part(self, begin: int, end: int) -> DumpRecords:
        """Return the records [begin, end) of these."""
        return DumpRecords(
            data=self.data,
            starts=self.starts[begin:end],
            ends=self.ends[begin:end],
            name=self.name,
            first=self.first + begin,
        )


def split_records(pieces: Iterable[bytes], name: str) -> Iterator[DumpRecords]:
    """Yield the records of a stream that arrives in chunks. Raises `CorruptFileError` if it is damaged."""
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

    def add(self, piece: bytes) -> DumpRecords:
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
        records = DumpRecords(
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

    def _check_payloads(self, records: DumpRecords, starts: list[int], ends: list[int]) -> None:
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
    """Return records of one size, uint8 [n, size], with lengths and checksums.

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
