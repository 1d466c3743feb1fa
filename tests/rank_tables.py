"""Tables of every kind that behaves differently on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.ps.protocol.messages import DeclaredTable
from monolith.ranks.agreement import Agreement
from monolith.ranks.mesh import Mesh
from monolith.ranks.rank_store import RankStore
from monolith.table import SGD, Adagrad, Bags, Expiry, Ftrl, Gradient, LocalStore, OneBit, SlidingAdmission
from monolith.table.admission import AdmissionFilter
from monolith.table.entries import Entries
from monolith.testing.rank_threads import run_ranks

T = TypeVar("T")
CONFIGS = (
    TableConfig(name="user", segments=(Segment(dim=5, optimizer=Adagrad(learning_rate=0.1)),), seed=3),
    TableConfig(
        name="item",
        segments=(Segment(dim=1, optimizer=Ftrl()), Segment(dim=7, optimizer=SGD(learning_rate=0.5))),
        expiry=Expiry(default=50),
    ),
    TableConfig(name="half", segments=(Segment(dim=4, precision="bf16"),)),
    TableConfig(name="bits", segments=(Segment(dim=3, compressor=OneBit(step_size=2)),)),
)
ADMISSION = SlidingAdmission(capacity=1000, default_threshold=3)
FILTERED = TableConfig(name="filtered", segments=(Segment(dim=2),))
DECLARED = [*(DeclaredTable(config=config) for config in CONFIGS), DeclaredTable(config=FILTERED, admission=ADMISSION)]
POOLINGS = {"user": "sum", "item": "mean", "half": "sum", "bits": "sqrtn", "filtered": "sum"}
DIMS = {"user": 5, "item": 8, "half": 4, "bits": 3, "filtered": 2}
EVERY_ID = np.arange(-30, 30) * 2**40 + 7


def local_store() -> LocalStore:
    """The same tables in one process."""
    tables = [EmbeddingTable(config) for config in CONFIGS]
    return LocalStore([*tables, EmbeddingTable(FILTERED, admission=AdmissionFilter(ADMISSION))])


def random_bags(rng: np.random.Generator, table: str) -> Bags:
    """Bags of few distinct ids: most come several times, in one bag and in several."""
    lengths = rng.choice([0, 1, 1, 4], size=int(rng.integers(0, 40)))
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = rng.choice(EVERY_ID, size=int(splits[-1]))
    return Bags(table=table, ids=ids, offsets=splits, pooling=POOLINGS[table])  # type: ignore[arg-type]


def exact_gradient(rng: np.random.Generator, bags: Bags, rates: tuple[float, ...] | None = None) -> Gradient:
    """Return gradients whose sums are exact in any order: small multiples of 1/8."""
    values = rng.integers(-8, 9, size=(len(bags.offsets) - 1, DIMS[bags.table])) / 8
    return Gradient(bags=bags, values=torch.from_numpy(values.astype(np.float32)), learning_rates=rates)


def run_stores(size: int, rank: Callable[[RankStore], T], tables: Sequence[DeclaredTable] = DECLARED) -> list[T]:
    """Call `rank(store)` on `size` ranks. Those that return first serve the others until all have."""

    def body(mesh: Mesh) -> T:
        agreement = Agreement(mesh)
        store = RankStore(agreement, tables)
        result = rank(store)
        # All ranks come here before any of them leaves, whatever the others still ask for.
        agreement.next_step(rows=0, ended=True)
        store.close()
        return result

    return run_ranks(size, body)


def same_entries(one: Entries, other: Entries) -> bool:
    """Whether rows and optimizer state are equal bit by bit."""
    pairs = [(one.found, other.found), (one.values, other.values), (one.times, other.times)]
    pairs += [(one.slots[name], other.slots[name]) for name in other.slots]
    return all(torch.equal(a, b) for a, b in pairs)
