"""TensorFlow's snappy stream: blocks of a big-endian u32 with the packed size, then that many bytes of raw snappy.

Records continue across blocks. TensorFlow's reader unpacks a block into 256 KiB, so no written block may be larger.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pyarrow as pa

from monolith.errors import CorruptFileError

__all__ = ["BLOCK", "SnappyStreamWriter", "unpacked_blocks"]

BLOCK = 256 << 10
"""Plain bytes of a full block."""

_MAX_PACKED = 1 << 28
_MOST_EXPANSION = 32  # three bytes of snappy stand for at most 64


def unpacked_blocks(read: Callable[[int], bytes], name: str) -> Iterator[bytes]:
    """The plain bytes of the stream under `read`, block by block; damage is a `CorruptFileError`."""
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
    """The varint that snappy data begins with."""
    size = 0
    for i, byte in enumerate(packed[:5]):
        size |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return size
    return None


class SnappyStreamWriter:
    """Packs what is written into blocks; `finish` writes the last one, which may be short."""

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
        """Write what is left."""
        if self._plain:
            self._pack(bytes(self._plain))
        self._plain.clear()

    def _pack(self, plain: bytes) -> None:
        packed = pa.compress(plain, codec="snappy", asbytes=True)
        self._write(struct.pack(">I", len(packed)) + packed)
