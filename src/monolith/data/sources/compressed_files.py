"""Bytes of a file, a URL or standard input, decompressed while reading and compressed while writing."""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
import sys
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Literal, Self, cast

import fsspec
import pyarrow as pa

from monolith.data.sources.files import STDIN
from monolith.errors import InvalidArgumentError, StorageError
from monolith.urls import checked_location

__all__ = ["Compression", "OutputFile", "StreamDamage", "compression_of", "open_file", "read_stream"]

Compression = Literal["infer", "none", "gzip", "zlib", "zstd", "snappy"]
"""How a file is compressed. "infer" decides by .gz, .zz, .zst and .snappy. Snappy is in Hadoop's blocks."""

_SUFFIXES = {".gz": "gzip", ".zz": "zlib", ".zst": "zstd", ".snappy": "snappy"}
_PIECE = 1 << 20
_MAX_SNAPPY_BLOCK = 1 << 28


class StreamDamage(Exception):  # noqa: N818 - never leaves this package
    """The compressed bytes are damaged, and everything after them is lost."""


def compression_of(url: str, compression: str) -> str:
    """Return the compression of `url`, by its name if it is to be inferred."""
    if compression == "infer":
        return next((kind for suffix, kind in _SUFFIXES.items() if url.endswith(suffix)), "none")
    if compression not in ("none", *_SUFFIXES.values()):
        known = ", ".join(["infer", "none", *_SUFFIXES.values()])
        raise InvalidArgumentError(f"compression: expected one of {known}, got {compression!r}")
    return compression


@contextlib.contextmanager
def open_file(url: str, compression: str, offset: int) -> Iterator[IO[bytes]]:
    """Open the decompressed bytes of `url` from `offset` on. Standard input always begins where it is."""
    if url == STDIN:
        yield _decompressed(cast("IO[bytes]", _Available()), compression_of(url, compression))
        return
    kind = compression_of(url, compression)
    try:
        with fsspec.open(checked_location(url), "rb") as file:
            stream = _decompressed(file, kind)
            if kind == "none":
                stream.seek(offset)
            else:
                _discard(stream, offset)
            yield stream
    except OSError as error:
        raise StorageError(f"{url}: cannot read: {error}") from error


def read_stream(stream: IO[bytes], size: int) -> bytes:
    """Return up to `size` bytes, none at the end. Damaged compression raises `StreamDamage`, after all undamaged bytes."""
    # `read` would collect `size` bytes, and lose those before the damage when it reaches it.
    read = getattr(stream, "read1", stream.read)
    try:
        return cast("bytes", read(size))
    except (EOFError, zlib.error, gzip.BadGzipFile, pa.ArrowInvalid) as error:
        raise StreamDamage(str(error)) from None
    except OSError as error:
        # Arrow reports errors of a codec as input/output errors without an error number.
        if error.errno is None:
            raise StreamDamage(str(error)) from None
        raise


def _discard(stream: IO[bytes], count: int) -> None:
    while count > 0 and (piece := read_stream(stream, min(count, _PIECE))):
        count -= len(piece)


def _decompressed(file: IO[bytes], kind: str) -> IO[bytes]:
    match kind:
        case "gzip":
            return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
        case "zlib":
            return io.BufferedReader(cast("io.RawIOBase", _ZlibReader(file)), _PIECE)
        case "zstd":
            return cast("IO[bytes]", pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"))
        case "snappy":
            return io.BufferedReader(cast("io.RawIOBase", _HadoopSnappyReader(file)), _PIECE)
        case _:
            return file


class _Available(io.RawIOBase):
    """Standard input that returns what has arrived instead of waiting for the requested size."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        stdin = cast("io.BufferedReader", sys.stdin.buffer)
        return stdin.read1(size)


class _ZlibReader(io.RawIOBase):
    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._zlib = file, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        while not self._zlib.eof:
            packed = self._zlib.unconsumed_tail or self._file.read(_PIECE)
            plain = self._zlib.decompress(packed, len(buffer))
            if plain:
                buffer[: len(plain)] = plain
                return len(plain)
            if not packed:
                raise EOFError("the file ends in the middle of the compressed data")
        return 0


class _HadoopSnappyReader(io.RawIOBase):
    """Blocks of a big-endian u32 plain size, then chunks with a big-endian u32 packed size until the block is complete."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._plain = file, memoryview(b"")
        self._left = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        while not self._plain:
            if self._left == 0:
                header = self._file.read(4)
                if not header:
                    return 0
                self._left = self._size(header)
            else:
                self._plain = memoryview(self._chunk())
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _chunk(self) -> bytes:
        size = self._size(self._file.read(4))
        packed = self._file.read(size)
        if len(packed) < size:
            raise EOFError("the file ends in the middle of a snappy chunk")
        plain_size = _snappy_plain_size(packed)
        if plain_size > self._left:
            raise pa.ArrowInvalid("a snappy chunk is longer than its block")
        self._left -= plain_size
        plain: bytes = pa.decompress(packed, plain_size, codec="snappy", asbytes=True)
        return plain

    @staticmethod
    def _size(header: bytes) -> int:
        if len(header) < 4:
            raise EOFError("the file ends in the middle of a snappy block")
        (size,) = struct.unpack(">I", header)
        if size > _MAX_SNAPPY_BLOCK:
            raise pa.ArrowInvalid(f"a snappy block of {size} bytes")
        return int(size)


def _snappy_plain_size(packed: bytes) -> int:
    """Return the varint that snappy data begins with."""
    size = 0
    for i, byte in enumerate(packed[:5]):
        size |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return size
    raise pa.ArrowInvalid("snappy data without a size")


class OutputFile:
    """Base of `TFRecordWriter` and `RecordWriter`: a file being written. An existing one is replaced."""

    def __init__(self, url: str) -> None:
        kind = compression_of(url, "infer")
        if kind not in ("none", "gzip", "zlib"):
            raise InvalidArgumentError(f"url: {url!r} would be {kind}; writers compress with gzip (.gz) and zlib (.zz)")
        self._url = url
        try:
            self._file = cast("IO[bytes]", fsspec.open(checked_location(url), "wb").open())
        except OSError as error:
            raise StorageError(f"{url}: cannot write: {error}") from error
        self._gzip = gzip.GzipFile(fileobj=self._file, mode="wb") if kind == "gzip" else None
        self._zlib = zlib.compressobj() if kind == "zlib" else None

    def _write(self, data: bytes) -> None:
        try:
            if self._gzip is not None:
                self._gzip.write(data)
            else:
                self._file.write(data if self._zlib is None else self._zlib.compress(data))
        except OSError as error:
            raise StorageError(f"{self._url}: cannot write: {error}") from error

    def close(self) -> None:
        """Write buffered bytes and close the file. Closing again does nothing."""
        if self._file.closed:
            return
        try:
            if self._gzip is not None:
                self._gzip.close()
            if self._zlib is not None:
                self._file.write(self._zlib.flush())
            self._file.close()
        except OSError as error:
            raise StorageError(f"{self._url}: cannot write: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
