"""Danger: writing values by hand (warm starts, pushes to serving) that resets, skips or leaks optimizer state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from comparison import assert_close, assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import Adagrad, BatchSoftmax, Constant
from monolith.testing import every_optimizer


def adagrad_table() -> EmbeddingTable:
    segment = Segment(dim=2, initializer=Constant(value=0.5), optimizer=Adagrad(initial_accumulator_value=1.0))
    return EmbeddingTable(TableConfig(name="t", segments=(segment,)))


def test_assign_sets_the_value_of_new_and_old_ids() -> None:
    table = adagrad_table()
    table.assign(int64([1]), float32([[1.0, 2.0]]))
    table.assign(int64([1, 2]), float32([[3.0, 4.0], [5.0, 6.0]]))
    assert table.lookup(int64([1, 2])).tolist() == [[3.0, 4.0], [5.0, 6.0]]
    assert len(table) == 2


def test_assign_keeps_optimizer_state_and_starts_it_for_a_new_id() -> None:
    table = adagrad_table()
    table.apply_gradients(int64([1]), float32([[2.0, 3.0]]))
    table.assign(int64([1, 2]), float32([[7.0, 7.0], [8.0, 8.0]]))
    entries = table.lookup_entry(int64([1, 2]))
    assert entries.slots["0/norm"].tolist() == [[5.0, 10.0], [1.0, 1.0]]
    assert entries.values.tolist() == [[7.0, 7.0], [8.0, 8.0]]


def test_assign_add_adds_to_the_value_or_to_the_initial_value() -> None:
    table = adagrad_table()
    table.assign(int64([1]), float32([[1.0, 2.0]]))
    table.assign_add(int64([1, 2]), float32([[0.25, 0.5], [1.0, 2.0]]))
    assert table.lookup(int64([1, 2])).tolist() == [[1.25, 2.5], [1.5, 2.5]]
    assert table.lookup_entry(int64([2])).slots["0/norm"].tolist() == [[1.0, 1.0]]


def test_training_goes_on_from_an_assigned_value() -> None:
    table = adagrad_table()
    table.assign(int64([1]), float32([[4.0, 4.0]]))
    table.apply_gradients(int64([1]), float32([[3.0, 3.0]]), learning_rates=[1.0])
    assert_close(table.lookup(int64([1])), np.full((1, 2), 4 - 3 / np.sqrt(10)), rtol=1e-6)


@pytest.mark.parametrize("call", ["assign", "assign_add", "apply_gradients", "reinitialize"])
def test_every_write_stores_its_event_time_even_an_older_one(call: str) -> None:
    table = adagrad_table()
    for time in (100, 50, 2**32 - 1, 0):
        if call == "reinitialize":
            table.reinitialize(int64([1]), event_time=time)
        else:
            getattr(table, call)(int64([1]), float32([[1.0, 1.0]]), event_time=time)
        assert table.lookup_entry(int64([1])).times.tolist() == [time]


def test_pooled_gradients_store_their_event_time() -> None:
    table = adagrad_table()
    table.apply_pooled_gradients(int64([1, 2]), int64([0, 2]), float32([[1.0, 1.0]]), event_time=7)
    assert table.lookup_entry(int64([1, 2])).times.tolist() == [7, 7]


def test_reads_leave_the_time_alone() -> None:
    table = adagrad_table()
    table.assign(int64([1]), float32([[1.0, 1.0]]), event_time=9)
    table.lookup(int64([1]))
    table.lookup_pooled(int64([1]), int64([0, 1]))
    table.contains(int64([1]))
    assert table.lookup_entry(int64([1])).times.tolist() == [9]


@pytest.mark.parametrize("name", every_optimizer())
def test_reinitialize_resets_value_and_every_slot(name: str) -> None:
    optimizer = every_optimizer()[name]
    dim = 1 if isinstance(optimizer, BatchSoftmax) else 5
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=dim, optimizer=optimizer),)))
    assert table.reinitialize(int64([1])).tolist() == [0]
    fresh = table.lookup_entry(int64([1]))
    for step in range(1, 4):
        table.apply_gradients(int64([1, 2]), torch.ones(2, dim), step=step, snapshot=torch.zeros(2, dim))
    assert not torch.equal(table.lookup_entry(int64([1])).values, fresh.values)
    untouched = table.lookup_entry(int64([2]))
    status = table.reinitialize(int64([1, 3]), event_time=77)
    assert status.dtype == torch.int32
    assert status.tolist() == [1, 0]
    again = table.lookup_entry(int64([1]))
    assert_equal(again.values, fresh.values)
    for slot, values in fresh.slots.items():
        assert_equal(again.slots[slot], values, slot)
        assert_equal(table.lookup_entry(int64([2])).slots[slot], untouched.slots[slot], slot)
    assert again.times.tolist() == [77]
    assert_equal(table.lookup_entry(int64([2])).values, untouched.values)


def test_shape_of_the_answer_follows_the_ids() -> None:
    table = adagrad_table()
    ids = torch.arange(6).reshape(2, 3)
    assert table.contains(ids).shape == (2, 3)
    assert table.reinitialize(ids).shape == (2, 3)
    assert table.contains(ids).dtype == torch.bool
    assert table.erase(ids).shape == (2, 3)
