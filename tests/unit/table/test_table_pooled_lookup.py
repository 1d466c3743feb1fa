"""Danger: a fused pooling that drops, repeats or mis-scales an id at the edge of a bag."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comparison import assert_close, assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import FixedR8, Fp32, OneBit, RandomUniform
from monolith.testing import sgd_table_config

MODES = ["sum", "mean", "sqrtn"]


def divisor(length: int, mode: str) -> float:
    return {"sum": 1.0, "mean": float(length), "sqrtn": float(np.sqrt(length))}[mode] if length else 1.0


def unfused(table: EmbeddingTable, ids: torch.Tensor, splits: list[int], mode: str) -> np.ndarray:
    """The formulation the fused call replaces: look up every id, then reduce bag by bag, in double."""
    rows = table.lookup(ids).numpy().astype(np.float64)
    bags = [rows[begin:end].sum(axis=0) / divisor(end - begin, mode) for begin, end in itertools.pairwise(splits)]
    return np.array(bags).reshape(-1, table.dim)


def test_worked_example() -> None:
    table = EmbeddingTable(sgd_table_config(2))
    table.assign(int64([1, 2, 3]), float32([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]))
    ids, splits = int64([1, 2, 3, 3, 3, 3, 9]), int64([0, 2, 2, 6, 7])
    expected = {
        "sum": [[3.0, 30.0], [0.0, 0.0], [12.0, 120.0], [0.0, 0.0]],
        "mean": [[1.5, 15.0], [0.0, 0.0], [3.0, 30.0], [0.0, 0.0]],
        "sqrtn": [[3 / 2**0.5, 30 / 2**0.5], [0.0, 0.0], [6.0, 60.0], [0.0, 0.0]],
    }
    for mode in MODES:
        assert_close(table.lookup_pooled(ids, splits, mode=mode), expected[mode], mode, rtol=1e-6)
    assert_equal(table.lookup_pooled(ids, splits), expected["sum"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compressor", [Fp32(), FixedR8(), OneBit()], ids=lambda x: x.kind)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_fused_equals_unfused_for_seen_and_unseen_ids(
    precision: str, compressor: Fp32 | FixedR8 | OneBit, mode: str
) -> None:
    parts = tuple(
        Segment(dim=dim, initializer=RandomUniform(low=-1.0, high=1.0), precision=precision, compressor=compressor)
        for dim in (3, 8)
    )
    table = EmbeddingTable(TableConfig(name="t", segments=parts))
    rng = np.random.default_rng(4)
    table.assign(int64(range(50)), torch.from_numpy(rng.uniform(-1, 1, (50, 11)).astype(np.float32)))
    lengths = [0, 1, 0, 2, 3, 17, 0, 0, 100, 1, 0]
    ids = torch.from_numpy(rng.integers(-20, 70, sum(lengths)))
    splits = [0, *np.cumsum(lengths).tolist()]
    # Sums of up to 100 numbers below 1: 100 roundings of 6e-8.
    pooled = table.lookup_pooled(ids, int64(splits), mode=mode)
    assert_close(pooled, unfused(table, ids, splits, mode), rtol=1e-5, atol=1e-5)
    assert len(table) == 50, "a pooled lookup inserted rows"


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=12),
    dim=st.sampled_from([1, 2, 4, 7, 8, 16, 19]),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bags(lengths: list[int], dim: int, mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = EmbeddingTable(sgd_table_config(dim))
    # Small integers: sums are exact in any order, so sum and mean must be exact too.
    values = rng.integers(-64, 64, (10, dim)).astype(np.float32)
    table.assign(int64(range(10)), torch.from_numpy(values))
    ids = torch.from_numpy(rng.integers(-2, 12, sum(lengths)))
    splits = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    pooled = table.lookup_pooled(ids, int64(splits), mode=mode)
    expected = unfused(table, ids, splits, mode)
    if mode == "sum":
        assert_equal(pooled, expected)
    else:
        assert_close(pooled, expected, rtol=1e-6, atol=1e-6)


def test_a_bag_of_one_is_the_row_itself() -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=9),)))
    ids = torch.arange(1000)
    for mode in MODES:
        assert_equal(table.lookup_pooled(ids, torch.arange(1001), mode=mode), table.lookup(ids))


def test_large_batches() -> None:
    # Large enough to be split over threads; integers, so exact.
    rng = np.random.default_rng(6)
    table = EmbeddingTable(sgd_table_config(16))
    values = rng.integers(-100, 100, (3_000, 16)).astype(np.float32)
    table.assign(torch.arange(3_000), torch.from_numpy(values))
    lengths = rng.integers(0, 9, 20_000)
    ids = rng.integers(0, 3_000, lengths.sum())
    splits = np.concatenate([[0], np.cumsum(lengths)])
    expected = np.zeros((20_000, 16), np.float32)
    np.add.at(expected, np.repeat(np.arange(20_000), lengths), values[ids])
    assert_equal(table.lookup_pooled(torch.from_numpy(ids), torch.from_numpy(splits)), expected)
