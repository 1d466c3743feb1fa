"""Danger: bad predictions, labels or weights that change a metric silently, or stop a job that could have said NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.metrics import AUC, GAUC, MAE, MSE, RMSE, Calibration, LogLoss, Metric, NormalizedEntropy, WindowedAUC

ALL: list[type[Metric]] = [AUC, GAUC, MAE, MSE, RMSE, Calibration, LogLoss, NormalizedEntropy, WindowedAUC]
CLASSIFICATION = [kind for kind in ALL if kind not in (MAE, MSE, RMSE)]
PROBABILITIES = [Calibration, LogLoss, NormalizedEntropy]

GOOD: dict[str, Any] = {
    "predictions": [0.2, 0.7, 0.6, 0.9],
    "labels": [0.0, 1.0, 0.0, 1.0],
    "weights": [1.0, 2.0, 1.0, 1.0],
    "groups": [5, 5, 5, 5],
}


def good(kind: type[Metric]) -> Metric:
    metric = kind()
    metric.update(**GOOD)
    return metric


@pytest.mark.parametrize("kind", ALL)
def test_without_examples_there_is_no_number(kind: type[Metric]) -> None:
    metric = kind()
    assert math.isnan(metric.compute())
    metric.update([], [], groups=[])
    assert math.isnan(metric.compute())
    copy = kind()
    copy.load_state_dict(metric.state_dict())
    copy.merge(metric)
    assert math.isnan(copy.compute())


@pytest.mark.parametrize("kind", ALL)
def test_reset_forgets_everything(kind: type[Metric]) -> None:
    metric = good(kind)
    metric.update([math.nan], [1], groups=[1])
    metric.reset()
    assert math.isnan(metric.compute())
    metric.update(**GOOD)
    assert metric.compute() == good(kind).compute()


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not WindowedAUC])
def test_a_nan_prediction_is_never_hidden(kind: type[Metric]) -> None:
    metric = good(kind)
    metric.update([math.nan], [1], groups=[1])
    metric.update(**GOOD)
    assert math.isnan(metric.compute())
    for spoiled in (good(kind), kind()):
        spoiled.merge(metric)
        assert math.isnan(spoiled.compute())
    resumed = kind()
    resumed.load_state_dict(metric.state_dict())
    assert math.isnan(resumed.compute())


@pytest.mark.parametrize("kind", ALL)
def test_weight_zero_masks_whatever_stands_there(kind: type[Metric]) -> None:
    metric = kind()
    metric.update(
        [*GOOD["predictions"], math.nan, 7.0],
        [*GOOD["labels"], math.nan, -1.0],
        [*GOOD["weights"], 0, 0],
        [*GOOD["groups"], 5, 5],
    )
    assert metric.compute() == good(kind).compute()


CONTAINERS: list[Callable[[list[float]], Any]] = [
    np.array,
    lambda values: np.array(values, dtype=np.float32),
    torch.tensor,
    lambda values: torch.tensor(values, requires_grad=True),
    lambda values: torch.tensor(values)[:, None],
    lambda values: torch.tensor(values, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", ALL)
def test_any_container_and_precision(kind: type[Metric], container: Callable[[list[float]], Any]) -> None:
    metric = kind()
    metric.update(
        container(GOOD["predictions"]),
        torch.tensor(GOOD["labels"]).bool(),
        container(GOOD["weights"]),
        torch.tensor(GOOD["groups"])[:, None],
    )
    assert metric.compute() == pytest.approx(good(kind).compute(), rel=1e-2)


BAD = [
    ({"predictions": [[0.1, 0.2], [0.3, 0.4]]}, r"predictions: expected shape \[n\] or \[n, 1\], got \[2, 2\]"),
    ({"predictions": ["a", "b", "c", "d"]}, "predictions: expected numbers"),
    ({"labels": [1.0]}, "labels: expected 4 numbers as in predictions, got 1"),
    ({"labels": [math.nan, 0.0, 0.0, 1.0]}, "labels: expected finite numbers"),
    ({"weights": [1.0]}, "weights: expected 4 numbers"),
    ({"weights": [-1.0, 1.0, 1.0, 1.0]}, "weights: expected finite numbers >= 0"),
    ({"weights": [math.inf, 1.0, 1.0, 1.0]}, "weights: expected finite numbers >= 0"),
    ({"weights": [math.nan, 1.0, 1.0, 1.0]}, "weights: expected finite numbers >= 0"),
    ({"groups": [1]}, "groups: expected 4 ids"),
    ({"groups": [1.5, 2.0, 3.0, 4.0]}, "groups: expected int64"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
@pytest.mark.parametrize("kind", ALL)
def test_bad_columns_are_refused_and_change_nothing(kind: type[Metric], change: dict[str, Any], message: str) -> None:
    metric = good(kind)
    with pytest.raises(InvalidArgumentError, match=message):
        metric.update(**(GOOD | change))
    assert metric.compute() == good(kind).compute()


@pytest.mark.parametrize("kind", CLASSIFICATION)
def test_labels_of_a_classifier_are_fractions(kind: type[Metric]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"labels: expected numbers in \[0, 1\], got -1"):
        kind().update([0.5], [-1], groups=[1])


@pytest.mark.parametrize("prediction", [1.5, -0.1, math.inf, -math.inf])
@pytest.mark.parametrize("kind", PROBABILITIES)
def test_logits_are_not_taken_for_probabilities(kind: type[Metric], prediction: float) -> None:
    with pytest.raises(InvalidArgumentError, match="pass probabilities"):
        kind().update([prediction], [1])


@pytest.mark.parametrize("kind", ALL)
def test_a_state_of_another_shape_is_refused(kind: type[Metric]) -> None:
    metric = good(kind)
    for broken in ({}, {**metric.state_dict(), "surplus": torch.zeros(1)}):
        with pytest.raises(InvalidArgumentError, match="expected keys"):
            metric.load_state_dict(broken)
    key = next(iter(metric.state_dict()))
    with pytest.raises(InvalidArgumentError, match="expected"):
        metric.load_state_dict({**metric.state_dict(), key: torch.zeros(9, 9)})
    assert metric.compute() == good(kind).compute()


def test_only_the_same_metric_with_the_same_settings_merges() -> None:
    with pytest.raises(InvalidArgumentError, match="other: expected MSE, got MAE"):
        MSE().merge(MAE())
    with pytest.raises(InvalidArgumentError, match="same settings"):
        LogLoss().merge(LogLoss(epsilon=1e-6))
    with pytest.raises(InvalidArgumentError, match="same settings"):
        Calibration().merge(Calibration([0.5]))
    with pytest.raises(InvalidArgumentError, match="same settings"):
        Calibration().load_state_dict(Calibration([0.5]).state_dict())
