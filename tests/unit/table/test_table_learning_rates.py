"""Danger: a segment trained with its neighbour's learning rate, or a schedule that has no effect."""

from __future__ import annotations

import numpy as np

from comparison import assert_close, assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import SGD, Adagrad, DelayCompensation, MovingAverage, Zeros
from monolith.testing import every_optimizer


def three_segments() -> EmbeddingTable:
    parts = tuple(
        Segment(dim=dim, initializer=Zeros(), optimizer=SGD(learning_rate=rate))
        for dim, rate in ((1, 0.5), (2, 0.25), (1, 2.0))
    )
    return EmbeddingTable(TableConfig(name="t", segments=parts))


def test_each_segment_uses_its_own_default() -> None:
    table = three_segments()
    table.apply_gradients(int64([1]), float32([[-1.0] * 4]))
    assert table.lookup(int64([1])).tolist() == [[0.5, 0.25, 0.25, 2.0]]


def test_rates_of_the_call_replace_the_defaults_in_order() -> None:
    table = three_segments()
    table.apply_gradients(int64([1]), float32([[-1.0] * 4]), learning_rates=[1.0, 2.0, 4.0])
    assert table.lookup(int64([1])).tolist() == [[1.0, 2.0, 2.0, 4.0]]
    table.apply_pooled_gradients(int64([1]), int64([0, 1]), float32([[-1.0] * 4]), learning_rates=[0.125, 0.25, 0.5])
    assert table.lookup(int64([1])).tolist() == [[1.125, 2.25, 2.25, 4.5]]


def test_the_rate_of_one_call_does_not_outlive_it() -> None:
    table = three_segments()
    table.apply_gradients(int64([1]), float32([[-1.0] * 4]), learning_rates=[0.0, 0.0, 0.0])
    assert table.lookup(int64([1])).tolist() == [[0.0] * 4]
    table.apply_gradients(int64([1]), float32([[-1.0] * 4]))
    assert table.lookup(int64([1])).tolist() == [[0.5, 0.25, 0.25, 2.0]]


def test_every_optimizer_with_a_rate_obeys_the_call() -> None:
    for name, optimizer in every_optimizer().items():
        if isinstance(optimizer, MovingAverage):
            continue
        rows = []
        for rate in (0.25, 0.5):
            config = TableConfig(name="t", segments=(Segment(dim=1, initializer=Zeros(), optimizer=optimizer),))
            table = EmbeddingTable(config)
            table.apply_gradients(
                int64([1]), float32([[1.0]]), learning_rates=[rate], step=1, snapshot=float32([[0.0]])
            )
            rows.append(table.lookup(int64([1])).item())
        assert rows[0] != rows[1], name
        assert abs(rows[0]) < abs(rows[1]), name


def test_moving_average_ignores_the_rate() -> None:
    segment = Segment(dim=1, initializer=Zeros(), optimizer=MovingAverage(momentum=0.75))
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    table.apply_gradients(int64([1]), float32([[4.0]]), learning_rates=[123.0])
    assert table.lookup(int64([1])).tolist() == [[1.0]]


def test_delay_compensation_uses_the_default_of_its_base() -> None:
    base = Adagrad(learning_rate=0.5)
    segment = Segment(dim=1, initializer=Zeros(), optimizer=DelayCompensation(base=base, lambda_=0.0))
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    table.apply_gradients(int64([1]), float32([[1.0]]), snapshot=float32([[0.0]]))
    assert_close(table.lookup(int64([1])), [[-0.5 / np.sqrt(1.1)]], rtol=1e-6)


def test_a_schedule_may_come_as_tuple_or_list() -> None:
    first, second = three_segments(), three_segments()
    first.apply_gradients(int64([1]), float32([[-1.0] * 4]), learning_rates=(1.0, 2.0, 4.0))
    second.apply_gradients(int64([1]), float32([[-1.0] * 4]), learning_rates=[1.0, 2.0, 4.0])
    assert_equal(first.lookup(int64([1])), second.lookup(int64([1])))
