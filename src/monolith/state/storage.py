"""Folders of files on a disk or behind an fsspec URL, with whole writes and safe names.

On a disk a written file is durable and appears under its name at once. A remote store promises less: it has no rename, and a
reader may see a folder half filled. Writers therefore finish with a manifest, and readers trust the manifest alone.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from monolith.durable import sync_to_disk, write_durably
from monolith.errors import CorruptFileError, StorageError
from monolith.urls import StrPath, checked_location, filesystem_of, is_remote

__all__ = ["FileVersion", "Folder", "LocalFolder", "RemoteFolder", "StrPath", "open_folder", "safe_name"]

_PLAIN = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)
"""Names that are obviously safe, which nearly all are."""

FileVersion = tuple[int, int, int]
"""Inode, size and modification time: equal as long as a file is the same one."""


def safe_name(name: str, where: object) -> str:
    """Return `name` if it is a relative path that stays inside its folder.

    Raises `CorruptFileError` otherwise, which names `where` the name was found.

    Example:
        >>> safe_name("item/0-4095.table", "manifest.json")
        'item/0-4095.table'
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\0" in name or "\\" in name or ".." in parts or "/".join(parts) != name:
        raise CorruptFileError(f"{where}: names {name!r}, expected a relative path that stays inside of the folder")
    return name


