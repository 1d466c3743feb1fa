"""Danger: a fused backward that is not the derivative of the forward, or that steps once per bag instead of once
per id.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comparison import assert_close, assert_equal, assert_same_rows, float32, int64, pair
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import Adagrad, Adam, Ftrl, OneBit, RandomUniform
from monolith.testing import sgd_table_config

MODES = ["sum", "mean", "sqrtn"]


def test_worked_example() -> None:
    ids, splits = int64([1, 2, 2, 1, 3, 3, 3, 3]), int64([0, 3, 3, 4, 8])
    grads = float32([[-3.0], [-100.0], [-1.0], [-8.0]])
    # id 1 is in bags of 3 and 1, id 2 twice in the bag of 3, id 3 four times in the bag of 4; the second bag is empty.
    expected = {
        "sum": [[4.0], [6.0], [32.0]],
        "mean": [[2.0], [2.0], [8.0]],
        "sqrtn": [[1 + 3**0.5], [2 * 3**0.5], [16.0]],
    }
    for mode in MODES:
        table = EmbeddingTable(sgd_table_config(1))
        table.apply_pooled_gradients(ids, splits, grads, mode=mode)
        assert_close(table.lookup(int64([1, 2, 3])), expected[mode], mode, rtol=1e-6)
        assert len(table) == 3


def test_sum_is_the_default() -> None:
    table = EmbeddingTable(sgd_table_config(1))
    table.apply_pooled_gradients(int64([1, 1]), int64([0, 2]), float32([[-3.0]]))
    assert table.lookup(int64([1])).tolist() == [[6.0]]


def test_an_id_in_many_bags_steps_once() -> None:
    segment = Segment(dim=1, optimizer=Adagrad(initial_accumulator_value=7.0))
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,), unseen="zeros"))
    table.apply_pooled_gradients(int64([1, 1]), int64([0, 1, 2]), float32([[1.0], [2.0]]))
    assert table.lookup_entry(int64([1])).slots["0/norm"].tolist() == [[16.0]]


PARTS = (
    Segment(dim=2, initializer=RandomUniform(low=-1.0, high=1.0), optimizer=Adagrad()),
    Segment(dim=9, initializer=RandomUniform(low=-1.0, high=1.0), optimizer=Adam(learning_rate=0.1)),
    Segment(dim=3, initializer=RandomUniform(low=-1.0, high=1.0), optimizer=Ftrl(learning_rate=0.1)),
    Segment(dim=3, optimizer=Adagrad(learning_rate=0.1), compressor=OneBit(amplitude=0.5)),
)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**32 - 1),
)
def test_fused_equals_unfused(lengths: list[int], mode: str, seed: int) -> None:
    config = TableConfig(name="t", segments=PARTS)
    fused, unfused = EmbeddingTable(config), EmbeddingTable(config)
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"learning_rates": [0.1, 0.2, 0.3, 0.4], "event_time": 77}
    for step in range(3):
        ids = rng.integers(0, 12, sum(lengths))
        splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        grads = rng.normal(size=(len(lengths), config.dim)).astype(np.float32)
        scale = {"sum": np.ones(len(lengths)), "mean": np.array(lengths), "sqrtn": np.sqrt(lengths)}[mode]
        each = np.repeat(grads / np.maximum(scale, 1e-9)[:, None], lengths, axis=0).astype(np.float32)
        fused.apply_pooled_gradients(
            torch.from_numpy(ids), torch.from_numpy(splits), torch.from_numpy(grads), mode=mode, step=step, **options
        )
        unfused.apply_gradients(torch.from_numpy(ids), torch.from_numpy(each), step=step, **options)
    everything = torch.arange(12)
    left, right = fused.lookup_entry(everything), unfused.lookup_entry(everything)
    assert_equal(left.found, right.found)
    assert_equal(left.times, right.times)
    # Scaling before or after the sum rounds differently, a few units in the last place per step.
    assert_close(left.values, right.values, rtol=1e-5, atol=2e-6)
    for name, slot in right.slots.items():
        assert_close(left.slots[name], slot, name, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_matches_the_oracle(mode: str) -> None:
    table, oracle = pair(TableConfig(name="t", segments=PARTS))
    rng = np.random.default_rng(5)
    for step in range(5):
        lengths = rng.integers(0, 7, 40)
        ids = rng.integers(-9, 9, lengths.sum())
        splits = np.concatenate([[0], np.cumsum(lengths)])
        grads = (rng.normal(size=(40, 17)) / 4).astype(np.float32)
        options: dict[str, Any] = {"mode": mode, "step": step, "event_time": step}
        table.apply_pooled_gradients(
            torch.from_numpy(ids), torch.from_numpy(splits), torch.from_numpy(grads), **options
        )
        oracle.apply_pooled_gradients(ids, splits.tolist(), grads, **options)
        assert_same_rows(table, oracle, range(-10, 10), rtol=2e-5, atol=1e-5)
        oracle.adopt(table.lookup_entry(int64(range(-10, 10))))


@pytest.mark.parametrize("mode", MODES)
def test_is_the_gradient_of_the_pooled_lookup(mode: str) -> None:
    # With sgd at rate 1 the change of a row is minus its gradient: hold it against torch's autograd.
    rng = np.random.default_rng(6)
    weights = torch.from_numpy(rng.integers(-8, 8, (6, 3)).astype(np.float32)).requires_grad_()
    ids, splits = int64([0, 1, 1, 5, 2, 2, 2]), [0, 3, 3, 4, 7]
    upstream = torch.from_numpy(rng.integers(-8, 8, (4, 3)).astype(np.float32))
    divide = {"sum": lambda n: 1.0, "mean": float, "sqrtn": lambda n: n**0.5}[mode]
    bags = [
        weights[ids[begin:end]].sum(dim=0) / (divide(end - begin) if end > begin else 1.0)
        for begin, end in itertools.pairwise(splits)
    ]
    torch.stack(bags).backward(upstream)
    table = EmbeddingTable(sgd_table_config(3))
    table.assign(torch.arange(6), weights.detach())
    table.apply_pooled_gradients(ids, int64(splits), upstream, mode=mode)
    assert weights.grad is not None
    assert_close(weights.detach() - table.lookup(torch.arange(6)), weights.grad, rtol=1e-6, atol=2e-6)


def test_large_batches_lose_no_occurrence() -> None:
    rng = np.random.default_rng(7)
    lengths = rng.integers(0, 9, 20_000)
    ids = rng.integers(0, 2_000, lengths.sum())
    splits = np.concatenate([[0], np.cumsum(lengths)])
    grads = rng.integers(-3, 4, (20_000, 4)).astype(np.float32)
    expected = np.zeros((2_000, 4), np.float32)
    np.subtract.at(expected, ids, np.repeat(grads, lengths, axis=0))
    table = EmbeddingTable(sgd_table_config(4))
    table.apply_pooled_gradients(torch.from_numpy(ids), torch.from_numpy(splits), torch.from_numpy(grads))
    assert_equal(table.lookup(torch.arange(2_000)), expected)
