"""Trace a model and write it as a folder that predicts without the code that made it.

`<base>/<version>/` holds `program.json` and `weights.safetensors` (the dense part, on request also as `program.onnx`),
`tables/` (what the embeddings need, without optimizer state), `signature.json`, and `manifest.json`, without which it is not an
export.

Embeddings become inputs of the program, and everything behind them is traced by `torch.export`.
"""

from __future__ import annotations

import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export.graph_signature import OutputKind

from monolith.data.transforms.rows import select_rows
from monolith.errors import InvalidArgumentError, StorageError
from monolith.features import Feature, Ragged
from monolith.features.batch import Batch, BatchColumn, num_rows
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head, logits_by_head
from monolith.optional_packages import import_extra
from monolith.serve.encoding import encode_program
from monolith.serve.manifest import (
    CollectionSpec,
    InputSpec,
    OutputSpec,
    RunOrigin,
    Signature,
    serving_features,
    write_export_manifest,
)
from monolith.serve.program import DenseProgram, program_inputs
from monolith.table import EmbeddingTable, TableConfig
from monolith.table.table_file import write_table_file
from monolith.urls import local_path

__all__ = ["collections_by_path", "export_model", "trace_model", "trace_program"]


def export_model(
    model: nn.Module,
    example: Batch,
    base: str | Path,
    *,
    heads: Sequence[Head] = (),
    vectors: str | None = None,
    step: int = 0,
    run: RunOrigin | None = None,
    onnx: bool = False,
    now: Callable[[], float] = time.time,
    chunk: int = 65536,
) -> Path:
    """Write the next version below `base` and return its folder, which appears complete or not at all.

    `example` is a batch to trace the model with. The number of rows does not matter. Versions are numbered by time, so the
    newest is the greatest. Rows are copied about `chunk` at a time, wherever the store has them, so an export needs no memory for
    whole tables.

    With `vectors`, the name of a method of the model that returns a vector for each row of a batch, that method is exported
    instead of `forward`: one tower of a two-tower model. Only the features and tables that it reads are in the export, and the
    output has the name of the method.

    With `onnx`, the dense part is also written as `program.onnx`, for other runtimes. Its inputs are those of `program.json`:
    columns of numbers, and the embeddings, which the runtime's caller has to look up in the tables. Its weights are those of
    the export, and do not follow a run. Needs the extra `onnx`.

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
    if bool(heads) == (vectors is not None):
        raise InvalidArgumentError("heads, vectors: expected the heads of the model, or the name of a method, not both")
    if onnx:
        import_extra("onnxscript", extra="onnx", purpose="exporting ONNX")
    program, inputs, exported = _traced(model, example, heads, vectors)
    collections = collections_by_path(model)
    features = {path: _read_features(path, c, None if vectors is None else program) for path, c in collections.items()}
    base = local_path(base, "base")
    version = _next_version(Path(base), int(now()))
    temporary = Path(base) / f".{version}.{secrets.token_hex(8)}.tmp"
    try:
        temporary.mkdir(parents=True)
        try:
            specs = tuple(
                _write_tables(path, collections[path], read, number, temporary, chunk)
                for number, (path, read) in enumerate((path, read) for path, read in features.items() if read)
            )
            signature = Signature(
                version=version,
                step=step,
                inputs=_input_specs(program, inputs),
                outputs=_output_specs(program, inputs, heads, vectors),
                collections=specs,
                ragged=tuple(
                    feature.name
                    for spec in specs
                    for feature in spec.features
                    if isinstance(example.get(feature.name), Ragged)
                ),
                run=run,
            )
            _write_program(program, signature, temporary)
            if onnx:
                _write_onnx(exported, list(inputs), [output.name for output in signature.outputs], temporary)
            write_export_manifest(temporary)
            temporary.rename(Path(base) / str(version))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(f"{base}: cannot write an export: {error}") from error
    return Path(base) / str(version)


def _read_features(path: str, collection: EmbeddingBagCollection, program: DenseProgram | None) -> tuple[Feature, ...]:
    """Return the features of a collection that `program` reads, and those whose rows they share. All of them without one."""
    features = serving_features(collection)
    if program is None:
        return features
    inputs = {name.removeprefix(f"{path}/").removesuffix("/values") for name in program.inputs}
    read = {feature.name for feature in features if not inputs.isdisjoint(feature.outputs)}
    read |= {feature.shared_with for feature in features if feature.name in read and feature.shared_with}
    return tuple(feature for feature in features if feature.name in read)


def _write_tables(
    path: str,
    collection: EmbeddingBagCollection,
    features: Sequence[Feature],
    number: int,
    folder: Path,
    chunk: int,
) -> CollectionSpec:
    store, configs = collection.store, collection.store.configs()
    files: dict[str, str] = {}
    (folder / "tables" / str(number)).mkdir(parents=True)
    read = {collection.declaration.assignment[feature.name] for feature in features}
    for declared in collection.declaration.tables:
        name = declared.config.name
        if name not in read:
            continue
        files[name] = f"tables/{number}/{quote(name, safe='')}.table"
        config = _serving_config(configs[name])
        write_table_file(folder / files[name], config, _serving_parts(config, store.iter_rows(name, chunk=chunk)))
    seed = collection.declaration.tables[0].config.seed if collection.declaration.tables else 0
    return CollectionSpec(path=path, seed=seed, features=tuple(features), tables=files)


def _serving_config(config: TableConfig) -> TableConfig:
    """Return the configuration of a read-only table: no optimizer state, unseen ids read as in training."""
    return config.model_copy(update={"mode": "serving", "unseen": config.unseen or "initializer"})


def _serving_parts(config: TableConfig, rows: Iterable[tuple[Tensor, Tensor]]) -> Iterator[EmbeddingTable]:
    """Yield a table for each chunk of rows, with values as their compressors store them."""
    for ids, values in rows:
        part = EmbeddingTable(config.model_copy(update={"initial_capacity": 0}))
        part.assign(ids, values)
        yield part


def _write_program(program: DenseProgram, signature: Signature, folder: Path) -> None:
    (folder / "program.json").write_text(program.to_json())
    save_file(program.weights, folder / "weights.safetensors")
    (folder / "signature.json").write_text(signature.model_dump_json(indent=1))


def _write_onnx(
    exported: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], folder: Path
) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        # torch's own: deprecated classes that its exporter uses.
        warnings.simplefilter("ignore")
        written = torch.onnx.export(
            exported, dynamo=True, input_names=list(inputs), output_names=list(outputs), verbose=False
        )
    assert written is not None
    written.save(folder / "program.onnx")


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


def _output_specs(
    program: DenseProgram, inputs: Mapping[str, Tensor], heads: Sequence[Head], vectors: str | None
) -> tuple[OutputSpec, ...]:
    outputs = program(inputs)
    if vectors is not None:
        return (OutputSpec(name=vectors, kind="vector", shape=tuple(outputs[vectors].shape[1:])),)
    return tuple(
        OutputSpec(name=head.name, kind=head.kind, shape=tuple(outputs[head.name].shape[1:])) for head in heads
    )


def _next_version(base: Path, now: int) -> int:
    there = [int(path.name) for path in base.glob("*") if path.name.isdecimal()]
    return max([now, *(version + 1 for version in there)])


def collections_by_path(model: nn.Module) -> dict[str, EmbeddingBagCollection]:
    """Return the collections of a model by their path in it."""
    return {path: module for path, module in model.named_modules() if isinstance(module, EmbeddingBagCollection)}


def trace_model(
    model: nn.Module, example: Batch, heads: Sequence[Head], vectors: str | None = None
) -> tuple[DenseProgram, dict[str, Tensor]]:
    """Return the program that makes the predictions of `heads`, and the inputs it was traced with.

    With `vectors` it is the program of the method of that name. The model may not read columns of labels, because they do not
    exist in serving.
    """
    program, inputs, _ = _traced(model, example, heads, vectors)
    return program, inputs


def _traced(
    model: nn.Module, example: Batch, heads: Sequence[Head], vectors: str | None
) -> tuple[DenseProgram, dict[str, Tensor], torch.export.ExportedProgram]:
    collections = collections_by_path(model)
    batch = _traceable_rows(model, {name: _on_host(column) for name, column in example.items()})
    hidden = {name for head in heads for name in head.label_columns}
    hidden |= {feature.name for collection in collections.values() for feature in collection.features}
    columns = {name: value for name, value in batch.items() if name not in hidden and isinstance(value, Tensor)}
    was_training = model.training
    model.eval()
    try:
        with _dense_part_on_host(model), torch.no_grad():
            embeddings = {path: collection(batch) for path, collection in collections.items()}
            inputs = program_inputs(columns, embeddings)
            module = _DenseModel(model, collections, heads, list(columns), embeddings, vectors)
            names = [head.name for head in heads] if vectors is None else [vectors]
            exported = _export(module, inputs)
            return (
                DenseProgram(*encode_program(exported, list(inputs), names, of="model.", module=module)),
                inputs,
                exported,
            )
    finally:
        model.train(was_training)


def _on_host(column: BatchColumn) -> BatchColumn:
    if isinstance(column, Ragged):
        return column if column.values.device.type == "cpu" else Ragged(column.values.cpu(), column.offsets)
    return column.cpu() if isinstance(column, Tensor) else column


@contextmanager
def _dense_part_on_host(model: nn.Module) -> Iterator[None]:
    """Let `model` have copies of its parameters and buffers in main memory, where an exported program runs.

    `model.to` would not do: on some devices it makes new parameters, which an optimizer does not know.
    """
    copied: list[tuple[dict[str, Any], str, Tensor]] = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.device.type != "cpu"
    ]
    copies = {id(tensor): tensor.detach().cpu() for _, _, tensor in copied}
    for tensors, name, tensor in copied:
        copy = copies[id(tensor)]
        tensors[name] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
    try:
        yield
    finally:
        for tensors, name, tensor in copied:
            tensors[name] = tensor


class _DenseModel(nn.Module):
    """The model with its embeddings given: tensors in the order of `program_inputs` -> a prediction per head."""

    def __init__(
        self,
        model: nn.Module,
        collections: Mapping[str, EmbeddingBagCollection],
        heads: Sequence[Head],
        columns: Sequence[str],
        embeddings: Mapping[str, Mapping[str, BatchColumn]],
        vectors: str | None = None,
    ) -> None:
        super().__init__()
        self.model, self._vectors = model, vectors
        if vectors is not None and not callable(getattr(model, vectors, None)):
            raise InvalidArgumentError(f"vectors: {type(model).__name__} has no method {vectors!r}")
        self._collections, self._heads, self._columns = collections, heads, columns
        self._ragged = {
            path: {name: isinstance(value, Ragged) for name, value in outputs.items()}
            for path, outputs in embeddings.items()
        }

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        batch = _Columns({name: next(given) for name in self._columns})
        embeddings = {
            path: {
                name: _TracedRagged(next(given), next(given)) if ragged else next(given)
                for name, ragged in names.items()
            }
            for path, names in self._ragged.items()
        }
        with _answers(self._collections, embeddings):
            if self._vectors is not None:
                return (getattr(self.model, self._vectors)(batch),)
            logits = logits_by_head(self.model(batch), self._heads)
        return tuple(head.predict(logits[head.name]) for head in self._heads)


class _Columns(dict[str, Tensor]):
    def __missing__(self, name: str) -> Tensor:
        raise InvalidArgumentError(
            f"forward reads column {name!r}, which an exported model does not have: expected dense columns other than labels; "
            "give ids to an EmbeddingBagCollection"
        )


class _TracedRagged(Ragged):
    """A `Ragged` of traced tensors: it computes by operators of torch, so that they are traced."""

    __slots__ = ()

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self.values, self.offsets = values, offsets

    def value_rowids(self) -> Tensor:
        """Return the row of each value."""
        rows = torch.arange(self.offsets.shape[0] - 1)
        return torch.repeat_interleave(rows, self.row_lengths(), output_size=self.values.shape[0])

    def __len__(self) -> int:
        raise InvalidArgumentError(
            "forward asks for len() of a Ragged, which would fix the number of rows; use row_lengths().shape[0]"
        )


@contextmanager
def _answers(
    collections: Mapping[str, EmbeddingBagCollection], embeddings: Mapping[str, Mapping[str, BatchColumn]]
) -> Iterator[None]:
    """Let the collections return `embeddings` instead of looking up rows."""
    for path, collection in collections.items():
        collection.forward = lambda batch, given=embeddings[path]: given  # type: ignore[method-assign, misc]
    try:
        yield
    finally:
        for collection in collections.values():
            del collection.forward


def _traceable_rows(model: nn.Module, example: Batch) -> Batch:
    # A number of rows that is also a dim of the model would be traced as equal to it.
    if not num_rows(example):
        raise InvalidArgumentError("example: expected a batch with at least one row to trace the model with")
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {size for column in example.values() if isinstance(column, Tensor) for size in column.shape[1:]}
    for collection in collections_by_path(model).values():
        sizes |= {segment.dim for feature in collection.features for segment in feature.row}
    rows = next(rows for rows in range(11, 100_000) if not {rows, rows + 1} & sizes)
    return select_rows(example, torch.arange(rows) % num_rows(example))


def trace_program(
    module: nn.Module, example: Mapping[str, Tensor], outputs: Sequence[str], *, of: str = ""
) -> DenseProgram:
    """Trace `module(*example.values())`, a tuple with one tensor per name of `outputs`.

    The first dimension of every input may vary. The example needs at least two rows, because one would be traced as a constant.
    Weights are named as in the `state_dict` of the submodule `of`, written with a dot at its end.

    torch.export folds no values of parameters or buffers into a program: it traces with tensors that have none, and code that
    needs values (`item`, `tolist`, `numpy`, `data`) is refused. Tensors that are plain attributes of a module become constants,
    whether they are derived from parameters or not. `DenseProgram.unfollowed` lists those.
    """
    return DenseProgram(*encode_program(_export(module, example), list(example), outputs, of=of, module=module))


def _export(module: nn.Module, example: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
    varying = {0: torch.export.Dim.DYNAMIC}
    shapes = tuple(varying if tensor.ndim else None for tensor in example.values())
    try:
        # Without gradients: a no_grad block inside the model would otherwise become a region of its own.
        with torch.no_grad(), warnings.catch_warnings():
            # Of nn.LSTM and similar modules, which list their weights again in each call.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? self\..*_flat_weights")
            exported = torch.export.export(module, tuple(example.values()), dynamic_shapes=_shapes(module, shapes))
    except InvalidArgumentError:
        raise
    except Exception as error:  # torch.export has no common base of its errors
        reason = str(error).strip().partition("\n\n")[0]
        raise InvalidArgumentError(f"forward cannot be traced for export: {reason}") from error
    exported = _functional(exported)
    _refuse_changed_weights(exported)
    return exported


def _shapes(module: nn.Module, shapes: tuple[object, ...]) -> tuple[object, ...]:
    code = module.forward.__code__
    takes_any_number = bool(code.co_flags & 0x04)
    return (shapes,) if takes_any_number else shapes


def _functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replace changes in place, and regions such as those under autocast, by operators that only return something."""
    with warnings.catch_warnings():
        # torch warns about its own use of a deprecated class.
        warnings.simplefilter("ignore", FutureWarning)
        flat: torch.export.ExportedProgram = exported.run_decompositions({})
    flat.graph.eliminate_dead_code()
    return flat


def _refuse_changed_weights(exported: torch.export.ExportedProgram) -> None:
    """Refuse a model that changes its weights: a program runs many times, from several threads."""
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION):
            raise InvalidArgumentError(
                f"forward changes {spec.target!r} even in eval mode; such a model cannot be exported"
            )
