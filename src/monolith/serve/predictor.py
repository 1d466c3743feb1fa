"""Load an export and predict, without the code of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from monolith.errors import ConfigError, CorruptFileError
from monolith.features.batch import IdMatrix, as_batch, num_rows
from monolith.nn import EmbeddingBagCollection
from monolith.serve.manifest import (
    CollectionSpec,
    ExportManifest,
    InputSpec,
    Signature,
    read_export_manifest,
    version_folder,
)
from monolith.serve.program import DenseProgram
from monolith.table import EmbeddingTable, LocalStore, Store
from monolith.table.bags import PackedVectors
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
        self._collections = {path: collection.eval() for path, collection in collections.items()}
        positions = {name: position for position, name in enumerate(program.inputs)}
        self._lookups = [_Lookup(path, collection, positions) for path, collection in collections.items()]
        self._dense = [_DenseInput(spec, positions[f"column/{spec.name}"]) for spec in signature.inputs]

    @property
    def stores(self) -> dict[str, Store]:
        """The stores of the tables, by the path of their collection in the model."""
        return {path: collection.store for path, collection in self._collections.items()}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The dense weights, by their name in the `state_dict` of the model. Do not change them in place."""
        return self._program.weights

    def set_weights(self, weights: Mapping[str, Tensor], *, ignore_unknown: bool = False) -> None:
        """Replace dense weights while other threads predict. Each prediction uses only old or only new values.

        Args:
            weights: By their name in the `state_dict` of the model. Values are copied. Weights left out keep their values.
            ignore_unknown: Ignore names that the exported program does not have, such as buffers that only training uses.

        Raises:
            InvalidArgumentError: a name is unknown, a shape or dtype differs, or the program has a copy of a tensor that is
                not in the `state_dict` of the model, so that it cannot follow training. Nothing is replaced then.
        """
        self._program.set_weights(weights, ignore_unknown=ignore_unknown)

    def predict(self, batch: Mapping[str, object]) -> dict[str, Tensor]:
        """Predict by head: [rows], or [rows, classes]. Columns the model does not need are ignored.

        Columns are tensors, `Ragged`, NumPy arrays or lists of numbers, see `monolith.features.as_batch`. The results are
        inference tensors: `clone()` one to change it in place or to compute gradients with it.
        """
        if not isinstance(batch, dict | IdMatrix):
            batch = as_batch(batch)
        program = self._program
        # For rows with one id each, all shapes are known from their number. Otherwise the program looks at them.
        is_plain = True
        inputs: list[Any] = [None] * len(program.inputs)
        lengths: set[int] = set()
        # A new thread would multiply matrices with all processors, whatever torch.set_num_threads said, until something asks it.
        torch.get_num_threads()
        with torch.inference_mode():
            for dense in self._dense:
                inputs[dense.position] = column = dense.check(batch)
                is_plain = is_plain and column.is_contiguous()
                lengths.add(column.shape[0])
            for lookup in self._lookups:
                is_plain = lookup(batch, inputs, lengths) and is_plain
            if len(lengths) > 1:
                num_rows(as_batch(batch), self.signature.columns)  # raises, and names the columns
            return program.run(inputs, lengths.pop() if is_plain and lengths else None)

    def __repr__(self) -> str:
        outputs = ", ".join(output.name for output in self.signature.outputs)
        return f"Predictor(version={self.signature.version}, columns={self.signature.columns}, outputs=({outputs}))"


class _DenseInput:
    """A dense column, and its position among the inputs of the program."""

    def __init__(self, spec: InputSpec, position: int) -> None:
        self.position = position
        self._spec, self._name = spec, spec.name
        self._dtype, self._shape = getattr(torch, spec.dtype, None), spec.shape

    def check(self, batch: Mapping[str, object]) -> Tensor:
        """Return the column, after a check of its type and shape."""
        column = batch.get(self._name)
        if type(column) is Tensor and column.dtype is self._dtype and column.ndim and column.shape[1:] == self._shape:
            return column
        return self._spec.check(batch)


