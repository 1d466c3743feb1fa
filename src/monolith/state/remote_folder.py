"""`RemoteFolder`: objects behind an fsspec URL."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from monolith.errors import StorageError
from monolith.state.file_names import safe_name
from monolith.urls import filesystem_of

__all__ = ["RemoteFolder"]


class RemoteFolder:
    """A `Folder` behind an fsspec URL: objects that are written whole, and no rename."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, self._root = filesystem_of(self.url)

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
