"""What a PyTorch user does today: EmbeddingBag with sparse gradients, and some map from ids to rows in front of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from workload import (
    BATCH,
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    POOL,
    Batch,
    FloatArray,
    IdArray,
    pooled_gradient,
)


@dataclass(frozen=True)
class Prepared:
    ids: torch.Tensor
    rows: torch.Tensor


class MappedEmbeddingBag:
    """Ids arrive as row numbers: no map, no hashing, no new ids."""

    def __init__(self, ids: IdArray, dim: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.versions = {"torch": torch.__version__}
        weights = torch.empty(ids.size, dim).uniform_(-0.05, 0.05)
        self._bag = torch.nn.EmbeddingBag(ids.size, dim, mode="sum", sparse=True, _weight=weights)
        self._optimizer = torch.optim.Adagrad(
            self._bag.parameters(), lr=LEARNING_RATE, initial_accumulator_value=INITIAL_ACCUMULATOR, eps=EPSILON
        )
        self._offsets = torch.arange(0, BATCH, POOL)
        self._gradient = torch.from_numpy(pooled_gradient(dim))

    def map(self, prepared: Prepared) -> torch.Tensor:
        return prepared.rows

    def prepare(self, batch: Batch) -> Prepared:
        return Prepared(ids=torch.from_numpy(batch.ids), rows=torch.from_numpy(batch.rows))

    def lookup(self, prepared: Prepared) -> torch.Tensor:
        with torch.no_grad():
            return self._bag(self.map(prepared), self._offsets)

    def train_step(self, prepared: Prepared) -> None:
        pooled = self._bag(self.map(prepared), self._offsets)
        pooled.backward(self._gradient)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def read(self, batch: Batch) -> FloatArray:
        return self._bag.weight.detach()[torch.from_numpy(batch.rows)].numpy()


class DictEmbeddingBag(MappedEmbeddingBag):
    def __init__(self, ids: IdArray, dim: int, threads: int) -> None:
        super().__init__(ids, dim, threads)
        self._row_of = dict(zip(ids.tolist(), itertools.count(), strict=False))

    def map(self, prepared: Prepared) -> torch.Tensor:
        rows = map(self._row_of.__getitem__, prepared.ids.tolist())
        return torch.from_numpy(np.fromiter(rows, dtype=np.int64, count=BATCH))


class PandasEmbeddingBag(MappedEmbeddingBag):
    def __init__(self, ids: IdArray, dim: int, threads: int) -> None:
        import pandas as pd

        super().__init__(ids, dim, threads)
        self.versions["pandas"] = pd.__version__
        self._index = pd.Index(ids)
        self._index.get_indexer(ids[:1])  # builds the hash table, which is not part of a batch

    def map(self, prepared: Prepared) -> torch.Tensor:
        return torch.from_numpy(self._index.get_indexer(prepared.ids.numpy()))


class NumpyEmbeddingBag(MappedEmbeddingBag):
    def __init__(self, ids: IdArray, dim: int, threads: int) -> None:
        super().__init__(ids, dim, threads)
        self.versions["numpy"] = np.__version__
        self._order = np.argsort(ids)
        self._sorted = ids[self._order]

    def map(self, prepared: Prepared) -> torch.Tensor:
        return torch.from_numpy(self._order[np.searchsorted(self._sorted, prepared.ids.numpy())])
