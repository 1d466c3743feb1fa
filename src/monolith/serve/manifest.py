"""The list of an export's files with their checksums, written last: unless all of it is true, there is no export."""

from __future__ import annotations

import hashlib
from pathlib import Path

from monolith.config import Config
from monolith.durable import sync_to_disk
from monolith.errors import ConfigError, CorruptFileError, StorageError

__all__ = ["FORMAT_VERSION", "Manifest", "read_manifest", "write_manifest"]

FORMAT_VERSION = 1
"""Of the folder as a whole. A newer one is refused, so raise it whenever an older release would misread the folder."""
NAME = "manifest.json"


class FileEntry(Config):
    """One file of an export."""

    bytes: int
    sha256: str


class Manifest(Config):
    """Every file of an export, by its path inside the folder."""

    format_version: int = FORMAT_VERSION
    files: dict[str, FileEntry]
    checksum: str
    """SHA-256 over the lines `path size sha256`, so that the list itself is protected too."""


def write_manifest(folder: Path) -> Manifest:
    """List all files of `folder`, make them durable, and write the list.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hello")
        ...     _ = write_manifest(Path(folder))
        ...     list(read_manifest(Path(folder)).files)
        ['a.txt']
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in paths}
    manifest = Manifest(files=files, checksum=_checksum(files))
    target = folder / NAME
    target.write_text(manifest.model_dump_json(indent=1))
    for path in (*paths, target, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_to_disk(path)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the list and check every file against it."""
    target = folder / NAME
    try:
        manifest = Manifest.from_json(target.read_text())
    except FileNotFoundError:
        raise CorruptFileError(f"{folder}: has no {NAME}: it is not an export, or writing it did not finish") from None
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{target}: {error}") from None
    if manifest.format_version != FORMAT_VERSION:
        raise CorruptFileError(
            f"{target}: format version {manifest.format_version}, but this release reads {FORMAT_VERSION}"
        )
    if manifest.checksum != _checksum(manifest.files):
        raise CorruptFileError(f"{target}: its checksum is wrong; the list of files was altered")
    for name, expected in manifest.files.items():
        _check(folder, name, expected)
    return manifest


def _check(folder: Path, name: str, expected: FileEntry) -> None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CorruptFileError(f"{folder / NAME}: names {name!r}, which is outside of the export")
    try:
        found = _entry(path)
    except FileNotFoundError:
        raise CorruptFileError(f"{path}: the file is missing") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    if found.bytes != expected.bytes:
        raise CorruptFileError(f"{path}: expected {expected.bytes} bytes, found {found.bytes}")
    if found.sha256 != expected.sha256:
        raise CorruptFileError(f"{path}: its SHA-256 is {found.sha256}, expected {expected.sha256}: it was altered")


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(bytes=file.tell(), sha256=digest)


def _checksum(files: dict[str, FileEntry]) -> str:
    lines = (f"{name} {entry.bytes} {entry.sha256}\n" for name, entry in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
