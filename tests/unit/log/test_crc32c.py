"""Danger: a checksum that depends on how the bytes were handed over calls a good file damaged, or a damaged one good."""

from __future__ import annotations

import numpy as np
import pytest

from monolith import _core


def test_the_value_is_that_of_the_standard() -> None:
    assert _core.crc32c(b"123456789") == 0xE3069283
    assert _core.crc32c(b"") == 0


def test_any_contiguous_memory_will_do() -> None:
    array = np.arange(1000, dtype=np.int64)
    expected = _core.crc32c(array.tobytes())
    for buffer in (array, memoryview(array), bytearray(array.tobytes()), array.reshape(10, 100), array.view(np.uint8)):
        assert _core.crc32c(buffer) == expected


def test_parts_go_together() -> None:
    data = bytes(range(256)) * 5
    for split in (0, 1, 7, 500, len(data)):
        assert _core.crc32c(data[split:], _core.crc32c(data[:split])) == _core.crc32c(data)


def test_what_is_not_contiguous_memory_is_refused() -> None:
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        _core.crc32c(np.arange(10)[::2])
    with pytest.raises(TypeError):
        _core.crc32c("text")
