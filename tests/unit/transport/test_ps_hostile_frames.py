"""Danger: a damaged or hostile message that makes a server read past its end, allocate without bound, or die."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.errors import ProtocolError
from monolith.transport.frames import BFLOAT16, PROTOCOL_VERSION, decode, encode

HEADER = struct.Struct("<4sHHQQII")
GOOD = encode(call=16, request=3, text='{"a": 1}', arrays=[np.arange(6).reshape(2, 3), np.ones(5, dtype=np.float32)])


def frame(
    *, count: int = 0, shapes: bytes = b"", text: bytes = b"", size: int | None = None, body: bytes = b""
) -> bytes:
    head = HEADER.pack(b"MOPS", PROTOCOL_VERSION, 16, 1, 0, count, len(text) if size is None else size) + shapes + text
    return head.ljust((len(head) + 7) & ~7, b"\0") + body


def shape(code: int, *dimensions: int) -> bytes:
    return struct.pack("<BB6x", code, len(dimensions)) + struct.pack(f"<{len(dimensions)}Q", *dimensions)


@pytest.mark.parametrize("dtype", ["<i8", "<i4", "<f4", "<f8", "<f2", BFLOAT16, "u1"])
@pytest.mark.parametrize("dims", [(), (0,), (3,), (2, 3), (0, 65536), (2, 0, 3), (1,) * 8])
def test_arrays_of_every_dtype_and_shape_come_back(dtype: str, dims: tuple[int, ...]) -> None:
    array = np.frombuffer(bytes(range(256)) * 8, dtype=dtype)[: int(np.prod(dims))].reshape(dims)
    back = decode(encode(call=1, request=2, instance=3, text="é", arrays=[array, array]))
    assert back.text == "é"
    assert [b.dtype for b in back.arrays] == [array.dtype] * 2
    assert [b.tobytes() for b in back.arrays] == [array.tobytes()] * 2
    assert [b.shape for b in back.arrays] == [dims] * 2


@pytest.mark.parametrize("offset", range(8))
def test_memory_at_any_address_gives_aligned_arrays(offset: int) -> None:
    memory = np.empty(len(GOOD) + 8, dtype=np.uint8)
    memory[offset : offset + len(GOOD)] = GOOD
    back = decode(memory[offset : offset + len(GOOD)])
    assert all(array.flags.aligned for array in back.arrays)
    assert back.arrays[0].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_a_frame_that_was_cut_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="frame"):
        decode(GOOD[:length])


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "expected a header of 32 bytes, got 0"),
        (b"GET / HTTP/1.1\r\n" * 4, "expected the magic"),
        (
            HEADER.pack(b"MOPS", PROTOCOL_VERSION + 1, 16, 1, 0, 0, 0),
            f"expected protocol version {PROTOCOL_VERSION}, got {PROTOCOL_VERSION + 1}; upgrade",
        ),
        (frame(count=65537), "at most 65,536 arrays, got 65,537"),
        (frame(count=2**32 - 1), "at most 65,536 arrays"),
        (frame(count=3, shapes=shape(1, 1)), "it ends before the shape of array 1"),
        (frame(count=1, shapes=shape(0, 1)), "unknown dtype 0"),
        (frame(count=1, shapes=shape(99, 1)), "unknown dtype 99"),
        (frame(count=1, shapes=shape(1, *[1] * 9)), "9 dimensions, at most 8"),
        (frame(count=1, shapes=struct.pack("<BB6x", 1, 8)), "it ends inside the shape of array 0"),
        (frame(count=1, shapes=shape(1, 2**63)), "add up to"),
        (frame(count=1, shapes=shape(1, 2**64 - 1)), "add up to"),
        (frame(count=1, shapes=shape(1, 2**32, 2**32), body=bytes(0)), "add up to"),  # 2**64, which would wrap to 0
        (frame(count=1, shapes=shape(1, 2**61, 8), body=bytes(8)), "add up to"),
        (frame(count=1, shapes=shape(1, 0, 2**63)), "claims the shape"),
        (frame(count=1, shapes=shape(1, 0, 2**62, 2**62)), "claims the shape"),
        (frame(size=2**32 - 1), "its text claims 4,294,967,295 bytes, 0 are left"),
        (frame(text=b"\xff\xfe"), "not UTF-8"),
        (frame() + b"12345678", "add up to 32 bytes, it has 40"),
    ],
)
def test_each_way_to_be_wrong_is_named(data: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match="frame") as caught:
        decode(data)
    assert complaint in str(caught.value)


def test_a_frame_above_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="at most 100 bytes, got"):
        decode(GOOD, max_bytes=100)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flipped_bytes_are_an_error_or_another_frame_of_the_same_size(data: st.DataObject) -> None:
    damaged = GOOD.copy()
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    try:
        back = decode(damaged)
    except ProtocolError:
        return
    assert sum(array.nbytes for array in back.arrays) <= len(GOOD)
