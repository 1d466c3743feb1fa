"""Files that appear whole or not at all, several of them together."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from monolith.durable import sync_to_disk
from monolith.errors import StorageError

__all__ = ["replacing_files"]


@contextlib.contextmanager
def replacing_files(paths: Sequence[Path]) -> Iterator[list[IO[bytes]]]:
    """Gives a file to write for each path. At the end all are synced and get their names; on an error none does.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     target = Path(folder, "new", "a.bin")
        ...     with replacing_files([target]) as (file,):
        ...         size = file.write(b"abc")
        ...     target.read_bytes()
        b'abc'
    """
    suffix = f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = [path.with_name(path.name + suffix) for path in paths]
    try:
        for folder in {path.parent for path in paths}:
            folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            files: list[IO[bytes]] = [opened.enter_context(path.open("xb")) for path in temporary]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for source, target in zip(temporary, paths, strict=True):
            source.replace(target)
        for folder in {path.parent for path in paths}:
            sync_to_disk(folder)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{error.filename or paths[0]}: cannot write: {error.strerror or error}") from error
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):  # most often it has its name by now
                path.unlink()
