"""Frames: one message between a client and a server, as bytes.

A frame is a header, the dtype and shape of each array, a text in JSON, and the arrays, everything at multiples of 8 bytes:

    header   magic "MOPS", version u16, call u16, request u64, instance u64, number of arrays u32, length of the text u32
    shapes   for each array: dtype u8, dimensions u8, 6 zero bytes, then each dimension as u64
    text     UTF-8, padded with zero bytes
    arrays   C order, little endian, each padded with zero bytes

Over Arrow Flight it travels as the application metadata of one message. A record batch would carry the same buffers, no faster,
and would put a parser of nested columns between the network and the checks below.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from monolith.errors import ProtocolError

__all__ = [
    "BFLOAT16",
    "Frame",
    "PROTOCOL_VERSION",
    "SHARED_FROM",
    "allocate",
    "call_of",
    "decode",
    "encode",
    "encode_parts",
    "instance_of",
    "own",
    "request_of",
    "set_instance",
]

MAGIC = b"MOPS"
PROTOCOL_VERSION = 2
"""The version of the protocol. A server answers frames of its own version only."""
SHARED_FROM = 2**15
"""Bytes of the smallest frame that is passed through shared memory. Smaller ones are as fast through a socket."""
MAX_DIMENSIONS = 8
MAX_ARRAYS = 65536

_HEADER = struct.Struct("<4sHHQQII")
_SHAPE = struct.Struct("<BB6x")
_CALL, _CALL_AT = struct.Struct("<H"), 6
_INSTANCE, _INSTANCE_AT = struct.Struct("<Q"), 16

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""bfloat16, which NumPy lacks: its 16 bits in a structured dtype, so that they are not mistaken for integers."""

_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<i8"),
    2: np.dtype("<i4"),
    3: np.dtype("<f4"),
    4: np.dtype("<f8"),
    5: np.dtype("<f2"),
    6: BFLOAT16,
    7: np.dtype("u1"),
}
_FLOATS = (np.dtype("<f4"), np.dtype("<f2"), BFLOAT16)
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

ArrayShape = tuple[np.dtype, tuple[int, ...]]
"""The dtype and the dimensions of an array in a frame."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message.

    Example:
        >>> sent = encode(call=3, request=7, text='{"tables": []}', arrays=[np.arange(3)])
        >>> decode(sent)
        Frame(call=3, request=7, instance=0, text='{"tables": []}', arrays=(array([0, 1, 2]),))
    """

    call: int
    """A `CallNumber`. 0 in an answer that is an error."""
    request: int
    """A number chosen by the client, repeated in the answer."""
    instance: int = 0
    """In an answer, the incarnation of the server that sent it. In a request, the incarnation it is for. 0 means any."""
    text: str
    """JSON."""
    arrays: tuple[np.ndarray, ...] = ()
    """Read-only, and aligned to their element."""


def encode(
    *,
    call: int,
    request: int,
    instance: int = 0,
    text: str,
    arrays: Sequence[np.ndarray] = (),
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the bytes of a frame, uint8 [n]. `out` as in `allocate`."""
    buffer, views = allocate(
        call=call, request=request, instance=instance, text=text, shapes=[(a.dtype, a.shape) for a in arrays], out=out
    )
    for view, array in zip(views, arrays, strict=True):
        view[...] = array
    return buffer


def allocate(
    *,
    call: int,
    request: int,
    instance: int = 0,
    text: str,
    shapes: Sequence[ArrayShape] = (),
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the bytes of a frame whose arrays are still to be filled, and the arrays as views of them.

    They are in `out`, uint8 [m], if the frame is large and fits, and in memory of their own otherwise.
    """
    start = _start(call, request, instance, text, shapes)
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
    size = len(start) + sum(size + (-size & 7) for size in sizes)
    is_shared = out is not None and SHARED_FROM <= size <= len(out)
    buffer = out[:size] if out is not None and is_shared else np.empty(size, dtype=np.uint8)
    buffer.data[: len(start)] = start
    at, views = len(start), []
    for (dtype, shape), size in zip(shapes, sizes, strict=True):
        views.append(np.ndarray(shape, dtype, buffer, at))
        if size & 7:
            buffer[at + size : at + size + (-size & 7)] = 0
        at += size + (-size & 7)
    return buffer, views


def encode_parts(
    *, call: int, request: int, instance: int = 0, text: str, arrays: Sequence[np.ndarray] = ()
) -> list[np.ndarray]:
    """Return the bytes of a frame in parts, uint8 [n] each, to be sent in order. Contiguous arrays are not copied.

    Example:
        >>> parts = encode_parts(call=3, request=7, text="{}", arrays=[np.arange(3)])
        >>> decode(np.concatenate(parts)).arrays
        (array([0, 1, 2]),)
    """
    start = _start(call, request, instance, text, [(a.dtype, a.shape) for a in arrays])
    parts = [np.frombuffer(start, dtype=np.uint8)]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts.append(flat)
        if flat.size & 7:
            parts.append(np.zeros(-flat.size & 7, dtype=np.uint8))
    return parts


def decode(data: bytes | memoryview | np.ndarray, *, max_bytes: int = 2**31) -> Frame:
    """Return the frame in `data`. Every length is checked before it is used, and `ProtocolError` says what is wrong.

    Arrays are views of `data` where it is aligned, copies otherwise, so they take at most the memory of `data`.
    """
    buffer = np.frombuffer(data, dtype=np.uint8)
    if buffer.size > max_bytes:
        raise ProtocolError(f"frame: expected at most {max_bytes:,} bytes, got {buffer.size:,}; send smaller batches")
    if buffer.size < _HEADER.size:
        raise ProtocolError(f"frame: expected a header of {_HEADER.size} bytes, got {buffer.size}")
    magic, version, call, request, instance, count, text_size = _HEADER.unpack_from(buffer.data)
    if magic != MAGIC:
        raise ProtocolError(f"frame: expected the magic {MAGIC!r}, got {magic!r}")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"frame: expected protocol version {PROTOCOL_VERSION}, got {version}; upgrade the older side"
        )
    shapes, at = _shapes(buffer, count)
    if text_size > buffer.size - at:
        raise ProtocolError(f"frame: its text claims {text_size:,} bytes, {buffer.size - at:,} are left")
    try:
        text = buffer[at : at + text_size].tobytes().decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"frame: its text is not UTF-8: {error}") from None
    at += text_size
    arrays = _arrays(buffer, at + (-at & 7), shapes)
    return Frame(call=call, request=request, instance=instance, text=text, arrays=arrays)