class Folder(Protocol):
    """A folder whose files are named by relative paths with `/`. It need not exist before something is written."""

    def __str__(self) -> str:
        """Path or URL."""

    def read(self, name: str) -> bytes:
        """Read a whole file. Raises `StorageError` if it does not exist."""

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Replace a file. On a disk it is durable, and appears whole or not at all."""

    def put(self, name: str, source: Path) -> None:
        """Move a finished local file in. On a disk its bytes must be durable already and it must be on the same disk."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the size of each file in bytes, or None for one that does not exist."""

    def version(self, name: str) -> FileVersion | None:
        """Return what changes whenever the file does. None if it does not exist, or the store cannot tell."""

    def names(self) -> list[str]:
        """List the files and folders directly inside, sorted. Empty if the folder does not exist."""

    def local(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Provide the file as a local path: the file itself, or a copy that exists as long as the context."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all it holds. Does nothing if it does not exist."""

    def inside(self, name: str) -> Folder:
        """Return the folder of that name."""

    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """Provide a new local folder from which `put` can move files. It is removed with the context."""

    def settle(self) -> None:
        """On a disk, make the names that lead to the folder durable too, whoever created them."""


def open_folder(path: StrPath) -> Folder:
    """Return the folder at `path`, local or remote.

    Example:
        >>> folder = open_folder("memory://models/ctr")
        >>> folder.write("a/b.txt", b"hello")
        >>> folder.read("a/b.txt"), folder.size("a/b.txt"), folder.size("c"), folder.names()
        (b'hello', 5, None, ['a'])
    """
    return RemoteFolder(checked_location(path)) if is_remote(path) else LocalFolder(checked_location(path))


class LocalFolder:
    """A `Folder` on a disk. A write returns when its bytes and its name would survive a power cut."""

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes:
        """Read a whole file."""
        try:
            return self._path(name).read_bytes()
        except OSError as error:
            raise self._refused("read", name, error) from error

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write under a temporary name, sync, rename, sync the folder."""
        try:
            target = self._path(name)
            _make_folders(target.parent)
            write_durably(target, data)
        except OSError as error:
            raise self._refused("write", name, error) from error

    def put(self, name: str, source: Path) -> None:
        """Rename `source`, whose bytes are durable already, and sync the folder."""
        try:
            target = self._path(name)
            _make_folders(target.parent)
            source.replace(target)
            sync_to_disk(target.parent)
        except OSError as error:
            raise self._refused("write", name, error) from error

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""
        return self.sizes([name])[0]

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the size of each file in bytes, or None for one that does not exist."""
        sizes: list[int | None] = []
        for name in names:
            try:
                path = self.path / name if _PLAIN.fullmatch(name) else self._path(name)
                sizes.append(path.stat().st_size if path.is_file() else None)
            except OSError as error:
                raise self._refused("read", name, error) from error
        return sizes

    def version(self, name: str) -> FileVersion | None:
        """Return what changes whenever the file does, or None if it does not exist."""
        try:
            path = self._path(name)
            if not path.is_file():
                return None
            found = path.stat()
        except OSError as error:
            raise self._refused("read", name, error) from error
        return found.st_ino, found.st_size, found.st_mtime_ns

    def names(self) -> list[str]:
        """List the files and folders directly inside, sorted."""
        try:
            return sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []
        except OSError as error:
            raise self._refused("list", ".", error) from error

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Provide the file itself."""
        yield self._path(name)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all it holds, and sync."""
        try:
            path = self._path(name)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.exists() or path.is_symlink():
                path.unlink()
            else:
                return
            sync_to_disk(path.parent)
        except OSError as error:
            raise self._refused("remove", name, error) from error

    def inside(self, name: str) -> LocalFolder:
        """Return the folder of that name."""
        return LocalFolder(self._path(name))

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Provide a hidden folder inside of this one, so that files are moved by renaming."""
        try:
            _make_folders(self.path)
            scratch = Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=self.path))
        except OSError as error:
            raise self._refused("write", ".", error) from error
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def make(self) -> None:
        """Create the folder and its parents unless they exist."""
        try:
            _make_folders(self.path)
        except OSError as error:
            raise self._refused("make", ".", error) from error

    def settle(self) -> None:
        """Sync the folder and the two above it, because a process that died may have made them without syncing."""
        try:
            path = self.path.absolute()
            for folder in (path, *list(path.parents)[:2]):
                sync_to_disk(folder)
        except OSError as error:
            raise self._refused("sync", ".", error) from error

    def _path(self, name: str) -> Path:
        return self.path / (name if _PLAIN.fullmatch(name) else safe_name(name, self.path))

    def _refused(self, action: str, name: str, error: OSError) -> StorageError:
        path, why = self.path / name, error.strerror or error
        if isinstance(error, NotADirectoryError | FileExistsError):
            file = next((one for one in (path, *path.parents) if one.is_file()), None)
            why = why if file is None else f"{file} is a file, expected a folder"
        return StorageError(f"{path}: cannot {action}: {why}")


def _make_folders(path: Path) -> None:
    """Like `mkdir -p`, but the new names are durable."""
    if path.is_dir():
        return
    _make_folders(path.parent)
    path.mkdir(exist_ok=True)
    try:
        sync_to_disk(path.parent)
    except OSError:
        # Otherwise the next attempt finds the folder and takes its name for durable.
        path.rmdir()
        raise


class RemoteFolder:
    """A `Folder` behind an fsspec URL. Objects are written whole, and there is no rename."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, self._root = filesystem_of(self.url)

    def __str__(self) -> str:
        return self.url

    def read(self, name: str) -> bytes:
        """Read a whole object."""
        with self._refusals("read", name):
            data: bytes = self._files.cat_file(self._path(name))
            return data

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Replace an object."""
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
        """Return the size of an object in bytes, or None if it does not exist."""
        with self._refusals("read", name):
            self._files.invalidate_cache()
            try:
                found = self._files.info(self._path(name))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the size of each object in bytes, or None for one that does not exist."""
        return [self.size(name) for name in names]

    def version(self, name: str) -> FileVersion | None:
        """Return None: stores have no version that all of them share."""
        return None

    def names(self) -> list[str]:
        """List the objects and prefixes directly inside, sorted."""
        with self._refusals("list", "."):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return sorted({PurePosixPath(path).name for path in found})

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Provide a downloaded copy."""
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
        """Return the folder of that name."""
        return RemoteFolder(f"{self.url}/{safe_name(name, self)}")

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Provide a folder in the system's temporary space."""
        with tempfile.TemporaryDirectory(prefix="monolith-") as folder:
            yield Path(folder)

    def settle(self) -> None:
        """Do nothing: an object exists or it does not."""

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
