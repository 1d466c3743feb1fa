"""Danger: tables are served in parallel and results or errors are lost, swapped, or differ from those of one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import monolith
from monolith import EmbeddingTable, InvalidArgumentError, Segment, TableConfig
from monolith.table import Adagrad, Bags, Gradient, LocalStore
from monolith.table.call_threads import CallThreads
from monolith.table.store import THREADED_IDS

TABLES = 5


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = monolith.get_num_threads()
    monolith.set_num_threads(request.param)
    yield request.param
    monolith.set_num_threads(before)


def trained() -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    segment = Segment(dim=3, optimizer=Adagrad(learning_rate=0.5))
    store = LocalStore(EmbeddingTable(TableConfig(name=str(i), segments=(segment,))) for i in range(TABLES))
    for _ in range(3):
        ids = rng.integers(0, 50, (TABLES, THREADED_IDS))
        bags = [Bags(table=str(i), ids=ids[i], offsets=np.arange(THREADED_IDS + 1)) for i in range(TABLES)]
        rows = store.lookup(bags)
        store.apply([Gradient(bags=b, values=row) for b, row in zip(bags, rows, strict=True)])
    return store.lookup(bags)


EXPECTED: list[torch.Tensor] = []


def test_the_number_of_threads_does_not_change_a_bit(threads: int) -> None:
    results = trained()
    EXPECTED.extend([] if EXPECTED else results)
    assert all(torch.equal(a, b) for a, b in zip(results, EXPECTED, strict=True))


def test_results_come_in_order_and_every_call_is_made_once(threads: int) -> None:
    made: list[int] = []
    assert CallThreads().run([lambda i=i: (made.append(i), i)[1] for i in range(20)]) == list(range(20))  # type: ignore[misc]
    assert sorted(made) == list(range(20))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_an_error_is_raised_after_the_other_calls_have_ended(threads: int, wrong: int) -> None:
    made: list[int] = []

    def call(i: int) -> None:
        if i == wrong:
            raise InvalidArgumentError(f"call {i}")
        made.append(i)

    with pytest.raises(InvalidArgumentError, match=f"call {wrong}"):
        CallThreads().run([lambda i=i: call(i) for i in range(3)])  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    calls = CallThreads()
    before = monolith.get_num_threads()
    monolith.set_num_threads(2)
    try:
        calls.run([lambda: 1, lambda: 2])
        child = os.fork()
        if child == 0:
            os._exit(0 if calls.run([lambda: 1, lambda: 2]) == [1, 2] else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        monolith.set_num_threads(before)
