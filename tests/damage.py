"""Damaged copies of a file, one after the other, and a reader that must refuse them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from monolith.errors import CorruptFileError


def assert_all_refused(damaged: Iterable[tuple[str, bytes]], path: Path, read: Callable[[Path], object]) -> int:
    """Write each copy to `path` and `read` it; how many there were."""
    tried = 0
    for what, data in damaged:
        path.write_bytes(data)
        message = ""
        try:
            read(path)
        except CorruptFileError as error:
            message = str(error)
        assert message, f"{what}: read"
        assert str(path) in message, f"{what}: the message does not name the file: {message}"
        tried += 1
    return tried
