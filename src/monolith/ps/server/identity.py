"""The identity of a server with a folder: a number that it keeps in all its lives."""

from __future__ import annotations

from pathlib import Path

from monolith.durable import write_durably
from monolith.errors import CorruptFileError, StorageError

__all__ = ["kept_identity"]

IDENTITY = "server"
"""The file of the folder that has it. Not in the log: whoever gives buckets to a server must know it again from the start."""


def kept_identity(folder: Path, otherwise: int) -> int:
    """The identity of the server of `folder`; at first it is `otherwise`, durable from then on.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept_identity(Path(folder), 5), kept_identity(Path(folder), 6)
        (5, 5)
    """
    path = folder / IDENTITY
    try:
        if not path.exists():
            write_durably(path, str(otherwise).encode())
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise StorageError(f"{path}: cannot be read or written: {error.strerror}") from error
    if not text.isdecimal() or not 0 < int(text) < 2**63:
        raise CorruptFileError(f"{path}: expected the number of a server, got {text[:40]!r}")
    return int(text)
