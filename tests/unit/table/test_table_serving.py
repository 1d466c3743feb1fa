"""Danger: a serving table that answers differently from the model it was made from, or that can be trained by
accident.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comparison import assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import InvalidArgumentError
from monolith.table import Bf16, FixedR8, Fp16, Fp32, OneBit
from oracle import fixed_r8, to_bf16, to_fp16

COMPRESSORS: list[Any] = [Fp32(), Fp16(), Bf16(), FixedR8(range=2.0), OneBit(amplitude=0.25)]
WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2, "fixed_r8": 1, "one_bit": 1}


def table_of(*compressors: Any, dim: int = 6, **config: Any) -> EmbeddingTable:  # noqa: ANN401 - config objects
    parts = tuple(Segment(dim=dim, compressor=compressor) for compressor in compressors)
    return EmbeddingTable(TableConfig(name="t", segments=parts, mode="serving", **config))


def compressed(values: np.ndarray, compressor: Any) -> np.ndarray:  # noqa: ANN401 - any compressor
    match compressor.kind:
        case "fp16":
            return to_fp16(values)
        case "bf16":
            return to_bf16(values)
        case "fixed_r8":
            return fixed_r8(values, compressor.range)
        case "one_bit":
            return np.where(values > 0, np.float32(compressor.amplitude), -np.float32(compressor.amplitude))
    return values


def samples() -> np.ndarray:
    values = np.random.default_rng(1).normal(size=(500, 6)).astype(np.float32)
    values[0] = [0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0]
    return values


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda x: x.kind)
def test_values_are_stored_compressed(compressor: Any) -> None:  # noqa: ANN401
    table, values = table_of(compressor), samples()
    table.assign(torch.arange(500), torch.from_numpy(values))
    assert_equal(table.lookup(torch.arange(500)), compressed(values, compressor))
    assert_equal(table.lookup_entry(torch.arange(500)).values, compressed(values, compressor))
    # Rounded up to whole words, without optimizer state.
    assert table.stats().row_bytes == -(-6 * WIDTH[compressor.kind] // 4) * 4


def test_segments_of_different_compressors() -> None:
    table = table_of(*COMPRESSORS)
    values = np.tile(samples(), (1, 5))
    table.assign(torch.arange(500), torch.from_numpy(values))
    read = table.lookup(torch.arange(500)).numpy()
    for index, compressor in enumerate(COMPRESSORS):
        columns = slice(6 * index, 6 * index + 6)
        assert_equal(read[:, columns], compressed(values[:, columns], compressor), compressor.kind)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda x: x.kind)
def test_unseen_ids_read_zeros(compressor: Any) -> None:  # noqa: ANN401
    # Not even -amplitude, which is how one_bit would store a zero.
    table = table_of(compressor)
    assert_equal(table.lookup(int64([1, 2])), np.zeros((2, 6)))
    assert_equal(table.lookup_pooled(int64([1, 2]), int64([0, 2])), np.zeros((1, 6)))


def test_unseen_ids_may_read_the_initializer_instead() -> None:
    training = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=6),)))
    table = table_of(Fp32(), unseen="initializer")
    assert_equal(table.lookup(int64([1, 2])), training.lookup(int64([1, 2])))


def test_gradients_are_refused() -> None:
    table = table_of(Fp32())
    table.assign(int64([1]), torch.ones(1, 6))
    with pytest.raises(InvalidArgumentError, match="serving"):
        table.apply_gradients(int64([1]), torch.ones(1, 6))
    with pytest.raises(InvalidArgumentError, match="serving"):
        table.apply_pooled_gradients(int64([1]), int64([0, 1]), torch.ones(1, 6))
    assert_equal(table.lookup(int64([1])), np.ones((1, 6)))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda x: x.kind)
def test_assign_add_decodes_adds_and_encodes(compressor: Any) -> None:  # noqa: ANN401
    table, values = table_of(compressor), samples()[1:]
    table.assign(torch.arange(499), torch.from_numpy(values))
    table.assign_add(torch.arange(499), torch.from_numpy(values / 4))
    expected = compressed(compressed(values, compressor) + values / 4, compressor)
    assert_equal(table.lookup(torch.arange(499)), expected)


def test_a_serving_row_has_a_time_and_no_slots() -> None:
    table = table_of(Fp16())
    table.assign(int64([1]), torch.ones(1, 6), event_time=42)
    entries = table.lookup_entry(int64([1]))
    assert entries.slots == {}
    assert entries.times.tolist() == [42]


def test_times_survive_save_and_load_so_eviction_works(tmp_path: Path) -> None:
    # The original lost them, and would have evicted everything.
    table = table_of(Fp16())
    table.assign(int64([1]), torch.ones(1, 6), event_time=42)
    table.save(tmp_path / "t")
    loaded = EmbeddingTable.load(tmp_path / "t")
    assert loaded.config.mode == "serving"
    assert loaded.lookup_entry(int64([1])).times.tolist() == [42]
    assert loaded.evict() == 0


class TestSkipZeroRows:
    def test_assigning_zeros_erases(self) -> None:
        table = table_of(Fp32(), skip_zero_rows=True)
        table.assign(int64([1, 2]), torch.ones(2, 6))
        table.assign(int64([1, 3]), torch.zeros(2, 6))
        assert table.contains(int64([1, 2, 3])).tolist() == [False, True, False]
        assert len(table) == 1
        table.assign(int64([2]), torch.full((1, 6), -0.0))
        assert len(table) == 0

    def test_one_element_keeps_the_row(self) -> None:
        table = table_of(Fp32(), skip_zero_rows=True)
        for column in range(6):
            value = np.zeros((1, 6), np.float32)
            value[0, column] = 1e-6
            table.assign(int64([column]), torch.from_numpy(value))
            assert column in table

    def test_nan_is_not_zero(self) -> None:
        table = table_of(Fp32(), skip_zero_rows=True)
        table.assign(int64([1]), torch.full((1, 6), float("nan")))
        assert 1 in table

    def test_the_last_of_equal_ids_decides(self) -> None:
        table = table_of(Fp32(), skip_zero_rows=True)
        table.assign(int64([1, 1, 2, 2]), float32([[0.0] * 6, [1.0] * 6, [1.0] * 6, [0.0] * 6]))
        assert table.contains(int64([1, 2])).tolist() == [True, False]

    def test_without_it_zeros_are_stored(self) -> None:
        table = table_of(Fp32())
        table.assign(int64([1]), torch.zeros(1, 6))
        assert 1 in table
