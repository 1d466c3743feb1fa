"""Ours: 64-bit ids go in as they are; hashing, pooling and the optimizer step are inside the table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import monolith
from workload import (
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Batch,
    FloatArray,
    IdArray,
    id_gradient,
    offsets,
    pooled_gradient,
)

FILL = 262_144


@dataclass(frozen=True)
class Prepared:
    ids: torch.Tensor
    gradient: torch.Tensor


def empty_table(dim: int) -> monolith.EmbeddingTable:
    segment = monolith.Segment(
        dim=dim,
        initializer=monolith.table.RandomUniform(low=-0.05, high=0.05),
        optimizer=monolith.table.Adagrad(learning_rate=LEARNING_RATE, initial_accumulator_value=INITIAL_ACCUMULATOR),
    )
    return monolith.EmbeddingTable(monolith.TableConfig(name="bench", segments=(segment,)))


def filled_table(ids: IdArray, dim: int) -> monolith.EmbeddingTable:
    table = empty_table(dim)
    zeros = torch.zeros(FILL, dim)  # a step of zero gradient stores the row and leaves weights and state fresh
    for first in range(0, ids.size, FILL):
        part = torch.from_numpy(ids[first : first + FILL])
        table.apply_gradients(part, zeros[: part.numel()])
    return table


def use_threads(threads: int) -> dict[str, str]:
    torch.set_num_threads(threads)
    monolith.set_num_threads(threads)
    return {"monolith-torch": version("monolith-torch"), "torch": torch.__version__}


class Monolith:
    def __init__(self, ids: IdArray, dim: int, threads: int) -> None:
        self.versions = use_threads(threads)
        self._table = filled_table(ids, dim)
        self._offsets = torch.from_numpy(offsets())
        self._gradient = torch.from_numpy(pooled_gradient(dim))

    def prepare(self, batch: Batch) -> torch.Tensor:
        return torch.from_numpy(batch.ids)

    def lookup(self, prepared: torch.Tensor) -> torch.Tensor:
        return self._table.lookup_pooled(prepared, self._offsets, mode="sum")

    def train_step(self, prepared: torch.Tensor) -> None:
        self._table.lookup_pooled(prepared, self._offsets, mode="sum")
        self._table.apply_pooled_gradients(prepared, self._offsets, self._gradient, mode="sum")

    def read(self, batch: Batch) -> FloatArray:
        return self._table.lookup(torch.from_numpy(batch.ids)).numpy()


class GrowingMonolith:
    def __init__(self, dim: int, threads: int) -> None:
        self.versions = use_threads(threads)
        self._table = empty_table(dim)
        self._gradient = torch.from_numpy(id_gradient(dim))

    def prepare(self, ids: IdArray) -> Prepared:
        return Prepared(ids=torch.from_numpy(ids), gradient=self._gradient[: ids.size])

    def insert(self, prepared: Prepared) -> None:
        self._table.apply_gradients(prepared.ids, prepared.gradient)

    def rows(self) -> int:
        return self._table.stats().rows

    def bytes(self) -> int | None:
        return self._table.stats().bytes


class SavedMonolith:
    """For the disk case: a full table and the two calls."""

    def __init__(self, ids: IdArray, dim: int, threads: int) -> None:
        self.versions = use_threads(threads)
        self._table = filled_table(ids, dim)

    def save(self, path: Path) -> None:
        self._table.save(path)

    def load(self, path: Path) -> int:
        return monolith.EmbeddingTable.load(path).stats().rows
