"""Danger: an id that reads one vector and then trains from another. The initial value must be a pure function of
(seed, table name, id): the same before and after insertion, on every shard, worker and restart, and different
for everything else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparison import INT64_MAX, INT64_MIN, assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import (
    SGD,
    BatchSoftmaxInitializer,
    Constant,
    FixedR8,
    Fp16,
    HeNormal,
    HeUniform,
    OneBit,
    Ones,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    XavierNormal,
    XavierUniform,
    Zeros,
)

IDS = int64([0, -1, 1, 2, 12345678901234, INT64_MIN, INT64_MAX, *range(1000, 1200)])
INITIALIZERS = [
    Zeros(),
    Ones(),
    Constant(value=0.3),
    BatchSoftmaxInitializer(init_step_interval=9),
    RandomUniform(),
    RandomNormal(),
    TruncatedNormal(),
    XavierUniform(),
    XavierNormal(),
    HeUniform(),
    HeNormal(),
]
RANDOM = INITIALIZERS[4:]


def config_of(initializer: Any, *, name: str = "t", seed: int = 0, **segment: Any) -> TableConfig:  # noqa: ANN401
    part = Segment(dim=7, initializer=initializer, optimizer=SGD(learning_rate=1.0), **segment)
    return TableConfig(name=name, seed=seed, segments=(part,))


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda x: x.kind)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("compressor", [Fp16(), FixedR8(range=0.3), OneBit(amplitude=0.2)], ids=lambda x: x.kind)
def test_an_unseen_id_reads_what_it_will_hold(initializer: Any, precision: str, compressor: Any) -> None:  # noqa: ANN401
    table = EmbeddingTable(config_of(initializer, precision=precision, compressor=compressor))
    before = table.lookup(IDS)
    assert len(table) == 0, "a lookup inserted rows"
    table.reinitialize(IDS[::2])
    table.assign_add(IDS[1::2], float32(np.zeros((len(IDS[1::2]), 7))))
    assert len(table) == len(IDS)
    assert_equal(table.lookup(IDS), before)


def test_an_erased_id_reads_its_initial_value_again() -> None:
    table = EmbeddingTable(config_of(RandomUniform()))
    before = table.lookup(IDS)
    table.apply_gradients(IDS, float32(np.ones((len(IDS), 7))))
    table.erase(IDS)
    assert_equal(table.lookup(IDS), before)


def test_a_first_gradient_is_applied_to_the_initial_value() -> None:
    table = EmbeddingTable(config_of(Constant(value=0.25)))
    table.apply_gradients(int64([3]), float32([[1.0] * 7]))
    assert table.lookup(int64([3])).tolist() == [[-0.75] * 7]


@pytest.mark.parametrize("initializer", RANDOM, ids=lambda x: x.kind)
def test_tables_with_equal_configs_agree(initializer: Any, tmp_path: Path) -> None:  # noqa: ANN401
    first, second = EmbeddingTable(config_of(initializer)), EmbeddingTable(config_of(initializer))
    expected = first.lookup(IDS)
    second.reinitialize(IDS)
    assert_equal(second.lookup(IDS), expected)
    first.save(tmp_path / "t")
    assert_equal(EmbeddingTable.load(tmp_path / "t").lookup(IDS), expected)


@pytest.mark.parametrize("initializer", RANDOM, ids=lambda x: x.kind)
def test_another_seed_name_id_or_element_reads_differently(initializer: Any) -> None:  # noqa: ANN401
    base = EmbeddingTable(config_of(initializer)).lookup(IDS).numpy()
    for other in (
        config_of(initializer, seed=1),
        config_of(initializer, seed=2**63),
        config_of(initializer, name="u"),
    ):
        changed = EmbeddingTable(other).lookup(IDS).numpy() != base
        assert changed.any(axis=1).all(), "an id kept its vector"
        assert changed.mean() > 0.99
    flat = np.sort(base.ravel())
    # 207 x 7 draws from 24 bits or more of randomness: a handful of equal ones can happen, a reused stream cannot.
    assert np.count_nonzero(np.diff(flat) == 0) < 5


def test_segments_of_one_row_do_not_repeat_each_other() -> None:
    part = Segment(dim=8, initializer=RandomUniform())
    values = EmbeddingTable(TableConfig(name="t", segments=(part, part))).lookup(IDS).numpy()
    assert not np.any(values[:, :8] == values[:, 8:])


def test_initial_values_do_not_depend_on_how_many_ids_are_asked_for() -> None:
    table = EmbeddingTable(config_of(RandomNormal()))
    together = table.lookup(IDS)
    for position in (0, 1, 100, len(IDS) - 1):
        assert_equal(table.lookup(IDS[position : position + 1]), together[position : position + 1])


def test_initial_values_do_not_depend_on_optimizer_or_compressor() -> None:
    # Otherwise a change of learning method would change the model's starting point.
    plain = EmbeddingTable(config_of(RandomUniform())).lookup(IDS)
    assert_equal(EmbeddingTable(config_of(RandomUniform(), compressor=Fp16())).lookup(IDS), plain)
    part = Segment(dim=7, initializer=RandomUniform())
    assert_equal(EmbeddingTable(TableConfig(name="t", segments=(part,))).lookup(IDS), plain)


def test_unseen_zeros_reads_zeros_but_trains_from_the_initial_value() -> None:
    part = Segment(dim=3, initializer=Constant(value=0.5), optimizer=SGD(learning_rate=1.0))
    table = EmbeddingTable(TableConfig(name="t", segments=(part,), unseen="zeros"))
    assert table.lookup(int64([4])).tolist() == [[0.0] * 3]
    table.apply_gradients(int64([4]), float32([[0.25] * 3]))
    assert table.lookup(int64([4])).tolist() == [[0.25] * 3]
    table.erase(int64([4]))
    assert table.lookup(int64([4])).tolist() == [[0.0] * 3]
