"""Danger: tables served in parallel whose answers or errors get lost, swapped, or differ from those of one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import monolith
from monolith import EmbeddingTable, InvalidArgumentError, Segment, TableConfig
from monolith.table import Adagrad, Bags, Gradient, LocalStore

TABLES = 5
IDS = 4096  # several times what it takes to use threads


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = monolith.get_num_threads()
    monolith.set_num_threads(request.param)
    yield request.param
    monolith.set_num_threads(before)


def new_store() -> LocalStore:
    segment = Segment(dim=3, optimizer=Adagrad(learning_rate=0.5))
    return LocalStore(EmbeddingTable(TableConfig(name=str(i), segments=(segment,))) for i in range(TABLES))


def drawn(rng: np.random.Generator) -> list[Bags]:
    ids = rng.integers(0, 50, (TABLES, IDS))
    return [Bags(table=str(i), ids=ids[i], offsets=np.arange(IDS + 1)) for i in range(TABLES)]


def trained() -> list[torch.Tensor]:
    rng, store = np.random.default_rng(0), new_store()
    for _ in range(3):
        bags = drawn(rng)
        rows = store.lookup(bags)
        store.apply([Gradient(bags=b, values=row) for b, row in zip(bags, rows, strict=True)])
    return list(store.lookup(bags))


EXPECTED: list[torch.Tensor] = []


def test_the_number_of_threads_does_not_change_a_bit(threads: int) -> None:
    results = trained()
    EXPECTED.extend([] if EXPECTED else results)
    assert all(torch.equal(a, b) for a, b in zip(results, EXPECTED, strict=True))


@pytest.mark.parametrize("wrong", range(TABLES))
def test_a_batch_that_is_wrong_in_one_table_changes_none(threads: int, wrong: int) -> None:
    store, bags = new_store(), drawn(np.random.default_rng(1))
    gradients = [
        Gradient(bags=b, values=torch.ones(IDS - (i == wrong), 3), learning_rates=(0.5,)) for i, b in enumerate(bags)
    ]
    with pytest.raises(InvalidArgumentError, match=rf"table '{wrong}': grads: expected \[4096, 3\], got \[4095, 3\]"):
        store.apply(gradients)
    rated = [
        Gradient(bags=b, values=torch.ones(IDS, 3), learning_rates=(1 - 2.0 * (i == wrong),))
        for i, b in enumerate(bags)
    ]
    with pytest.raises(InvalidArgumentError, match=rf"table '{wrong}': learning_rates\[0\]"):
        store.apply(rated)
    assert all(len(table) == 0 for table in store.tables.values())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    before = monolith.get_num_threads()
    monolith.set_num_threads(2)
    try:
        expected = trained()
        child = os.fork()
        if child == 0:
            os._exit(0 if all(map(torch.equal, trained(), expected)) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        monolith.set_num_threads(before)
