"""Danger: one segment of a row reaching into the next, through an offset, an alignment or a shared scratch buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comparison import assert_close, assert_equal, assert_same_rows, float32, int64, pair
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import (
    SGD,
    Adam,
    BatchSoftmax,
    Constant,
    FixedR8,
    Fp32,
    GroupAdagrad,
    Momentum,
    MovingAverage,
    OneBit,
    RandomUniform,
    RowwiseAdagrad,
    Zeros,
)
from monolith.testing import every_optimizer

OPTIMIZERS = {name: optimizer for name, optimizer in every_optimizer().items() if name != "delay_compensation"}

segments = st.builds(
    lambda name, dim, precision, compressor: Segment(
        dim=1 if name == "batch_softmax" else dim,
        optimizer=OPTIMIZERS[name],
        initializer=RandomUniform(low=-1.0, high=1.0),
        precision=precision,
        stochastic_rounding=False,
        compressor=compressor,
    ),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dim=st.sampled_from([1, 2, 3, 5, 8, 11]),
    precision=st.sampled_from(["fp32", "fp32", "fp16", "bf16"]),
    compressor=st.sampled_from([Fp32(), FixedR8(range=4.0), OneBit(step_size=2, amplitude=0.5)]),
)

# Half an interval of the stored format: a result a hair off may round to the neighbouring number.
ULP = {"fp32": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-7}


@settings(max_examples=80)
@given(parts=st.lists(segments, min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_any_mix_of_segments_matches_the_oracle(parts: list[Segment], seed: int) -> None:
    table, oracle = pair(TableConfig(name="t", segments=tuple(parts)))
    rng = np.random.default_rng(seed)
    known = [0, 1, 2, -1]
    for step in range(3):
        ids = rng.choice(np.array(known), 5)
        grads = rng.uniform(-1, 1, (5, oracle.config.dim)).astype(np.float32)
        options: dict[str, Any] = {
            "learning_rates": rng.uniform(0.05, 0.2, len(parts)).tolist(),
            "step": step,
            "event_time": step,
        }
        table.apply_gradients(torch.from_numpy(ids), torch.from_numpy(grads), **options)
        oracle.apply_gradients(ids, grads, **options)
        rtol = max([1e-5, *(ULP[part.precision] for part in parts)])
        assert_same_rows(table, oracle, known, rtol=rtol, atol=1e-5)
        _assert_each_precision(table, oracle.lookup_entry(known).values, parts)
        oracle.adopt(table.lookup_entry(int64(known)))


def _assert_each_precision(table: EmbeddingTable, expected: np.ndarray, parts: list[Segment]) -> None:
    """The bound above is that of the coarsest segment; hold each segment to its own."""
    values, begin = table.lookup_entry(int64([0, 1, 2, -1])).values.numpy(), 0
    for part in parts:
        columns = slice(begin, begin + part.dim)
        assert_close(values[:, columns], expected[:, columns], rtol=max(1e-5, ULP[part.precision]), atol=1e-5)
        begin += part.dim


def test_each_segment_keeps_to_itself() -> None:
    parts = (
        Segment(dim=3, initializer=Constant(value=1.0), optimizer=SGD(learning_rate=1.0), precision="fp16"),
        Segment(dim=1, initializer=Constant(value=2.0), optimizer=BatchSoftmax(learning_rate=0.5)),
        Segment(dim=2, initializer=Constant(value=3.0), optimizer=MovingAverage(momentum=0.5), precision="bf16"),
        Segment(dim=5, initializer=Constant(value=4.0), optimizer=Momentum(learning_rate=1.0, momentum=0.5)),
    )
    table = EmbeddingTable(TableConfig(name="t", segments=parts))
    start = [1.0] * 3 + [2.0] + [3.0] * 2 + [4.0] * 5
    assert table.lookup(int64([9])).tolist() == [start]
    table.apply_gradients(int64([9]), float32([np.arange(11)]), step=4)
    expected = [1.0, 0.0, -1.0, 3.0, 3.5, 4.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert table.lookup(int64([9])).tolist() == [expected]
    slots = table.lookup_entry(int64([9])).slots
    assert sorted(slots) == ["1/global_step", "3/n"]
    assert slots["1/global_step"].tolist() == [[4]]
    assert slots["3/n"].tolist() == [[-6.0, -7.0, -8.0, -9.0, -10.0]]


def test_group_optimizers_see_only_their_segment() -> None:
    # The original merged slices, which changed the group a norm is taken over.
    group = Segment(dim=2, initializer=Zeros(), optimizer=GroupAdagrad())
    row = Segment(dim=2, initializer=Zeros(), optimizer=RowwiseAdagrad())
    table = EmbeddingTable(TableConfig(name="t", segments=(group, group, row, row)))
    table.apply_gradients(int64([1]), float32([[1.0, 2.0, 3.0, 4.0, 1.0, 7.0, 3.0, 9.0]]))
    slots = table.lookup_entry(int64([1])).slots
    assert_close(slots["0/grad_square_sum"], [[4.1]], rtol=1e-6)
    assert_close(slots["1/grad_square_sum"], [[16.1]], rtol=1e-6)
    assert slots["2/norm"].tolist() == [[25.0]]
    assert slots["3/norm"].tolist() == [[45.0]]


def test_splitting_an_elementwise_segment_changes_nothing() -> None:
    def run(dims: tuple[int, ...]) -> np.ndarray:
        parts = tuple(Segment(dim=d, initializer=Zeros(), optimizer=Adam(learning_rate=0.1)) for d in dims)
        table = EmbeddingTable(TableConfig(name="t", segments=parts))
        rng = np.random.default_rng(1)
        for _ in range(3):
            table.apply_gradients(int64(range(10)), float32(rng.normal(size=(10, 12))))
        return table.lookup(int64(range(10))).numpy()

    # The same lanes may be fused differently at another width: a few units in the last place.
    assert_close(run((5, 7)), run((12,)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [1, 2, 63, 64])
def test_up_to_64_segments(count: int) -> None:
    parts = tuple(
        Segment(dim=1, initializer=Constant(value=float(i)), optimizer=SGD(learning_rate=1.0)) for i in range(count)
    )
    table = EmbeddingTable(TableConfig(name="t", segments=parts))
    assert table.lookup(int64([1])).tolist() == [list(map(float, range(count)))]
    table.apply_gradients(int64([1]), torch.ones(1, count), learning_rates=list(map(float, range(count))))
    assert_equal(table.lookup(int64([1])), np.zeros((1, count)))