class _Lookup:
    """Reads the embeddings of one collection, without anything that training needs."""

    def __init__(self, path: str, collection: EmbeddingBagCollection, positions: Mapping[str, int]) -> None:
        self._plan, self._collection = collection.plan, collection
        names = [name for feature in collection.features for name in feature.outputs]
        self._tensors = [(name, positions[f"{path}/{name}"]) for name in names if f"{path}/{name}" in positions]
        self._ragged = [
            (name, attribute, positions[key])
            for name in names
            for attribute, key in (("values", f"{path}/{name}/values"), ("offsets", f"{path}/{name}/row_splits"))
            if key in positions
        ]
        wanted = [positions.get(f"{path}/{name}", -1) for name in collection.plan.array_outputs or ()]
        # Where all arrays go, if the program takes them as they are, one after the other.
        self._arrays = slice(wanted[0], wanted[-1] + 1) if wanted and _is_rising(wanted) else None

    def __call__(self, batch: Mapping[str, object], inputs: list[Any], lengths: set[int]) -> bool:
        """Put what the program needs into `inputs`. Returns whether the number of rows determines all shapes and strides."""
        bags = self._plan.bags(batch)
        lengths.add(bags.rows)
        vectors = self._collection.store.lookup(bags.packed)
        arrays = self._plan.layout.pack(vectors)
        if self._arrays is not None and bags.devices is None:
            inputs[self._arrays] = arrays
            return isinstance(vectors, PackedVectors)
        outputs = self._plan.outputs(bags, arrays)
        for name, position in self._tensors:
            inputs[position] = outputs[name]
        for name, attribute, position in self._ragged:
            inputs[position] = getattr(outputs[name], attribute)
        return bags.parts is None and isinstance(vectors, PackedVectors)


def _is_rising(positions: Sequence[int]) -> bool:
    return list(positions) == list(range(positions[0], positions[0] + len(positions))) and positions[0] >= 0


def load(path: str | Path, *, store: Callable[[CollectionSpec], Store] | None = None) -> Predictor:
    """Load an export, or the newest complete one of a folder with several versions.

    Every file is checked against the manifest first. Nothing in an export can run code of its own.

    Args:
        path: Folder of an export, or one with numbered exports.
        store: Returns where the rows of a collection are, such as a client of embedding shards. The files of its tables are then
            neither read nor needed. By default they are loaded into this process.
    """
    folder = version_folder(Path(local_path(path, "path")))
    manifest = read_export_manifest(folder, tables=store is None)
    try:
        signature = Signature.from_json((folder / "signature.json").read_text())
        weights = load_file(folder / "weights.safetensors")
        program = DenseProgram.from_json((folder / "program.json").read_text(), weights)
        if store is None:
            collections = {
                spec.path: _collection(spec, _table_files(spec, folder, manifest)) for spec in signature.collections
            }
    except (ConfigError, SafetensorError, FileNotFoundError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{folder}: {error}") from None
    if store is not None:
        collections = {spec.path: _collection(spec, store(spec)) for spec in signature.collections}
    try:
        return Predictor(signature, program, collections)
    except KeyError as error:
        raise CorruptFileError(f"{folder}: signature.json and program.json do not agree about input {error}") from None


@contextmanager
def import_saved_model(path: str | Path) -> Iterator[Callable[[Mapping[str, object]], dict[str, Tensor]]]:
    """Load the newest export below `path`, for a `with` block, as a function from a batch to predictions."""
    yield load(path).predict


def _table_files(spec: CollectionSpec, folder: Path, manifest: ExportManifest) -> LocalStore:
    unlisted = [file for file in spec.tables.values() if file not in manifest.files]
    if unlisted:
        raise CorruptFileError(f"{folder / 'signature.json'}: names {unlisted[0]!r}, which the manifest does not list")
    return LocalStore([EmbeddingTable.load(folder / file) for file in spec.tables.values()])


def _collection(spec: CollectionSpec, store: Store) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(spec.features, store, seed=spec.seed)
