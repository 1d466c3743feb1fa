"""Plain PyTorch: ids hashed into nn.EmbeddingBag tables of a fixed size, a new model loaded at an interval."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from freshbench.adapters import Serving
from freshbench.adapters.deepfm import DENSE_RATE, DIM, ROW_RATE, DeepFMTop
from freshbench.examples import Examples, IdLists, Ids, Schema

ROWS = 2**16
"""Of each column."""


class HashedDeepFM(nn.Module):
    """The same DeepFM as ours. An embedding and the first-order weight of an id are one row."""

    def __init__(self, schema: Schema, seed: int) -> None:
        super().__init__()
        self.top = DeepFMTop(len(schema.columns), schema.numbers, seed)
        tables = {name: nn.EmbeddingBag(ROWS, DIM + 1, mode="mean", sparse=True) for name in schema.columns}
        for table in tables.values():
            nn.init.uniform_(table.weight, -0.05, 0.05)
            nn.init.zeros_(table.weight[:, -1])
        self.tables = nn.ModuleDict(tables)

    def forward(self, examples: Examples) -> Tensor:
        found = torch.stack([self.tables[name](*_rows(ids)) for name, ids in examples.ids.items()], dim=1)
        logits: Tensor = self.top(found[..., :DIM], found[..., DIM], torch.from_numpy(examples.numbers))
        return logits


def _rows(ids: Ids) -> tuple[Tensor, Tensor]:
    values, offsets = (ids.values, ids.offsets[:-1]) if isinstance(ids, IdLists) else (ids, np.arange(len(ids)))
    mixed = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy((mixed >> np.uint64(48)).astype(np.int64) % ROWS), torch.from_numpy(offsets)


class Learner:
    """A model and its optimizers."""

    def __init__(self, schema: Schema, seed: int) -> None:
        self.model = HashedDeepFM(schema, seed)
        rows = self.model.tables.parameters()
        self._rows = torch.optim.Adagrad(rows, lr=ROW_RATE, initial_accumulator_value=0.1)
        self._dense = torch.optim.Adam(self.model.top.parameters(), lr=DENSE_RATE)

    def step(self, examples: Examples) -> None:
        self.model.zero_grad()
        labels = torch.from_numpy(examples.labels)
        torch.autograd.backward(binary_cross_entropy_with_logits(self.model(examples), labels, reduction="sum"))
        self._rows.step()
        self._dense.step()


class ReloadedSystem:
    """Trains on every batch as it comes (a warm start for each version). A sync loads a copy of the model."""

    def __init__(self, schema: Schema, seed: int) -> None:
        self._learner = Learner(schema, seed)

    def fit(self, examples: Examples) -> None:
        self._learner.step(examples)

    def serving(self) -> Serving:
        return _Reloaded(self._learner)

    def close(self) -> None:
        pass


class _Served:
    model: HashedDeepFM | None = None

    def predict(self, examples: Examples) -> np.ndarray:
        assert self.model is not None
        with torch.inference_mode():
            scores: np.ndarray = self.model(examples).numpy()
        return scores


class _Reloaded(_Served):
    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def sync(self) -> None:
        if self.model is None:
            self.model = copy.deepcopy(self._learner.model)
        else:
            self.model.load_state_dict(self._learner.model.state_dict())


class RetrainedSystem:
    """A sync trains a new model on everything that has happened, from scratch, and loads it."""

    max_syncs = 10

    def __init__(self, schema: Schema, seed: int) -> None:
        self.schema, self.seed = schema, seed
        self.seen: list[Examples] = []

    def fit(self, examples: Examples) -> None:
        self.seen.append(examples)

    def serving(self) -> Serving:
        return _Retrained(self)

    def close(self) -> None:
        pass


class _Retrained(_Served):
    def __init__(self, system: RetrainedSystem) -> None:
        self._system = system

    def sync(self) -> None:
        learner = Learner(self._system.schema, self._system.seed)
        for examples in self._system.seen:
            learner.step(examples)
        self.model = learner.model
