"""Danger: a loss, calibration or error that forgets weights, clips too much, or adds up wrongly over workers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, mean_absolute_error, mean_squared_error

from monolith.metrics import MAE, MSE, RMSE, Calibration, LogLoss, Metric, NormalizedEntropy


def examples(seed: int, rows: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows).astype(float)
    labels[:2] = 0, 1
    return rng.uniform(1e-6, 1 - 1e-6, rows), labels, rng.gamma(0.5, size=rows) + 1e-3


def entropy(labels: np.ndarray, weights: np.ndarray) -> float:
    rate = np.average(labels, weights=weights)
    return float(-rate * np.log(rate) - (1 - rate) * np.log(1 - rate))


ORACLES = {
    LogLoss: lambda p, y, w: log_loss(y, p, sample_weight=w),
    NormalizedEntropy: lambda p, y, w: log_loss(y, p, sample_weight=w) / entropy(y, w),
    Calibration: lambda p, y, w: np.average(p, weights=w) / np.average(y, weights=w),
    MSE: lambda p, y, w: mean_squared_error(y, p, sample_weight=w),
    RMSE: lambda p, y, w: mean_squared_error(y, p, sample_weight=w) ** 0.5,
    MAE: lambda p, y, w: mean_absolute_error(y, p, sample_weight=w),
}


@pytest.mark.parametrize("kind", ORACLES)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(1, 300))
def test_streamed_saved_and_merged_it_equals_the_formula_over_all(kind: type[Metric], seed: int, batch: int) -> None:
    p, y, w = examples(seed)
    workers = [kind(), kind()]
    for number, start in enumerate(range(0, len(p), batch)):
        rows = slice(start, start + batch)
        workers[number % 2].update(p[rows], y[rows], w[rows])
    resumed = kind()
    resumed.load_state_dict(workers[0].state_dict())
    resumed.merge(workers[1])
    assert resumed.compute() == pytest.approx(ORACLES[kind](p, y, w), rel=1e-9)


def test_a_saturated_sigmoid_costs_much_but_not_everything() -> None:
    metric = LogLoss()
    metric.update([1.0, 0.0], [0, 1])
    assert metric.compute() == pytest.approx(-math.log(1e-7))
    finer = LogLoss(epsilon=1e-12)
    finer.update([0.0], [1])
    assert finer.compute() == pytest.approx(-math.log(1e-12))


def test_predicting_the_base_rate_has_a_normalized_entropy_of_one() -> None:
    metric = NormalizedEntropy()
    metric.update([0.25] * 4, [1, 0, 0, 0])
    assert metric.compute() == pytest.approx(1)


@pytest.mark.parametrize("label", [0, 1])
def test_without_entropy_nothing_can_be_normalized(label: int) -> None:
    metric = NormalizedEntropy()
    metric.update([0.25] * 4, [label] * 4)
    assert math.isnan(metric.compute())


def test_calibration_by_bucket() -> None:
    metric = Calibration(edges=[0.01, 0.5])
    metric.update([0.005, 0.01, 0.2, 1.0, 0.5], [0, 1, 0, 1, 0], [1, 1, 2, 1, 1])
    low, middle, high = metric.buckets()
    assert (low.low, low.high, low.weight, low.predicted, low.observed) == (0, 0.01, 1, 0.005, 0)
    assert low.ratio == math.inf
    assert (middle.low, middle.high, middle.weight) == (0.01, 0.5, 3)
    assert middle.predicted == pytest.approx(0.41 / 3)
    assert middle.ratio == pytest.approx(0.41)
    assert (high.weight, high.predicted, high.observed, high.ratio) == (2, 0.75, 0.5, 1.5)


def test_an_empty_bucket_has_nothing_to_compare() -> None:
    first, second = Calibration(edges=[0.5]).buckets()
    assert first.weight == second.weight == 0
    assert math.isnan(first.ratio)


def test_calibration_without_positives() -> None:
    metric = Calibration()
    metric.update([0.1], [0])
    assert metric.compute() == math.inf
    metric.reset()
    metric.update([0.0], [0])
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("edges", [[0.5, 0.2], [0.0, 0.5], [1.0], [0.5, 0.5], [math.nan]])
def test_edges_must_increase_inside_the_unit_interval(edges: list[float]) -> None:
    with pytest.raises(ValueError, match="edges: expected increasing numbers"):
        Calibration(edges)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, -1.0, math.nan])
def test_epsilon_must_leave_room(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        LogLoss(epsilon)


def test_regression_takes_any_number_and_infinite_errors() -> None:
    metric = MSE()
    metric.update([-3.0, 100.0], [2.0, 100.0])
    assert metric.compute() == 12.5
    metric.update([math.inf], [0.0])
    assert metric.compute() == math.inf
