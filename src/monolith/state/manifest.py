"""The list of what a checkpoint or a snapshot consists of, written last: what it does not list does not exist."""

from __future__ import annotations

import json
import re
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, JsonValue

from monolith import _core
from monolith.config import Config, Count
from monolith.errors import ConfigError, CorruptFileError
from monolith.state.storage import Folder, StrPath, open_folder, safe_name
from monolith.table import NUM_BUCKETS, ProbabilisticAdmission, SlidingAdmission, TableConfig
from monolith.table.table_file import FileEntry

__all__ = ["MANIFEST", "Manifest", "Sealed", "check_sizes", "read_manifest", "read_sealed", "write_sealed"]

MANIFEST = "manifest.json"
"""Its name in the folder of a checkpoint or snapshot."""
VERSION = 1
_SEAL = b',"checksum":'

Bucket = Annotated[int, Field(ge=0, le=NUM_BUCKETS)]


class Sealed(Config):
    """What every manifest begins with; its file ends with a checksum of all bytes before."""

    later: ClassVar[frozenset[str]] = frozenset()
    """Fields that version 1 got later: written only where they say something, so that earlier releases read the rest."""
    format: str
    version: Literal[1] = 1

    @classmethod
    def kind(cls) -> str:
        """The only `format` of this class."""
        return str(cls.model_fields["format"].default)


class ShardEntry(Config):
    """What a table, or one shard of it, knew beside its rows."""

    max_event_time: Count
    updates: Count
    hashnet_scales: tuple[float, ...]
    admission: str | None = None
    """The file with its admission filter."""


class TableEntry(Config):
    """One table."""

    config: TableConfig
    layout: str
    """Equal for two tables iff their rows are interchangeable."""
    rows: Count
    """When it was written; training may have gone on meanwhile."""
    files: tuple[str, ...] = ()
    """Those with its rows that are in the folder of the manifest."""
    shards: tuple[ShardEntry, ...] = ()
    """Of a checkpoint, the state of each shard."""
    admission: SlidingAdmission | ProbabilisticAdmission | None = None
    """The configuration of its admission filter."""


class Manifest(Sealed):
    """What a checkpoint consists of.

    `files` are named relative to the checkpoint's folder, `snapshot` and `segments` relative to the model_dir it is in. The rows
    are those of the tables' own files, or those of the snapshot (of none, if there is none) changed by the segments in order.
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
    """Nested states by name: each is in `<value>.json` and `<value>.safetensors`."""
    files: tuple[FileEntry, ...]
    """Everything in the checkpoint's own folder."""
    tables: dict[str, TableEntry] = {}
    """By the name they have in the log."""
    sequence: Count = 0
    """The number of the last segment; 0 without a log."""
    snapshot: FileEntry | None = None
    """The manifest of the snapshot that the segments continue."""
    segments: tuple[FileEntry, ...] = ()
    """The segments of the log that lead from the snapshot to `sequence`, in order."""
    config: dict[str, JsonValue] = {}
    """The resolved configuration of the run, as given."""
    parts: tuple[FileEntry, ...] = ()
    """Of a run over parameter servers, the manifests of their own checkpoints, which have the rows of all other tables; named
    relative to the model_dir, or absolute if they lie elsewhere."""
    buckets: tuple[tuple[Bucket, Bucket], ...] | None = None
    """Of a part, the buckets that its server owned: first, and the one behind the last. None: all."""


AnyManifest = TypeVar("AnyManifest", bound=Sealed)


def read_manifest(path: StrPath) -> Manifest:
    """The manifest of the checkpoint at `path`; `CorruptFileError` if there is none, or it is damaged or too new.

    Example:
        >>> write_sealed(open_folder("memory://run/model.ckpt-5"), Manifest(step=5, time=0.0, files=()))
        >>> read_manifest("memory://run/model.ckpt-5").step
        5
    """
    return read_sealed(open_folder(path), Manifest)


def write_sealed(folder: Folder, manifest: Sealed) -> None:
    """Write `manifest` into `folder`, whose other files must be there already."""
    fields = type(manifest).model_fields
    unsaid = {name for name in manifest.later if getattr(manifest, name) == fields[name].default}
    body = manifest.model_dump_json(exclude=unsaid).encode()[:-1]
    folder.write(MANIFEST, body + _SEAL + b"%d}\n" % _core.crc32c(body))
    folder.settle()


def read_sealed(folder: Folder, kind: type[AnyManifest]) -> AnyManifest:
    """The manifest in `folder`, which must be of this kind and unaltered."""
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
        return kind.from_json(f"{body.decode()}}}")
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{where}: {error}") from None


def check_sizes(folder: Folder, files: tuple[FileEntry, ...]) -> None:
    """Refuse a folder in which one of `files` is missing or has another size."""
    for entry in files:
        found = folder.size(safe_name(entry.name, f"{folder}/{MANIFEST}"))
        if found != entry.size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CorruptFileError(f"{folder}/{entry.name}: expected {entry.size} bytes, but the file {state}")


def _check_version(data: bytes, kind: type[Sealed], where: str) -> None:
    # Before the checksum: a newer release may seal its files otherwise.
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
