"""From a model to its dense program: the embeddings become inputs, everything behind them is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from monolith.data.transforms import select_rows
from monolith.errors import InvalidArgumentError
from monolith.features import Ragged
from monolith.features.batch import Batch, BatchColumn, num_rows
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head, logits_by_head
from monolith.serve.program import DenseProgram

__all__ = ["collections_by_path", "program_inputs", "trace_model"]


def collections_by_path(model: nn.Module) -> dict[str, EmbeddingBagCollection]:
    """The collections of a model by their place in it."""
    return {path: module for path, module in model.named_modules() if isinstance(module, EmbeddingBagCollection)}


def program_inputs(
    columns: Mapping[str, BatchColumn], embeddings: Mapping[str, Mapping[str, BatchColumn]]
) -> dict[str, Tensor]:
    """Dense columns and looked-up embeddings under the names the program knows; a `Ragged` becomes two tensors.

    Example:
        >>> list(program_inputs({"age": torch.ones(2)}, {"embeddings": {"user": torch.ones(2, 4)}}))
        ['column/age', 'embeddings/user']
    """
    inputs = {f"column/{name}": value for name, value in columns.items() if isinstance(value, Tensor)}
    for path, outputs in embeddings.items():
        for name, value in outputs.items():
            if isinstance(value, Ragged):
                inputs[f"{path}/{name}/values"] = value.values
                inputs[f"{path}/{name}/row_splits"] = value.offsets
            else:
                inputs[f"{path}/{name}"] = value
    return inputs


def trace_model(model: nn.Module, example: Batch, heads: Sequence[Head]) -> tuple[DenseProgram, dict[str, Tensor]]:
    """The program that makes the predictions of `heads`, and the inputs it was traced with.

    Columns of labels are not part of what the model may read: they do not exist when it serves.
    """
    collections = collections_by_path(model)
    batch = _traceable_rows(model, example)
    hidden = {name for head in heads for name in head.label_columns}
    hidden |= {feature.name for collection in collections.values() for feature in collection.features}
    columns = {name: value for name, value in batch.items() if name not in hidden and isinstance(value, Tensor)}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            embeddings = {path: collection(batch) for path, collection in collections.items()}
        inputs = program_inputs(columns, embeddings)
        module = _DenseModel(model, collections, heads, list(columns), embeddings)
        return DenseProgram.trace(module, inputs, [head.name for head in heads]), inputs
    finally:
        model.train(was_training)


class _DenseModel(nn.Module):
    """The model with its embeddings given: tensors in the order of `program_inputs` -> a prediction per head."""

    def __init__(
        self,
        model: nn.Module,
        collections: Mapping[str, EmbeddingBagCollection],
        heads: Sequence[Head],
        columns: Sequence[str],
        embeddings: Mapping[str, Mapping[str, BatchColumn]],
    ) -> None:
        super().__init__()
        self.model = model
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
            logits = logits_by_head(self.model(batch), self._heads)
        return tuple(head.predict(logits[head.name]) for head in self._heads)


class _Columns(dict[str, Tensor]):
    def __missing__(self, name: str) -> Tensor:
        raise InvalidArgumentError(
            f"forward reads column {name!r}, which an exported model does not have: expected dense columns other than labels; "
            "give ids to an EmbeddingBagCollection"
        )


class _TracedRagged(Ragged):
    """A `Ragged` of tensors without values: what it computes, it computes by torch, so that it is traced."""

    __slots__ = ()

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self.values, self.offsets = values, offsets

    def value_rowids(self) -> Tensor:
        """The row of each value."""
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
    """Let the collections return what is given instead of looking up."""
    for path, collection in collections.items():
        collection.forward = lambda batch, given=embeddings[path]: given  # type: ignore[method-assign, misc]
    try:
        yield
    finally:
        for collection in collections.values():
            del collection.forward


def _traceable_rows(model: nn.Module, example: Batch) -> Batch:
    # A number of rows that is a dim of the model too would look like a rule: "as many rows as dims".
    if not num_rows(example):
        raise InvalidArgumentError("example: expected a batch with at least one row to trace the model with")
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {size for column in example.values() if isinstance(column, Tensor) for size in column.shape[1:]}
    for collection in collections_by_path(model).values():
        sizes |= {segment.dim for feature in collection.features for segment in feature.row}
    rows = next(rows for rows in range(11, 100_000) if not {rows, rows + 1} & sizes)
    return select_rows(example, torch.arange(rows) % num_rows(example))
