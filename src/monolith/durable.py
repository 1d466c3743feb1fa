"""Writes that survive a power cut once the call returns. Everything that stores state is built on them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["sync_to_disk", "write_durably"]


def sync_to_disk(path: Path) -> None:
    """Make a file, or the names in a folder, durable: after the call they survive a power cut.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sync_to_disk(Path(folder))
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a file that appears under its name whole and durable, or not at all. Raises `OSError`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_durably(Path(folder, "a.bin"), b"abc")
        ...     Path(folder, "a.bin").read_bytes()
        b'abc'
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself is durable only once the folder is.
    sync_to_disk(path.parent)
