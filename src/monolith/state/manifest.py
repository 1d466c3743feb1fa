"""Manifests: what a checkpoint or a snapshot consists of. Written last, so what no manifest lists does not exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, JsonValue

from monolith import _core
from monolith.config import Config, Count
from monolith.errors import ConfigError, CorruptFileError
from monolith.state.storage import Folder, StrPath, open_folder
from monolith.table import NUM_BUCKETS, ProbabilisticAdmission, SlidingAdmission, TableConfig
from monolith.table.table_file import FileEntry

__all__ = [
    "MANIFEST",
    "Manifest",
    "Sealed",
    "ShardEntry",
    "SnapshotManifest",
    "TableEntry",
    "check_sizes",
    "read_listed",
    "read_manifest",
    "read_sealed",
    "write_sealed",
]

MANIFEST = "manifest.json"
"""Name of the manifest in the folder of a checkpoint or snapshot."""
VERSION = 1
_SEAL = b',"checksum":'

Bucket = Annotated[int, Field(ge=0, le=NUM_BUCKETS)]


class Sealed(Config):
    """What every manifest begins with. Its file ends with a checksum of all bytes before."""

    later: ClassVar[frozenset[str]] = frozenset()
    """Fields added later to version 1. They are written only if they are set, so earlier releases can read the rest."""
    format: str
    version: Literal[1] = 1

    @classmethod
    def kind(cls) -> str:
        """Return the `format` of this class."""
        return str(cls.model_fields["format"].default)


class ShardEntry(Config):
    """The state of a table, or of one shard of it, besides its rows."""

    max_event_time: Count
    updates: Count
    hashnet_scales: tuple[float, ...]
    admission: str | None = None
    """The file with its admission filter."""


class TableEntry(Config):
    """One table."""

    config: TableConfig
    layout: str
    """Equal for two tables if and only if their rows are interchangeable."""
    rows: Count
    """When it was written. Training may have continued meanwhile."""
    files: tuple[str, ...] = ()
    """The files with its rows in the folder of the manifest."""
    shards: tuple[ShardEntry, ...] = ()
    """In a checkpoint, the state of each shard."""
    admission: SlidingAdmission | ProbabilisticAdmission | None = None
    """The configuration of its admission filter."""


class Manifest(Sealed):
    """What a checkpoint consists of.

    `files` are named relative to the checkpoint's folder, `snapshot` and `segments` relative to its model_dir. The rows are those
    of the tables' own files, or those of the snapshot, if there is one, changed by the segments in order.
    """

    later: ClassVar[frozenset[str]] = frozenset({"parts", "buckets"})
    format: Literal["monolith-checkpoint"] = "monolith-checkpoint"
    step: Count
    """Steps made when it was taken."""
    time: Annotated[float, Field(ge=0)]
    """When it was taken, seconds since 1970."""
    event_time: Count = 0
    """The newest event time trained."""
    states: dict[str, str] = {}
    """Nested states by name. Each is in `<value>.json` and `<value>.safetensors`."""
    files: tuple[FileEntry, ...]
    """Everything in the checkpoint's own folder."""
    tables: dict[str, TableEntry] = {}
    """By the name they have in the log."""
    sequence: Count = 0
    """The number of the last segment. 0 without a log."""
    snapshot: FileEntry | None = None
    """The manifest of the snapshot that the segments continue."""
    segments: tuple[FileEntry, ...] = ()
    """The segments of the log that lead from the snapshot to `sequence`, in order."""
    config: dict[str, JsonValue] = {}
    """The resolved configuration of the run, as given."""
    parts: tuple[FileEntry, ...] = ()
    """In a run with parameter servers, the manifests of their own checkpoints, which have the rows of all other tables. Named
    relative to the model_dir, or absolute if they are elsewhere."""
    buckets: tuple[tuple[Bucket, Bucket], ...] | None = None
    """In a part, the ranges of buckets that its server owned, ends excluded. None means all buckets."""


