"""Records to train on, and the tables after any number of them: all that a job ever knows is a pure function of the step, so
one who watches it from outside can tell what must be in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from comparison import assert_same_rows, initial_rows
from monolith import EmbeddingTable
from monolith.table import SGD, Adagrad, Expiry, Segment, TableConfig, Zeros
from oracle import DictTable

FIRST_SECOND = 1_700_000_000
LIFETIME = 25
POOL = np.random.default_rng(7).integers(-(2**63), 2**63, 60)


class AnyTable(Protocol):
    """What a table and its oracle have in common."""

    def apply_gradients(self, ids: np.ndarray, grads: np.ndarray, *, step: int, event_time: int) -> None: ...
    def assign_add(self, ids: np.ndarray, values: np.ndarray, *, event_time: int) -> None: ...
    def reinitialize(self, ids: np.ndarray, *, event_time: int) -> object: ...
    def erase(self, ids: np.ndarray) -> object: ...
    def evict(self) -> int: ...


def configs() -> dict[str, TableConfig]:
    """`user` counts in whole numbers; `item` has an optimizer with state, drawn initial values and rows that expire."""
    user = Segment(dim=4, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))
    item = Segment(dim=3, optimizer=Adagrad(learning_rate=0.5))
    return {
        "user": TableConfig(name="user", segments=(user,)),
        "item": TableConfig(name="item", segments=(item,), expiry=Expiry(default=LIFETIME)),
    }


def train(tables: Mapping[str, AnyTable], number: int) -> None:
    """Train record `number`, counting from 0: updates, additions, new ids, and every way a row can go."""
    chance, now = np.random.default_rng(number), FIRST_SECOND + number
    users = chance.integers(0, 40, 5)
    tables["user"].apply_gradients(users, np.full((5, 4), -1, np.float32), step=number, event_time=now)
    tables["user"].assign_add(users[:1], np.full((1, 4), 100, np.float32), event_time=now)
    items = np.append(chance.choice(POOL, 3, replace=False), 10_000 + number)
    tables["item"].apply_gradients(
        items, chance.integers(-3, 4, (4, 3)).astype(np.float32), step=number, event_time=now
    )
    if number % 3 == 0:
        tables["user"].erase(users[2:4])
    if number % 5 == 0:
        tables["item"].reinitialize(items[:1], event_time=now)
    if number % 7 == 0:
        tables["item"].evict()


def dense_after(step: int) -> torch.Tensor:
    """The dense parameters after `step` records."""
    return torch.tensor([step, step * (step + 1) // 2], dtype=torch.int64)


class Oracle:
    """The tables after any number of records, by the formulas alone."""

    def __init__(self) -> None:
        self._initial = {name: initial_rows(config) for name, config in configs().items()}
        self._known: dict[int, dict[str, DictTable]] = {0: self._empty()}
        self._step, self._tables = 0, self._empty()

    def at(self, step: int) -> dict[str, DictTable]:
        """After `step` records. Looking back is cheap only where one has looked before."""
        if step < self._step:
            self._step = max(known for known in self._known if known <= step)
            self._tables = {name: table.copy() for name, table in self._known[self._step].items()}
        while self._step < step:
            train(self._tables, self._step)
            self._step += 1
        if step not in self._known:
            self._known[step] = {name: table.copy() for name, table in self._tables.items()}
        return self._known[step]

    def require(self, tables: Mapping[str, EmbeddingTable], step: int) -> None:
        """Every row, slot and time of `tables` is that of `step`, and there are no others."""
        for name, expected in self.at(step).items():
            ids = {*tables[name], *expected.rows}
            # Adagrad is computed in another order; a missing or doubled update is a million times larger.
            assert_same_rows(tables[name], expected, ids, rtol=1e-5, atol=1e-6)
            assert tables[name].stats().max_event_time == expected.newest

    def _empty(self) -> dict[str, DictTable]:
        return {name: DictTable(config, self._initial[name]) for name, config in configs().items()}
