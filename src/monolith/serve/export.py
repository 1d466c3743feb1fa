"""Write a model as a folder that predicts without the code that made it.

`<base>/<version>/` holds `program.json` and `weights.safetensors` (the dense part), `tables/` (what the embeddings need, without
optimizer state), `signature.json`, and `manifest.json`, which makes it an export.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from safetensors.torch import save_file
from torch import Tensor, nn

from monolith.errors import InvalidArgumentError, StorageError
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head
from monolith.serve.manifest import (
    CollectionSpec,
    InputSpec,
    OutputSpec,
    Signature,
    serving_features,
    write_export_manifest,
)
from monolith.serve.program import DenseProgram
from monolith.serve.tracing import collections_by_path, trace_model
from monolith.table import EmbeddingTable
from monolith.urls import local_path

__all__ = ["export_model", "serving_table"]


def export_model(
    model: nn.Module,
    example: Batch,
    base: str | Path,
    *,
    heads: Sequence[Head],
    step: int = 0,
    now: Callable[[], float] = time.time,
) -> Path:
    """Write the next version below `base` and return its folder, which appears complete or not at all.

    `example` is a batch to trace the model with; the number of rows does not matter. Versions are numbered by time, so the
    newest is the greatest.

    Example:
        >>> import tempfile, torch
        >>> from monolith.features import Feature
        >>> from monolith.serve import load
        >>> class Popularity(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embeddings = EmbeddingBagCollection([Feature(name="item", dim=1)])
        ...     def forward(self, batch):
        ...         return self.embeddings(batch)["item"]
        >>> with tempfile.TemporaryDirectory() as base:
        ...     folder = export_model(Popularity(), {"item": torch.tensor([3])}, base, heads=[Head(name="ctr")])
        ...     list(load(folder).predict({"item": torch.tensor([1, 2])})["ctr"].shape)
        [2]
    """
    program, inputs = trace_model(model, example, heads)
    collections = collections_by_path(model)
    base = local_path(base, "base")
    version = _next_version(Path(base), int(now()))
    temporary = Path(base) / f".{version}.{secrets.token_hex(8)}.tmp"
    try:
        temporary.mkdir(parents=True)
        try:
            specs = tuple(
                _write_tables(path, c, number, temporary) for number, (path, c) in enumerate(collections.items())
            )
            signature = Signature(
                version=version,
                step=step,
                inputs=_input_specs(program, inputs),
                outputs=_output_specs(program, inputs, heads),
                collections=specs,
            )
            _write_program(program, signature, temporary)
            write_export_manifest(temporary)
            temporary.rename(Path(base) / str(version))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(f"{base}: cannot write an export: {error}") from error
    return Path(base) / str(version)


def serving_table(table: EmbeddingTable) -> EmbeddingTable:
    """A copy that only answers: values as their compressors store them, no optimizer state; unseen ids read as in training.

    Example:
        >>> from monolith import Segment, TableConfig
        >>> table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=4),)))
        >>> _ = table.reinitialize([1, 2])
        >>> serving_table(table).lookup([1, 9]).equal(table.lookup([1, 9]))
        True
    """
    config = table.config.model_copy(update={"mode": "serving", "unseen": table.config.unseen or "initializer"})
    copy = EmbeddingTable(config)
    for entries in table.iter_batches():
        copy.assign(entries.ids, entries.values)
    return copy


def _write_tables(path: str, collection: EmbeddingBagCollection, number: int, folder: Path) -> CollectionSpec:
    store = collection.store
    if store.remote:
        raise InvalidArgumentError(f"{path}: expected tables in this process, got {type(store).__name__}")
    files: dict[str, str] = {}
    (folder / "tables" / str(number)).mkdir(parents=True)
    for declared in collection.declaration.tables:
        name = declared.config.name
        files[name] = f"tables/{number}/{quote(name, safe='')}.table"
        serving_table(store.tables[name]).save(folder / files[name])
    seed = collection.declaration.tables[0].config.seed if collection.declaration.tables else 0
    return CollectionSpec(path=path, seed=seed, features=serving_features(collection), tables=files)


def _write_program(program: DenseProgram, signature: Signature, folder: Path) -> None:
    (folder / "program.json").write_text(program.to_json())
    save_file(program.weights, folder / "weights.safetensors")
    (folder / "signature.json").write_text(signature.model_dump_json(indent=1))


def _input_specs(program: DenseProgram, inputs: Mapping[str, Tensor]) -> tuple[InputSpec, ...]:
    return tuple(
        InputSpec(
            name=name.removeprefix("column/"),
            dtype=str(inputs[name].dtype).removeprefix("torch."),
            shape=tuple(inputs[name].shape[1:]),
        )
        for name in program.inputs
        if name.startswith("column/")
    )


def _output_specs(program: DenseProgram, inputs: Mapping[str, Tensor], heads: Sequence[Head]) -> tuple[OutputSpec, ...]:
    outputs = program(inputs)
    return tuple(
        OutputSpec(name=head.name, kind=head.kind, shape=tuple(outputs[head.name].shape[1:])) for head in heads
    )


def _next_version(base: Path, now: int) -> int:
    there = [int(path.name) for path in base.glob("*") if path.name.isdecimal()]
    return max([now, *(version + 1 for version in there)])