class SnapshotManifest(Sealed):
    """What a snapshot consists of, and between which cuts of the log it was written."""

    format: Literal["monolith-snapshot"] = "monolith-snapshot"
    sequence: Count
    """The last segment before the scan began. The ones after it have to be replayed."""
    closed_by: Count
    """The first segment cut after the scan had ended. The replay must not end before it."""
    time: float
    """When the scan began, seconds since 1970."""
    files: tuple[FileEntry, ...]
    """Everything in the snapshot's folder."""
    tables: dict[str, TableEntry]
    """By the name they have in the log."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


AnyManifest = TypeVar("AnyManifest", bound=Sealed)


def read_manifest(path: StrPath) -> Manifest:
    """Read the manifest of the checkpoint at `path`. Raises `CorruptFileError` if it is missing, damaged or too new.

    Example:
        >>> _ = write_sealed(open_folder("memory://run/model.ckpt-5"), Manifest(step=5, time=0.0, files=()))
        >>> read_manifest("memory://run/model.ckpt-5").step
        5
    """
    return read_sealed(open_folder(path), Manifest)[0]


def write_sealed(folder: Folder, manifest: Sealed) -> FileEntry:
    """Write `manifest` into `folder`, whose other files must exist already. Returns the entry of the manifest file itself."""
    fields = type(manifest).model_fields
    unset = {name for name in manifest.later if getattr(manifest, name) == fields[name].default}
    body = manifest.model_dump_json(exclude=unset).encode()[:-1]
    data = body + _SEAL + b"%d}\n" % _core.crc32c(body)
    folder.write(MANIFEST, data)
    folder.settle()
    return FileEntry.of(MANIFEST, data)


def read_sealed(folder: Folder, kind: type[AnyManifest]) -> tuple[AnyManifest, FileEntry]:
    """Read the manifest in `folder`, which must be of this kind and unaltered. Returns it and the entry of its file."""
    where = f"{folder}/{MANIFEST}"
    if folder.size(MANIFEST) is None:
        raise CorruptFileError(
            f"{folder}: has no {MANIFEST}: it is no {kind.kind()}, or writing or copying it did not finish"
        )
    data = folder.read(MANIFEST)
    _check_version(data, kind, where)
    body, _, seal = data.rpartition(_SEAL)
    if not re.fullmatch(rb"\d{1,10}}\n", seal) or int(seal[:-2]) != _core.crc32c(body):
        raise CorruptFileError(f"{where}: its checksum is wrong; the file was altered or is incomplete")
    try:
        return kind.from_json(f"{body.decode()}}}"), FileEntry.of(MANIFEST, data)
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{where}: {error}") from None


def check_sizes(folder: Folder, files: tuple[FileEntry, ...]) -> None:
    """Raise `CorruptFileError` if one of `files` is missing in `folder` or has another size."""
    for entry, found in zip(files, folder.sizes([entry.name for entry in files]), strict=True):
        if found != entry.size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CorruptFileError(f"{folder}/{entry.name}: expected {entry.size} bytes, but the file {state}")


def read_listed(folder: Folder, files: Iterable[FileEntry], name: str) -> bytes:
    """Read file `name`, which must be one of `files` and unaltered."""
    entry = next((entry for entry in files if entry.name == name), None)
    if entry is None:
        raise CorruptFileError(f"{folder}/{MANIFEST}: does not list {name!r}")
    check_sizes(folder, (entry,))
    data = folder.read(name)
    if FileEntry.of(name, data) != entry:
        raise CorruptFileError(f"{folder}/{name}: its checksum is wrong; the file was altered")
    return data


def _check_version(data: bytes, kind: type[Sealed], where: str) -> None:
    # Before the checksum: a newer release may compute it differently.
    try:
        head = json.loads(data)
        found, version = head["format"], head["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CorruptFileError(f"{where}: is not a manifest; the file was altered or is incomplete") from None
    if found != kind.kind():
        raise CorruptFileError(f"{where}: expected a {kind.kind()}, got {found!r}")
    if not isinstance(version, int) or version < 1:
        raise CorruptFileError(f"{where}: expected a version number, got {version!r}")
    if version > VERSION:
        raise CorruptFileError(
            f"{where}: format version {version} is newer than version {VERSION}, the newest this release reads; "
            "upgrade monolith-torch"
        )
