"""Folders of files on a disk or behind an fsspec URL: whole writes, safe names, and nothing else.

On a disk a written file is durable and appears under its name at once. A remote store promises less: no rename, and a reader
may see a folder half filled. Writers therefore finish with a manifest, and readers believe the manifest alone.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

from monolith.errors import InvalidArgumentError
from monolith.state.file_names import safe_name
from monolith.state.local_folder import LocalFolder
from monolith.state.remote_folder import RemoteFolder
from monolith.urls import StrPath, checked_location, is_url

__all__ = ["Folder", "LocalFolder", "RemoteFolder", "StrPath", "is_remote", "open_folder", "safe_name"]


class Folder(Protocol):
    """A folder whose files are named by relative paths with `/`. It need not exist before something is written."""

    def __str__(self) -> str:
        """Path or URL."""

    def read(self, name: str) -> bytes:
        """All bytes of a file; `StorageError` if there is none."""

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Put a file in place of what had its name; on a disk it is durable, and there whole or not at all."""

    def put(self, name: str, source: Path) -> None:
        """Move a finished local file in; on a disk its bytes must be durable already and it must be on the same disk."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""

    def names(self) -> list[str]:
        """Names of the files and folders directly inside, sorted; none if the folder does not exist."""

    def local(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """The file as a local path: itself, or a copy that lives as long as the context."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all it holds; nothing happens if there is none."""

    def inside(self, name: str) -> Folder:
        """The folder of that name."""

    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """A new local folder from which `put` can move files; it is removed with the context."""

    def settle(self) -> None:
        """On a disk: make the names that lead to it durable too, whoever created them."""


def open_folder(path: StrPath) -> Folder:
    """The folder at `path`, local or remote.

    Example:
        >>> folder = open_folder("memory://models/ctr")
        >>> folder.write("a/b.txt", b"hello")
        >>> folder.read("a/b.txt"), folder.size("a/b.txt"), folder.size("c"), folder.names()
        (b'hello', 5, None, ['a'])
    """
    text = checked_location(path)
    return RemoteFolder(text) if is_remote(text) else LocalFolder(text)


def is_remote(path: StrPath) -> bool:
    """Whether `path` is a URL of another store than this machine's disks. `InvalidArgumentError` if it cannot be meant.

    Example:
        >>> [is_remote(path) for path in ("model", "/data/model", "file:///data", "hdfs:/model", "s3://bucket/model")]
        [False, False, False, True, True]
    """
    if "::" in os.fspath(path) and "://" in os.fspath(path):
        raise InvalidArgumentError(
            f"{os.fspath(path)!r}: expected a path or one URL; a chain of stores is for reading data"
        )
    return is_url(path)
