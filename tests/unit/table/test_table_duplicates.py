"""Danger: an id that occurs twice in a batch losing an update, or stepping twice where it should step once. The
original answered differently on each of its paths; here "sum" makes one step with the sum, "sequential" one step
per occurrence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from comparison import assert_close, assert_equal, assert_same_rows, float32, int64, pair
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import SGD, Adagrad, BatchSoftmax, Constant
from monolith.testing import every_optimizer, sgd_table_config


def adagrad_table() -> EmbeddingTable:
    optimizer = Adagrad(initial_accumulator_value=7.0)
    segment = Segment(dim=1, initializer=Constant(value=0.0), optimizer=optimizer)
    return EmbeddingTable(TableConfig(name="t", segments=(segment,)))


def test_sum_makes_one_step_with_the_sum() -> None:
    table = adagrad_table()
    table.apply_gradients(int64([5, 5]), float32([[1.0], [2.0]]), learning_rates=[1.0])
    assert_close(table.lookup(int64([5])), [[-3 / 4]], rtol=1e-6)
    assert table.lookup_entry(int64([5])).slots["0/norm"].tolist() == [[16.0]]


def test_sum_is_the_default() -> None:
    default, explicit = adagrad_table(), adagrad_table()
    default.apply_gradients(int64([5, 5]), float32([[1.0], [2.0]]))
    explicit.apply_gradients(int64([5, 5]), float32([[1.0], [2.0]]), duplicates="sum")
    assert_equal(default.lookup(int64([5])), explicit.lookup(int64([5])))


def test_sequential_makes_one_step_per_occurrence_in_order() -> None:
    table = adagrad_table()
    grads = float32([[3.0], [3.0]])
    table.apply_gradients(int64([5, 5]), grads, learning_rates=[1.0], duplicates="sequential")
    # norm 7 + 9 = 16, then 25
    assert_close(table.lookup(int64([5])), [[-3 / 4 - 3 / 5]], rtol=1e-6)
    assert table.lookup_entry(int64([5])).slots["0/norm"].tolist() == [[25.0]]


def test_sequential_order_is_the_order_of_the_batch() -> None:
    for grads in ([[3.0], [4.0]], [[4.0], [3.0]]):
        together, apart = adagrad_table(), adagrad_table()
        together.apply_gradients(int64([5, 5]), float32(grads), duplicates="sequential")
        for grad in grads:
            apart.apply_gradients(int64([5]), float32([grad]))
        assert_equal(together.lookup(int64([5])), apart.lookup(int64([5])))


def test_opposite_gradients_cancel_but_still_step() -> None:
    table = adagrad_table()
    table.apply_gradients(int64([5, 5]), float32([[2.0], [-2.0]]))
    assert table.lookup(int64([5])).tolist() == [[0.0]]
    assert 5 in table


def test_gradients_are_added_in_batch_order_in_float32() -> None:
    # 1 + 2^-24 rounds to 1, twice; added the other way round the two halves would survive.
    tiny = float(np.float32(2**-24))
    table = EmbeddingTable(sgd_table_config(1))
    table.apply_gradients(int64([5, 5, 5]), float32([[1.0], [tiny], [tiny]]))
    assert table.lookup(int64([5])).tolist() == [[-1.0]]
    table.apply_gradients(int64([6, 6, 6]), float32([[tiny], [tiny], [1.0]]))
    assert table.lookup(int64([6])).tolist() == [[-float(np.float32(1 + 2**-23))]]


@pytest.mark.parametrize("duplicates", ["sum", "sequential"])
@pytest.mark.parametrize("name", every_optimizer())
def test_a_batch_full_of_duplicates_matches_the_oracle(name: str, duplicates: str) -> None:
    optimizer = every_optimizer()[name]
    dim = 1 if isinstance(optimizer, BatchSoftmax) else 5
    table, oracle = pair(TableConfig(name="t", segments=(Segment(dim=dim, optimizer=optimizer),)))
    rng = np.random.default_rng(3)
    ids = rng.choice(np.array([0, -1, 7, 8, 2**50]), 300)
    grads = (rng.normal(size=(300, dim)) / 8).astype(np.float32)
    options: dict[str, Any] = {"duplicates": duplicates, "step": 3}
    stale = oracle.lookup(ids) if optimizer.kind == "delay_compensation" else None
    oracle.apply_gradients(ids, grads, snapshot=stale, **options)
    if stale is not None:
        options["snapshot"] = torch.from_numpy(stale)
    table.apply_gradients(torch.from_numpy(ids), torch.from_numpy(grads), **options)
    # Sixty dependent float32 steps per id, or sixty additions.
    assert_same_rows(table, oracle, [0, -1, 7, 8, 2**50], rtol=2e-5, atol=2e-5)


def test_large_batches_lose_no_duplicate() -> None:
    # Enough ids for any parallel path, each 32 times, gradients exact in float32.
    ids = np.tile(np.arange(5_000, dtype=np.int64) * 7_919, 32)
    np.random.default_rng(1).shuffle(ids)
    for duplicates in ("sum", "sequential"):
        table = EmbeddingTable(sgd_table_config(2))
        table.apply_gradients(torch.from_numpy(ids), torch.full((len(ids), 2), -0.25), duplicates=duplicates)
        assert len(table) == 5_000
        assert_equal(table.lookup(torch.from_numpy(np.unique(ids))), np.full((5_000, 2), 8.0))


def test_the_last_duplicate_of_an_assign_wins() -> None:
    table = EmbeddingTable(sgd_table_config(1))
    table.assign(int64([5, 6, 5]), float32([[1.0], [2.0], [3.0]]))
    assert table.lookup(int64([5, 6])).tolist() == [[3.0], [2.0]]
    ids = np.random.default_rng(2).integers(0, 500, 20_000)
    table.assign(torch.from_numpy(ids), torch.arange(20_000.0)[:, None])
    last = {int(id_): position for position, id_ in enumerate(ids)}
    assert table.lookup(int64(last)).ravel().tolist() == list(map(float, last.values()))


def test_every_duplicate_of_an_assign_add_adds() -> None:
    segment = Segment(dim=1, initializer=Constant(value=10.0), optimizer=SGD())
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    table.assign_add(int64([5, 6, 5]), float32([[1.0], [2.0], [3.0]]))
    assert table.lookup(int64([5, 6])).tolist() == [[14.0], [12.0]]


def test_duplicates_of_status_calls_are_answered_in_order() -> None:
    table = EmbeddingTable(sgd_table_config(1))
    assert table.reinitialize(int64([5, 5, 6])).tolist() == [0, 1, 0]
    assert table.contains(int64([5, 5, 7])).tolist() == [True, True, False]
    assert table.erase(int64([5, 5, 6])).tolist() == [True, False, True]


def test_duplicates_of_a_lookup_read_the_same_row() -> None:
    table = EmbeddingTable(sgd_table_config(1))
    table.assign(int64([5]), float32([[2.0]]))
    assert table.lookup(int64([5, 6, 5, 5])).tolist() == [[2.0], [0.0], [2.0], [2.0]]
