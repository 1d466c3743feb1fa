"""Danger: an array of an unusual but legal shape read as if it were flat, contiguous or non-empty."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from comparison import assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import SGD, Zeros
from monolith.testing import sgd_table_config


@pytest.fixture
def table() -> EmbeddingTable:
    table = EmbeddingTable(sgd_table_config(3))
    table.assign(int64(range(24)), float32(np.arange(72).reshape(24, 3)))
    return table


@pytest.mark.parametrize("shape", [(), (1,), (24,), (0,), (4, 6), (2, 3, 4), (0, 5), (24, 1)])
def test_lookup_keeps_the_shape_of_ids(table: EmbeddingTable, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    ids = torch.arange(size).reshape(shape)
    found = table.lookup(ids)
    assert found.shape == (*shape, 3)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert_equal(found, np.arange(3 * size, dtype=np.float32).reshape(*shape, 3))


def test_numpy_and_torch_mean_the_same(table: EmbeddingTable) -> None:
    assert_equal(table.lookup(np.array([[1, 2]])), table.lookup(torch.tensor([[1, 2]])))
    table.assign_add(np.array([1]), np.ones((1, 3), np.float32))
    table.apply_gradients(np.array([1]), np.full((1, 3), 0.5, np.float32))
    assert table.lookup(int64([1])).tolist() == [[3.5, 4.5, 5.5]]
    pooled = table.lookup_pooled(np.array([2, 3]), np.array([0, 2]))
    assert_equal(pooled, table.lookup_pooled(int64([2, 3]), int64([0, 2])))


def test_arrays_need_not_be_contiguous(table: EmbeddingTable) -> None:
    wide = torch.arange(48).reshape(24, 2)
    assert_equal(table.lookup(wide[:, 0][::3]), table.lookup(wide[:, 0][::3].clone()))
    assert_equal(table.lookup(np.arange(23, -1, -1)[::-1]), table.lookup(torch.arange(24)))
    columns = float32(np.arange(6).reshape(3, 2)).t()  # [2, 3], column-major
    table.assign(int64([100, 101]), columns)
    assert table.lookup(int64([100, 101])).tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    table.apply_gradients(int64([100, 101]), torch.ones(2, 6)[:, ::2])
    assert table.lookup(int64([100, 101])).tolist() == [[-1.0, 1.0, 3.0], [0.0, 2.0, 4.0]]
    table.apply_pooled_gradients(int64([100, 101]), int64([0, 9, 2])[::2], torch.ones(1, 6)[:, ::2])
    assert table.lookup(int64([100, 101])).tolist() == [[-2.0, 0.0, 2.0], [-1.0, 1.0, 3.0]]


def test_a_constant_expanded_over_rows_is_read_as_such(table: EmbeddingTable) -> None:
    # What autograd hands to a table whose output was summed: one row with stride 0.
    table.apply_gradients(int64([0, 1]), torch.ones(1, 3).expand(2, 3))
    assert table.lookup(int64([0, 1])).tolist() == [[-1.0, 0.0, 1.0], [2.0, 3.0, 4.0]]


def test_results_are_the_callers_own(table: EmbeddingTable) -> None:
    first = table.lookup(int64([1]))
    first.fill_(7)
    assert table.lookup(int64([1])).tolist() == [[3.0, 4.0, 5.0]]
    entries = table.lookup_entry(int64([1]))
    entries.values.fill_(7)
    assert table.lookup(int64([1])).tolist() == [[3.0, 4.0, 5.0]]


def test_arguments_are_not_changed(table: EmbeddingTable) -> None:
    ids, splits, grads = int64([1, 1, 2]), int64([0, 2, 3]), float32(np.ones((2, 3)))
    table.apply_pooled_gradients(ids, splits, grads, mode="mean")
    table.apply_gradients(ids, float32(np.ones((3, 3))))
    assert ids.tolist() == [1, 1, 2]
    assert splits.tolist() == [0, 2, 3]
    assert grads.tolist() == [[1.0] * 3] * 2


def test_every_call_accepts_nothing(table: EmbeddingTable) -> None:
    none, rows = int64([]), torch.empty(0, 3)
    before = len(table)
    assert table.lookup(none).shape == (0, 3)
    assert table.lookup_pooled(none, int64([0])).shape == (0, 3)
    assert table.lookup_pooled(none, int64([0, 0, 0])).tolist() == [[0.0] * 3] * 2
    assert table.lookup_entry(none).values.shape == (0, 3)
    table.apply_gradients(none, rows)
    table.apply_pooled_gradients(none, int64([0]), rows)
    table.apply_pooled_gradients(none, int64([0, 0]), torch.ones(1, 3))
    table.assign(none, rows)
    table.assign_add(none, rows)
    assert table.reinitialize(none).shape == (0,)
    assert table.contains(none).shape == (0,)
    assert table.erase(none).shape == (0,)
    assert len(table) == before


def test_an_empty_table_answers_every_call() -> None:
    table = EmbeddingTable(sgd_table_config(3))
    assert table.lookup(int64([1])).tolist() == [[0.0] * 3]
    assert table.lookup_pooled(int64([1]), int64([0, 1])).tolist() == [[0.0] * 3]
    assert table.lookup_entry(int64([1])).found.tolist() == [False]
    assert table.contains(int64([1])).tolist() == [False]
    assert table.erase(int64([1])).tolist() == [False]
    assert table.evict() == 0
    assert list(table.iter_batches()) == []
    table.clear()
    assert len(table) == 0
    assert table.stats().rows == 0


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 16, 31, 64, 127, 1024, 65536])
def test_rows_of_any_width(dim: int) -> None:
    segment = Segment(dim=dim, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    row = np.arange(dim, dtype=np.float32)[None]
    table.assign(int64([1]), torch.from_numpy(row))
    table.apply_gradients(int64([2]), torch.from_numpy(-row))
    assert_equal(table.lookup(int64([1, 2, 3])), np.concatenate([row, row, 0 * row]))


def test_dim_and_name_are_those_of_the_config() -> None:
    table = EmbeddingTable(sgd_table_config(3, name="items"))
    assert (table.dim, table.name) == (3, "items")
    assert table.config == sgd_table_config(3, name="items")