def own(frame: Frame, *, but_floats: bool) -> Frame:
    """Return the frame with copies of its arrays, or only of those that hold no floats if `but_floats`.

    Values that are checked and then used must not change in between. Floats are not checked: a client that changes
    gradients while they are read spoils only its own update.
    """
    arrays = tuple(array if but_floats and array.dtype in _FLOATS else array.copy() for array in frame.arrays)
    return replace(frame, arrays=arrays)


def request_of(data: bytes | memoryview | np.ndarray) -> int:
    """Return the number of the request in a frame that may be damaged. 0 if it has no readable header."""
    buffer = np.frombuffer(data, dtype=np.uint8)
    if buffer.size < _HEADER.size or bytes(buffer[:4]) != MAGIC:
        return 0
    request: int = _HEADER.unpack_from(buffer.data)[3]
    return request


def call_of(frame: np.ndarray) -> int:
    """Return the call of a request, given its first part. 0 if it has no header."""
    return int(_CALL.unpack_from(frame.data, _CALL_AT)[0]) if frame.size >= _HEADER.size else 0


def instance_of(frame: np.ndarray) -> int:
    """Return the incarnation of the server that a request is for, given its first part."""
    return int(_INSTANCE.unpack_from(frame.data, _INSTANCE_AT)[0])


def set_instance(frame: np.ndarray, instance: int) -> None:
    """Address a request, given its first part, to another incarnation of the server."""
    _INSTANCE.pack_into(frame.data, _INSTANCE_AT, instance)


def _start(call: int, request: int, instance: int, text: str, shapes: Sequence[ArrayShape]) -> bytearray:
    """Return the bytes before the arrays."""
    words = text.encode()
    start = bytearray(_HEADER.pack(MAGIC, PROTOCOL_VERSION, call, request, instance, len(shapes), len(words)))
    for dtype, shape in shapes:
        start += _SHAPE.pack(_CODES[dtype], len(shape))
        start += struct.pack(f"<{len(shape)}Q", *shape)
    start += words
    start += bytes(-len(start) & 7)
    return start


def _shapes(buffer: np.ndarray, count: int) -> tuple[list[ArrayShape], int]:
    if count > MAX_ARRAYS:
        raise ProtocolError(f"frame: expected at most {MAX_ARRAYS:,} arrays, got {count:,}")
    shapes: list[ArrayShape] = []
    at = _HEADER.size
    for index in range(count):
        if at + _SHAPE.size > buffer.size:
            raise ProtocolError(f"frame: it ends before the shape of array {index} of {count}")
        code, dimensions = _SHAPE.unpack_from(buffer.data, at)
        at += _SHAPE.size
        if code not in _DTYPES:
            raise ProtocolError(f"frame: array {index} has the unknown dtype {code}; known are 1..{max(_DTYPES)}")
        if dimensions > MAX_DIMENSIONS:
            raise ProtocolError(
                f"frame: array {index} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are allowed"
            )
        if at + 8 * dimensions > buffer.size:
            raise ProtocolError(f"frame: it ends inside the shape of array {index} of {count}")
        shapes.append((_DTYPES[code], struct.unpack_from(f"<{dimensions}Q", buffer.data, at)))
        at += 8 * dimensions
    return shapes, at


def _arrays(buffer: np.ndarray, at: int, shapes: Sequence[ArrayShape]) -> tuple[np.ndarray, ...]:
    # Python integers: a product of hostile dimensions must not wrap around.
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
    expected = at + sum(size + (-size & 7) for size in sizes)
    if expected != buffer.size:
        raise ProtocolError(f"frame: its shapes add up to {expected:,} bytes, it has {buffer.size:,}")
    arrays = []
    for (dtype, shape), size in zip(shapes, sizes, strict=True):
        try:
            array: np.ndarray = np.ndarray(shape, dtype, buffer, at)
        except (OverflowError, TypeError, ValueError):
            raise ProtocolError(f"frame: an array without elements claims the shape {list(shape)}") from None
        # gRPC hands over memory at any address, and the core reads whole words.
        arrays.append(array if array.flags.aligned else array.copy())
        at += size + (-size & 7)
    return tuple(arrays)
