"""What describes an export: the checksums of its files, written last, and the columns and predictions of its model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import field_serializer

from monolith.config import Config
from monolith.durable import sync_to_disk
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, StorageError
from monolith.features import Feature
from monolith.features.batch import column_of
from monolith.nn import EmbeddingBagCollection

__all__ = [
    "CollectionSpec",
    "ExportManifest",
    "FORMAT_VERSION",
    "InputSpec",
    "OutputSpec",
    "RunOrigin",
    "Signature",
    "read_export_manifest",
    "serving_features",
    "version_folder",
    "write_export_manifest",
]

FORMAT_VERSION = 1
"""Version of the folder as a whole. A newer one is refused, so raise it whenever an older release would misread the folder."""
_NAME = "manifest.json"


class ExportedFile(Config):
    """One file of an export."""

    bytes: int
    sha256: str


class ExportManifest(Config):
    """Every file of an export, by its path inside the folder."""

    format_version: int = FORMAT_VERSION
    files: dict[str, ExportedFile]
    checksum: str
    """SHA-256 over the lines `path size sha256`, so that the list itself is protected too."""


def write_export_manifest(folder: Path) -> ExportManifest:
    """List all files of `folder`, make them durable, and write the list.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("hello")
        ...     _ = write_export_manifest(Path(folder))
        ...     list(read_export_manifest(Path(folder)).files)
        ['a.txt']
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _NAME)
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in paths}
    manifest = ExportManifest(files=files, checksum=_checksum(files))
    target = folder / _NAME
    target.write_text(manifest.model_dump_json(indent=1))
    for path in (*paths, target, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_to_disk(path)
    return manifest


def read_export_manifest(folder: Path, *, tables: bool = True) -> ExportManifest:
    """Read the list and check every file against it. Without `tables`, the files below tables/ may be missing."""
    target = folder / _NAME
    try:
        manifest = ExportManifest.from_json(target.read_text())
    except FileNotFoundError:
        raise CorruptFileError(f"{folder}: has no {_NAME}: it is not an export, or writing it did not finish") from None
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{target}: {error}") from None
    if manifest.format_version != FORMAT_VERSION:
        raise CorruptFileError(
            f"{target}: format version {manifest.format_version}, but this release reads {FORMAT_VERSION}"
        )
    if manifest.checksum != _checksum(manifest.files):
        raise CorruptFileError(f"{target}: its checksum is wrong; the list of files was altered")
    for name, expected in manifest.files.items():
        if tables or not name.startswith("tables/"):
            _check(folder, name, expected)
    return manifest


def version_folder(path: Path) -> Path:
    """Return `path` if it is an export, else the newest complete export of those that it contains under their numbers."""
    if (path / _NAME).is_file():
        return path
    if not path.is_dir():
        raise InvalidArgumentError(f"{path}: expected the folder of an export, or one with numbered exports")
    versions = [folder for folder in path.iterdir() if folder.name.isdecimal() and (folder / _NAME).is_file()]
    return max(versions, key=lambda folder: int(folder.name)) if versions else path


def _check(folder: Path, name: str, expected: ExportedFile) -> None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CorruptFileError(f"{folder / _NAME}: names {name!r}, which is outside of the export")
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


def _entry(path: Path) -> ExportedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ExportedFile(bytes=file.tell(), sha256=digest)


def _checksum(files: dict[str, ExportedFile]) -> str:
    lines = (f"{name} {entry.bytes} {entry.sha256}\n" for name, entry in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class InputSpec(Config):
    """A dense column that the model reads besides its features."""

    name: str
    dtype: str
    """As in torch, "float32"."""
    shape: tuple[int, ...]
    """Of one row."""

    def check(self, batch: Mapping[str, object]) -> torch.Tensor:
        """Return the column of `batch`, after a check of its type and shape."""
        value = column_of(batch, self.name)
        found = (
            f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        )
        if not isinstance(value, torch.Tensor) or found != f"{self.dtype} {[len(value), *self.shape]}":
            sizes = "".join(f", {size}" for size in self.shape)
            raise InvalidArgumentError(
                f"batch[{self.name!r}]: expected {self.dtype} [rows{sizes}], got {found or type(value).__name__}"
            )
        return value


class OutputSpec(Config):
    """One prediction of the model."""

    name: str
    kind: Literal["binary", "multiclass", "regression", "vector"]
    """`vector` is what a method of the model returns, see `export_model`."""
    shape: tuple[int, ...]
    """Of one row."""


class CollectionSpec(Config):
    """One `EmbeddingBagCollection` of the model."""

    path: str
    """Where it was in the model, "embeddings" for one."""
    seed: int
    features: tuple[Feature, ...]
    tables: dict[str, str]
    """Path of the file of each table, inside the export."""

    @field_serializer("features")
    def _explicit(self, features: tuple[Feature, ...]) -> list[dict[str, object]]:
        # Only fields that were set: a feature that shares rows refuses options about them. Schedules are functions
        # and only used in training.
        return [
            feature.model_dump(mode="json", include=feature.model_fields_set - {"learning_rate"})
            for feature in features
        ]


class RunOrigin(Config):
    """The run that an export comes from, and how far it was."""

    identity: str
    """Of the run, whatever its folder is called."""
    model_dir: str
    """Where it was."""
    sequence: int = 0
    """The newest segment of its change log. The export has everything up to there. 0 if it has no log."""


class Signature(Config):
    """Everything that a caller has to know about an exported model."""

    version: int
    """Number of the export, newer ones are greater."""
    step: int
    """Global step of the model."""
    inputs: tuple[InputSpec, ...]
    """Dense columns. The columns of ids are those of the features."""
    outputs: tuple[OutputSpec, ...]
    collections: tuple[CollectionSpec, ...]
    ragged: tuple[str, ...] = ()
    """Columns of ids that had rows of different lengths in the batch it was traced with. Others may have them too."""
    run: RunOrigin | None = None
    """The run that it was exported from. None if the run is not saved anywhere."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that a batch must have."""
        features = (feature.name for collection in self.collections for feature in collection.features)
        return tuple(dict.fromkeys((*features, *(spec.name for spec in self.inputs))))


def serving_features(collection: EmbeddingBagCollection) -> tuple[Feature, ...]:
    """Return the features of a collection with all defaults written out and without what only training needs.

    Example:
        >>> collection = EmbeddingBagCollection([Feature(name="user", dim=2, occurrence_threshold=3)])
        >>> (feature,) = serving_features(collection)
        >>> feature.table, feature.occurrence_threshold, len(feature.segments)
        ('user', 0, 1)
    """
    tables = collection.declaration.assignment
    return tuple(_serving_feature(feature, tables[feature.name]) for feature in collection.features)


def _serving_feature(feature: Feature, table: str) -> Feature:
    if feature.shared_with is not None:
        return feature
    kept = {name: getattr(feature, name) for name in feature.model_fields_set - _OF_ROW_OR_TRAINING}
    bias, vector = (feature.row[0], feature.row[1:]) if feature.bias else (False, feature.row)
    return Feature(**kept, segments=vector, bias=bias, table=table)


_OF_ROW = {"dim", "segments", "initializer", "optimizer", "compressor", "precision", "bias", "table"}
_OF_ROW_OR_TRAINING = _OF_ROW | {"occurrence_threshold", "expire_seconds", "learning_rate"}
