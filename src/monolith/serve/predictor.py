"""Load an export and predict, without the code of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError
from monolith.features.batch import as_batch, num_rows
from monolith.nn import EmbeddingBagCollection
from monolith.serve.manifest import CollectionSpec, ExportManifest, Signature, read_export_manifest
from monolith.serve.program import DenseProgram, program_inputs
from monolith.table import EmbeddingTable, LocalStore, Store
from monolith.urls import local_path

__all__ = ["Predictor", "import_saved_model", "load"]


class Predictor:
    """A loaded export. `predict` may be called from several threads at once.

    Example:
        >>> from monolith.serve import load
        >>> predictor = load("exported_models/1700000000")  # doctest: +SKIP
        >>> predictor.predict({"user": user_ids, "item": item_ids})["ctr"]  # doctest: +SKIP
        tensor([0.0312, 0.2917])
    """

    def __init__(
        self, signature: Signature, program: DenseProgram, collections: Mapping[str, EmbeddingBagCollection]
    ) -> None:
        self.signature = signature
        """Columns it needs, predictions it makes, version."""
        self._program = program
        self._columns = signature.columns
        self._collections = {path: collection.eval() for path, collection in collections.items()}

    @property
    def stores(self) -> dict[str, Store]:
        """The stores of the tables, by the path of their collection in the model."""
        return {path: collection.store for path, collection in self._collections.items()}

    def predict(self, batch: Mapping[str, object]) -> dict[str, Tensor]:
        """Predict by head: [rows], or [rows, classes]. Columns the model does not need are ignored.

        Columns are tensors, `Ragged`, NumPy arrays or lists of numbers, see `monolith.features.as_batch`.
        """
        known = as_batch(batch)
        num_rows(known, self._columns)
        columns = {spec.name: spec.check(known) for spec in self.signature.inputs}
        embeddings = {path: collection(known) for path, collection in self._collections.items()}
        return self._program(program_inputs(columns, embeddings))

    def __repr__(self) -> str:
        outputs = ", ".join(output.name for output in self.signature.outputs)
        return f"Predictor(version={self.signature.version}, columns={self.signature.columns}, outputs=({outputs}))"


def load(path: str | Path) -> Predictor:
    """Load an export, or the newest complete one of a folder with several versions.

    Every file is checked against the manifest first. Nothing in an export can run code of its own.
    """
    folder = _version_folder(Path(local_path(path, "path")))
    manifest = read_export_manifest(folder)
    try:
        signature = Signature.from_json((folder / "signature.json").read_text())
        weights = load_file(folder / "weights.safetensors")
        program = DenseProgram.from_json((folder / "program.json").read_text(), weights)
        collections = {spec.path: _collection(spec, folder, manifest) for spec in signature.collections}
    except (ConfigError, SafetensorError, FileNotFoundError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{folder}: {error}") from None
    return Predictor(signature, program, collections)


@contextmanager
def import_saved_model(path: str | Path) -> Iterator[Callable[[Mapping[str, object]], dict[str, Tensor]]]:
    """Load the newest export below `path`, for a `with` block, as a function from a batch to predictions."""
    yield load(path).predict


def _version_folder(path: Path) -> Path:
    if (path / "manifest.json").is_file():
        return path
    if not path.is_dir():
        raise InvalidArgumentError(f"{path}: expected the folder of an export, or one with numbered exports")
    versions = [folder for folder in path.iterdir() if folder.name.isdecimal() and (folder / "manifest.json").is_file()]
    return max(versions, key=lambda folder: int(folder.name)) if versions else path


def _collection(spec: CollectionSpec, folder: Path, manifest: ExportManifest) -> EmbeddingBagCollection:
    unlisted = [file for file in spec.tables.values() if file not in manifest.files]
    if unlisted:
        raise CorruptFileError(f"{folder / 'signature.json'}: names {unlisted[0]!r}, which the manifest does not list")
    tables = [EmbeddingTable.load(folder / file) for file in spec.tables.values()]
    return EmbeddingBagCollection(spec.features, LocalStore(tables), seed=spec.seed)
