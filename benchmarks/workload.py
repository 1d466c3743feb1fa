"""The workload of every peer: the same ids, batches and gradient, from fixed seeds.

Needs only NumPy, because it is imported in the environment of every peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

BATCH = 16_384  # ids: 512 examples x 32
POOL = 4  # ids per bag
BAGS = BATCH // POOL
ZIPF_EXPONENT = 1.05
DISTRIBUTIONS = ("zipf", "uniform")

LEARNING_RATE = 0.05
INITIAL_ACCUMULATOR = 0.1
EPSILON = 1e-10

IdArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """16,384 ids, and the rows they map to for the peers that are spared the mapping."""

    ids: IdArray
    rows: IdArray


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Ids in row order, and for each distribution a list of batches of row numbers (memory-mapped)."""

    ids: IdArray
    rows: dict[str, npt.NDArray[np.uint32]]

    def batch(self, distribution: str, number: int) -> Batch:
        rows = self.rows[distribution][number].astype(np.int64)
        return Batch(ids=self.ids[rows], rows=rows)


def random_ids(count: int, seed: int = 1) -> IdArray:
    """Distinct random 64-bit ids."""
    ids = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, size=count, dtype=np.int64, endpoint=True)
    if np.unique(ids).size < count:  # three in a million at 10 M ids
        return random_ids(count, seed + 1000)
    return ids


def offsets() -> IdArray:
    return np.arange(0, BATCH + 1, POOL, dtype=np.int64)


def pooled_gradient(dim: int) -> FloatArray:
    """The gradient of the pooled output, [BAGS, dim], the same in every step."""
    return np.random.default_rng(2).standard_normal((BAGS, dim), dtype=np.float32)


def id_gradient(dim: int) -> FloatArray:
    """A gradient per id, [BATCH, dim], for steps without pooling."""
    return np.repeat(pooled_gradient(dim), POOL, axis=0)


def generate(directory: Path, *, rows: int, batches: int) -> None:
    """Writes the workload as .npy files, which workers map instead of drawing it again."""
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "ids.npy", random_ids(rows))
    random = np.random.default_rng(3)
    # Hot ids must not be neighbours in memory: peers on mapped rows would get a locality that real ids do not have.
    row_of_rank = random.permutation(rows).astype(np.uint32)
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
    # In float64 a draw can round up to the total itself, which is one past the last rank.
    draws = random.random(batches * BATCH) * cumulative[-1]
    ranks = np.searchsorted(cumulative, draws, side="right").clip(max=rows - 1)
    np.save(directory / "zipf.npy", row_of_rank[ranks].reshape(batches, BATCH))
    np.save(directory / "uniform.npy", random.integers(0, rows, size=(batches, BATCH), dtype=np.uint32))


def load(directory: Path) -> Workload:
    return Workload(
        ids=np.load(directory / "ids.npy"),
        rows={name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in DISTRIBUTIONS},
    )


def after_first_step(before: FloatArray, batch: Batch) -> FloatArray:
    """What a row of the batch must hold after one training step from fresh Adagrad state, by the definition."""
    unique, inverse = np.unique(batch.rows, return_inverse=True)
    dim = before.shape[1]
    summed = np.zeros((unique.size, dim), dtype=np.float64)
    np.add.at(summed, inverse, id_gradient(dim))
    step = LEARNING_RATE * summed / (np.sqrt(INITIAL_ACCUMULATOR + summed**2) + EPSILON)
    return (before - step[inverse]).astype(np.float32)
