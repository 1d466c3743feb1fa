"""Danger: training that does not see what serving will answer. While training, compressors change what a lookup
reads and what a gradient means; the stored weights stay full precision.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from comparison import assert_close, assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import SGD, Bf16, Constant, FixedR8, Fp16, Fp32, OneBit
from oracle import fixed_r8


def table_of(compressor: Fp32 | Fp16 | Bf16 | FixedR8 | OneBit, *, start: float = 0.0, dim: int = 1) -> EmbeddingTable:
    segment = Segment(
        dim=dim, initializer=Constant(value=start), optimizer=SGD(learning_rate=1.0), compressor=compressor
    )
    return EmbeddingTable(TableConfig(name="t", segments=(segment,)))


@pytest.mark.parametrize("compressor", [Fp32(), Fp16(), Bf16()], ids=lambda x: x.kind)
def test_float_compressors_do_not_touch_training(compressor: Fp32 | Fp16 | Bf16) -> None:
    table = table_of(compressor)
    table.assign(int64([1]), float32([[0.1]]))
    assert table.lookup(int64([1])).item() == float(np.float32(0.1))
    table.apply_gradients(int64([1]), float32([[0.3]]))
    assert table.lookup(int64([1])).item() == float(np.float32(0.1) - np.float32(0.3))


# step 1/128: codes are multiples of 0.0078125, half a step rounds away from zero, the largest is 127/128.
FIXED = [
    (0.0, 0.0),
    (-0.0, 0.0),
    (0.0039, 0.0),
    (0.00390625, 0.0078125),
    (-0.0039, 0.0),
    (-0.00390625, -0.0078125),
    (0.5, 0.5),
    (0.504, 0.5078125),
    (-0.504, -0.5078125),
    (0.9921875, 0.9921875),
    (0.999, 0.9921875),
    (1.0, 0.9921875),
    (123.0, 0.9921875),
    (float("inf"), 0.9921875),
    (-1.0, -1.0),
    (-1.5, -1.0),
    (float("-inf"), -1.0),
    (float("nan"), 0.0),
]


@pytest.mark.parametrize(("stored", "read"), FIXED)
def test_fixed_r8_reads_eight_bits(stored: float, read: float) -> None:
    table = table_of(FixedR8())
    table.assign(int64([1]), float32([[stored]]))
    assert table.lookup(int64([1])).item() == read
    assert_equal(table.lookup_entry(int64([1])).values, np.array([[stored]], np.float32))


@pytest.mark.parametrize("value_range", [0.25, 1.0, 8.0, 0.3, 0.05, 100.0])
def test_fixed_r8_of_any_range(value_range: float) -> None:
    values = np.random.default_rng(1).uniform(-1.5, 1.5, (2_000, 3)).astype(np.float32) * np.float32(value_range)
    table = table_of(FixedR8(range=value_range), dim=3)
    table.assign(torch.arange(2_000), torch.from_numpy(values))
    read = table.lookup(torch.arange(2_000)).numpy()
    assert_close(read, fixed_r8(values, value_range), rtol=1e-6)
    step = value_range / 128
    inside = np.abs(values) < value_range * 0.98
    assert np.abs(read - values)[inside].max() <= step / 2 * (1 + 1e-5)
    assert len(np.unique(read)) == 256


def test_fixed_r8_passes_gradients_straight_through() -> None:
    table = table_of(FixedR8(), start=0.1)
    for _ in range(10):
        table.apply_gradients(int64([1]), float32([[0.001]]))
    # Ten updates, each far below the quantum, reach the stored weight.
    assert_close(table.lookup_entry(int64([1])).values, [[0.09]], rtol=1e-5)
    assert table.lookup(int64([1])).item() == 12 / 128


def test_fixed_r8_assign_add_works_on_the_stored_weight() -> None:
    table = table_of(FixedR8(), start=0.001)
    for _ in range(9):
        table.assign_add(int64([1]), float32([[0.001]]))
    assert_close(table.lookup_entry(int64([1])).values, [[0.01]], rtol=1e-5)


def test_one_bit_reads_a_tanh() -> None:
    values = np.linspace(-3, 3, 25, dtype=np.float32)[:, None]
    table = table_of(OneBit(amplitude=0.25, init_scale=2.0))
    table.assign(torch.arange(25), torch.from_numpy(values))
    assert_close(table.lookup(torch.arange(25)), 0.25 * np.tanh(2 * values), rtol=2e-6, atol=1e-8)
    assert_equal(table.lookup_entry(torch.arange(25)).values, values)


def test_one_bit_gradient_is_that_of_the_tanh() -> None:
    weight, grad = 0.4, 2.0
    table = table_of(OneBit(amplitude=0.25, init_scale=2.0, step_size=1000), start=weight)
    table.apply_gradients(int64([1]), float32([[grad]]), step=1)
    slope = 0.25 * 2 * (1 - np.tanh(2 * weight) ** 2)
    assert_close(table.lookup_entry(int64([1])).values, [[weight - grad * slope]], rtol=1e-6)


def test_one_bit_gradient_agrees_with_autograd() -> None:
    weights = torch.linspace(-2, 2, 9, requires_grad=True)
    upstream = torch.arange(9.0) - 4
    (0.25 * torch.tanh(1.5 * weights)).backward(upstream)
    table = table_of(OneBit(amplitude=0.25, init_scale=1.5, step_size=7), dim=9)
    table.assign(int64([1]), weights.detach()[None])
    table.apply_gradients(int64([1]), upstream[None], step=3)
    assert weights.grad is not None
    moved = weights.detach()[None] - table.lookup_entry(int64([1])).values
    assert_close(moved, weights.grad[None], rtol=1e-5, atol=1e-6)


def read_at(table: EmbeddingTable) -> float:
    """The scale, recovered from what a stored 0.5 reads."""
    table.assign(int64([99]), float32([[0.5]]))
    return float(np.arctanh(np.float64(table.lookup(int64([99])).item()) / 0.5) / 0.5)


def touch(table: EmbeddingTable, step: int) -> None:
    table.apply_gradients(int64([1]), float32([[0.0]]), step=step)


def test_the_scale_grows_only_at_multiples_of_step_size() -> None:
    table = table_of(OneBit(step_size=200, amplitude=0.5))
    assert_close(read_at(table), 1.0, rtol=1e-5)
    for step, scale in (
        (0, 1.0),
        (199, 1.0),
        (200, np.sqrt(2.0)),
        (201, np.sqrt(2.0)),
        (399, np.sqrt(2.0)),
        (600, 2.0),
        (601, 2.0),
        (0, 1.0),  # a restarted job counts again
    ):
        touch(table, step)
        assert_close(read_at(table), scale, f"after step {step}", rtol=1e-5)


def test_the_scale_stops_at_its_maximum() -> None:
    table = table_of(OneBit(step_size=1, max_scale=3.0, amplitude=0.5))
    touch(table, 10**9)
    assert_close(read_at(table), 3.0, rtol=1e-5)


def test_the_scale_grows_before_the_gradient_of_the_same_call() -> None:
    table = table_of(OneBit(step_size=200, amplitude=0.5), start=0.4)
    table.apply_gradients(int64([1]), float32([[1.0]]), step=600)
    slope = 0.5 * 2 * (1 - np.tanh(2 * 0.4) ** 2)
    assert_close(table.lookup_entry(int64([1])).values, [[0.4 - slope]], rtol=1e-6)


def test_the_scale_is_shared_by_all_ids_and_survives_save_and_load(tmp_path: Path) -> None:
    table = table_of(OneBit(step_size=200, amplitude=0.5), start=0.4)
    touch(table, 600)
    table.save(tmp_path / "t")
    loaded = EmbeddingTable.load(tmp_path / "t")
    for each in (table, loaded):
        assert_close(each.lookup(int64([1, 2, 3])), np.full((3, 1), 0.5 * np.tanh(0.8)), rtol=2e-6)
        assert_close(read_at(each), 2.0, rtol=1e-5)


def test_each_segment_has_a_scale_of_its_own() -> None:
    parts = tuple(
        Segment(
            dim=1,
            initializer=Constant(value=0.4),
            optimizer=SGD(learning_rate=1.0),
            compressor=OneBit(step_size=step_size, amplitude=1.0),
        )
        for step_size in (200, 7)
    )
    table = EmbeddingTable(TableConfig(name="t", segments=parts))
    table.apply_gradients(int64([1]), float32([[0.0, 0.0]]), step=200)
    assert_close(table.lookup(int64([1])), [[np.tanh(np.sqrt(2) * 0.4), np.tanh(0.4)]], rtol=2e-6)
    table.apply_gradients(int64([1]), float32([[0.0, 0.0]]), step=700)
    assert_close(table.lookup(int64([1])), [[np.tanh(np.sqrt(2) * 0.4), np.tanh(np.sqrt(4.5) * 0.4)]], rtol=2e-6)
