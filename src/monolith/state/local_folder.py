"""`LocalFolder`: files on a disk, each durable and whole under its name, or not there."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from monolith.durable import sync_to_disk, write_durably
from monolith.errors import StorageError
from monolith.state.file_names import safe_name
from monolith.urls import StrPath

__all__ = ["LocalFolder"]


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
            write_durably(target, data)

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

    def make(self) -> None:
        """Create the folder, and those it is in, unless it is there."""
        with self._refusals("make", "."):
            _make_folders(self.path)

    def settle(self) -> None:
        """Sync the folder, the one it is in, and the one that is in: a process that died may have made them unsynced."""
        with self._refusals("sync", "."):
            path = self.path.absolute()
            for folder in (path, *list(path.parents)[:2]):
                sync_to_disk(folder)

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


def _make_folders(path: Path) -> None:
    """Like `mkdir -p`, but the new names are durable."""
    if path.is_dir():
        return
    _make_folders(path.parent)
    path.mkdir(exist_ok=True)
    try:
        sync_to_disk(path.parent)
    except OSError:
        # Otherwise the next attempt finds the folder, and takes its name for durable.
        path.rmdir()
        raise
