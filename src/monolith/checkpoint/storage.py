"""Folders of files on a disk or behind an fsspec URL: whole writes, safe names, and nothing else.

On a disk a written file is durable and appears under its name at once. A remote store promises less: no rename, and a reader
may see a folder half filled. Writers therefore finish with a manifest, and readers believe the manifest alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

import fsspec

from monolith.checkpoint.paths import is_absolute
from monolith.errors import CorruptFileError, StorageError
from monolith.table.store_folder import sync_to_disk

__all__ = [
    "Folder",
    "LocalFolder",
    "RemoteFolder",
    "StrPath",
    "is_remote",
    "open_folder",
    "safe_name",
]

StrPath = str | os.PathLike[str]
"""A local path, or a URL that fsspec knows, such as `s3://bucket/model`."""


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
        """On a disk: make the folder's own name durable too, whoever created it."""


def open_folder(path: StrPath) -> Folder:
    """The folder at `path`, local or remote.

    Example:
        >>> folder = open_folder("memory://models/ctr")
        >>> folder.write("a/b.txt", b"hello")
        >>> folder.read("a/b.txt"), folder.size("a/b.txt"), folder.size("c"), folder.names()
        (b'hello', 5, None, ['a'])
    """
    if is_remote(path):
        return RemoteFolder(os.fspath(path))
    return LocalFolder(re.sub(r"^file:/(//)?", "/", os.fspath(path)))


def is_remote(path: StrPath) -> bool:
    """Whether `path` is a URL of another store than this machine's disks.

    Example:
        >>> [is_remote(path) for path in ("model", "/data/model", "file:///data", "hdfs:/model", "s3://bucket/model")]
        [False, False, False, True, True]
    """
    text = os.fspath(path)
    return is_absolute(text) and not text.startswith(("/", "file:/"))


def safe_name(name: str, where: object) -> str:
    """`name` if it is a relative path inside of its folder, otherwise `CorruptFileError` about `where` it was found.

    Example:
        >>> safe_name("item/0-4095.table", "manifest.json")
        'item/0-4095.table'
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\0" in name or "\\" in name or ".." in parts or "/".join(parts) != name:
        raise CorruptFileError(f"{where}: names {name!r}, expected a relative path that stays inside of the folder")
    return name


class LocalFolder:
    """A `Folder` on a disk. A write returns when its bytes and its name would survive a power cut."""

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        with self._refusals("read", name):
            return self._path(name).read_bytes()

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write under a temporary name, sync, rename, sync the folder."""
        with self._refusals("write", name):
            target = self._path(name)
            _make_folders(target.parent)
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            sync_to_disk(target.parent)

    def put(self, name: str, source: Path) -> None:
        """Rename `source`, whose bytes are durable already, and sync the folder."""
        with self._refusals("write", name):
            target = self._path(name)
            _make_folders(target.parent)
            source.replace(target)
            sync_to_disk(target.parent)

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""
        with self._refusals("read", name):
            path = self._path(name)
            return path.stat().st_size if path.is_file() else None

    def names(self) -> list[str]:
        """Names of the files and folders directly inside, sorted."""
        with self._refusals("list", "."):
            return sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """The file itself."""
        yield self._path(name)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all it holds, and sync."""
        with self._refusals("remove", name):
            path = self._path(name)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.exists() or path.is_symlink():
                path.unlink()
            else:
                return
            sync_to_disk(path.parent)

    def inside(self, name: str) -> LocalFolder:
        """The folder of that name."""
        return LocalFolder(self._path(name))

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A hidden folder inside of this one, so that files are moved by renaming."""
        with self._refusals("write", "."):
            _make_folders(self.path)
            scratch = Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=self.path))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def settle(self) -> None:
        """Sync the folder and the one it is in."""
        with self._refusals("sync", "."):
            sync_to_disk(self.path)
            sync_to_disk(self.path.absolute().parent)

    def _path(self, name: str) -> Path:
        return self.path / safe_name(name, self)

    @contextlib.contextmanager
    def _refusals(self, action: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.path / name}: cannot {action}: {error.strerror or error}") from error


class RemoteFolder:
    """A `Folder` behind an fsspec URL: objects that are written whole, and no rename."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # fsspec wants an authority, if an empty one; people write hdfs:/path.
        full = re.sub(r"^hdfs:/(?!/)", "hdfs:///", self.url)
        self._files, self._root = fsspec.core.url_to_fs(full)

    def __str__(self) -> str:
        return self.url

    def read(self, name: str) -> bytes:
        """All bytes of an object."""
        with self._refusals("read", name):
            data: bytes = self._files.cat_file(self._path(name))
            return data

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Put an object in place of what had its name."""
        with self._refusals("write", name):
            self._make_parent(name)
            with self._files.open(self._path(name), "wb") as file:
                file.write(data)

    def put(self, name: str, source: Path) -> None:
        """Upload `source` and remove it here."""
        with self._refusals("write", name):
            self._make_parent(name)
            self._files.put_file(str(source), self._path(name))
            source.unlink()

    def size(self, name: str) -> int | None:
        """Bytes of an object, None if there is none."""
        with self._refusals("read", name):
            self._files.invalidate_cache()
            try:
                found = self._files.info(self._path(name))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def names(self) -> list[str]:
        """Names of the objects and prefixes directly inside, sorted."""
        with self._refusals("list", "."):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return sorted({PurePosixPath(path).name for path in found})

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """A downloaded copy."""
        with self.scratch() as folder:
            path = folder / PurePosixPath(name).name
            with self._refusals("read", name):
                self._files.get_file(self._path(name), str(path))
            yield path

    def remove(self, name: str) -> None:
        """Remove an object, or all objects under a prefix."""
        with self._refusals("remove", name), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

    def inside(self, name: str) -> RemoteFolder:
        """The folder of that name."""
        return RemoteFolder(f"{self.url}/{safe_name(name, self)}")

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder in the system's temporary space."""
        with tempfile.TemporaryDirectory(prefix="monolith-") as folder:
            yield Path(folder)

    def settle(self) -> None:
        """Nothing to do: an object is there or it is not."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{safe_name(name, self)}"

    def _make_parent(self, name: str) -> None:
        self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    @contextlib.contextmanager
    def _refusals(self, action: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.url}/{name}: cannot {action}: {error.strerror or error}") from error


def _make_folders(path: Path) -> None:
    """Like `mkdir -p`, but the new names are durable."""
    if path.is_dir():
        return
    _make_folders(path.parent)
    path.mkdir(exist_ok=True)
    sync_to_disk(path.parent)
