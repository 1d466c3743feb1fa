"""Danger: a verdict from wrong numbers, from chance, or from answers of another time than those it is compared with."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from monolith.serve.rollout.plan import QualityBounds
from monolith.serve.rollout.quality import QualityTally, WindowedQuality, broken_bound
from rollout_models import clicks


def tally_of(predictions: object, labels: object) -> QualityTally:
    tally = QualityTally()
    tally.add(np.asarray(predictions, dtype=np.float64), np.asarray(labels, dtype=np.float64))
    return tally


def test_numbers_equal_those_of_scikit_learn() -> None:
    p, y = (np.array(values) for values in clicks(5000))
    parts = QualityTally()
    for start in range(0, 5000, 700):
        parts.merge(tally_of(p[start : start + 700], y[start : start + 700]))
    numbers = parts.numbers()
    assert numbers.labels == 5000
    assert numbers.log_loss == pytest.approx(log_loss(y, p), rel=1e-9)
    assert numbers.auc == pytest.approx(roc_auc_score(y, p), rel=1e-9)
    assert numbers.calibration == pytest.approx(p.sum() / y.sum(), rel=1e-9)
    assert numbers.mean_prediction == pytest.approx(p.mean())
    assert numbers.mean_label == pytest.approx(y.mean())


def test_standard_errors_are_those_of_repeated_draws() -> None:
    drawn = [tally_of(*clicks(2000, seed)).numbers() for seed in range(200)]
    for name, error in (("log_loss", "log_loss_se"), ("auc", "auc_se")):
        spread = np.std([getattr(numbers, name) for numbers in drawn])
        assert np.mean([getattr(numbers, error) for numbers in drawn]) == pytest.approx(spread, rel=0.2)
    apart = np.std([numbers.mean_prediction - numbers.mean_label for numbers in drawn])
    assert np.mean([numbers.calibration_margin for numbers in drawn]) == pytest.approx(apart, rel=0.2)


def test_invalid_predictions_are_counted_and_left_out() -> None:
    numbers = tally_of([0.5, math.nan, math.inf, -0.1, 1.1], [1, 1, 1, 1, 1]).numbers()
    assert (numbers.labels, numbers.invalid) == (5, 4)
    assert numbers.log_loss == pytest.approx(math.log(2))


def test_numbers_of_nothing_are_null_in_json() -> None:
    assert QualityTally().numbers().as_json() == {
        **dict.fromkeys(("labels", "invalid"), 0),
        **dict.fromkeys(("mean_prediction", "mean_label", "log_loss", "log_loss_se", "calibration"), None),
        **dict.fromkeys(("calibration_margin", "auc", "auc_se"), None),
    }


def test_a_window_belongs_to_the_time_of_answers_not_of_labels() -> None:
    quality = WindowedQuality(started=1000.0, window_secs=120.0)
    one = np.array([0.5])
    quality.add(one, one, np.array([999.0]), now=1001.0)  # answered before the plan
    assert quality.window(1001.0).labels == 0
    quality.add(one, one, np.array([1000.0]), now=1001.0)
    quality.add(one, one, np.array([1100.0]), now=1110.0)
    assert quality.window(1110.0).labels == 2
    assert quality.window(1125.0).labels == 1
    quality.add(one, one, np.array([1001.0]), now=1150.0)  # its answer has left the window
    assert quality.window(1150.0).labels == 1
    assert quality.window(1300.0).labels == 0
    assert quality.total.labels == 4


BOUNDS = QualityBounds(min_labels=1000)


def test_an_inverted_model_breaks_bounds() -> None:
    p, y = (np.array(values) for values in clicks(1000))
    good = tally_of(*clicks(1000, 1)).numbers()
    assert broken_bound(BOUNDS, tally_of(p, y).numbers(), good) is None
    assert "calibration" in str(broken_bound(BOUNDS, tally_of(1 - p, y).numbers(), good))
    only_log_loss = QualityBounds(max_calibration_error=None, min_auc_difference=None)
    assert "log loss" in str(broken_bound(only_log_loss, tally_of(1 - p, y).numbers(), good))
    only_auc = QualityBounds(max_calibration_error=None, max_log_loss_difference=None)
    assert "AUC" in str(broken_bound(only_auc, tally_of(1 - p, y).numbers(), good))


def test_absolute_bounds_need_nothing_to_compare_with() -> None:
    p, y = (np.array(values) for values in clicks(1000))
    bad, free = tally_of(1 - p, y).numbers(), {"max_calibration_error": None}
    assert broken_bound(QualityBounds(**free), bad, None) is None  # type: ignore[arg-type]
    assert "log loss" in str(broken_bound(QualityBounds(**free, max_log_loss=0.6), bad, None))  # type: ignore[arg-type]
    assert "AUC" in str(broken_bound(QualityBounds(**free, min_auc=0.55), bad, None))  # type: ignore[arg-type]


def test_a_model_that_answers_nan_breaks_a_bound() -> None:
    p, y = (np.array(values) for values in clicks(1000))
    p[:20] = math.nan
    assert "20 of 1000 labelled predictions are NaN" in str(broken_bound(BOUNDS, tally_of(p, y).numbers(), None))


def test_there_is_no_verdict_from_too_few_labels() -> None:
    p, y = (np.array(values) for values in clicks(999))
    good, bad = tally_of(p, y).numbers(), tally_of(1 - p, y).numbers()
    assert broken_bound(BOUNDS, bad, good) is None
    more = tally_of(1 - np.array(clicks(1000)[0]), clicks(1000)[1]).numbers()
    differences = QualityBounds(max_calibration_error=None, min_labels=1000)
    assert broken_bound(differences, more, good) is None, "the stable version has too few"


def test_chance_alone_breaks_no_bound() -> None:
    tight = QualityBounds(max_log_loss_difference=0.001, max_calibration_error=0.01, min_auc_difference=-0.001)
    drawn = [tally_of(*clicks(1000, seed)).numbers() for seed in range(200)]
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    assert [broken for one, other in pairs if (broken := broken_bound(tight, one, other))] == []
    bare = tight.model_copy(update={"confidence": 0.0})
    assert sum(broken_bound(bare, one, other) is not None for one, other in pairs) > 50, "the margin is what protects"


def test_rare_clicks_do_not_look_uncalibrated() -> None:
    numbers = tally_of(np.full(1000, 0.002), np.zeros(1000)).numbers()
    assert numbers.calibration == math.inf
    assert broken_bound(BOUNDS, numbers, None) is None, "no click at 2 expected is chance"
    numbers = tally_of(np.full(1000, 0.05), np.zeros(1000)).numbers()
    assert "calibration inf" in str(broken_bound(BOUNDS, numbers, None)), "no click at 50 expected is not"
