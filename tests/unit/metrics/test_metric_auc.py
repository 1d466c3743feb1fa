"""Danger: an AUC that is a little off once the stream is long, skewed, drifting or spread over workers. Model choices hang
on its fourth digit, so it is held against scikit-learn over all examples, and its own error bound must hold.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from monolith.metrics import AUC

ROWS = 300_000


def stream(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of a noisy click model, labels and weights."""
    rng = np.random.default_rng(seed)
    true = rng.normal(-3, 1.2, rows)
    labels = rng.random(rows) < 1 / (1 + np.exp(-true))
    return true + rng.normal(0, 0.5, rows), labels.astype(np.float64), rng.gamma(0.7, size=rows)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def drifting(logits: np.ndarray) -> np.ndarray:
    """Wide at first, later everything inside a sliver of what was one cell."""
    scale = np.where(np.arange(len(logits)) < len(logits) // 5, 1.0, 1e-4)
    return 0.5 + logits * scale


SHAPES = {
    "probabilities": sigmoid,
    "float32 probabilities": lambda x: sigmoid(x).astype(np.float32),
    "logits of both signs": lambda x: x + 3,
    "narrow": lambda x: 0.5 + 1e-9 * x,
    "rare and tiny": lambda x: np.exp(5 * x),
    "rounded": lambda x: np.round(sigmoid(x), 2),
    "saturated": lambda x: np.where(np.random.default_rng(1).random(len(x)) < 0.3, 1.0, sigmoid(x)),
    "drifting": drifting,
}


def updated(metric: AUC, *columns: np.ndarray, batch: int = 4096) -> AUC:
    for start in range(0, len(columns[0]), batch):
        metric.update(*(torch.from_numpy(column[start : start + batch]) for column in columns))
    return metric


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_few_examples_with_ties_are_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2, 60))
    scores = rng.choice([-math.inf, -1.0, -0.0, 0.0, 0.5, math.inf], rows)
    labels = np.concatenate([[True, False], rng.random(rows - 2) < 0.5])
    weights = rng.gamma(1.0, size=rows) + 0.01
    metric = updated(AUC(), scores, labels, weights, batch=7)
    # scikit-learn takes no infinity; only the order counts.
    expected = roc_auc_score(labels, np.clip(scores, -9, 9), sample_weight=weights)
    assert metric.compute() == pytest.approx(expected, abs=1e-12)
    assert metric.error_bound() == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_long_stream_is_within_its_bound_and_one_in_ten_thousand(shape: str, weighted: bool) -> None:
    logits, labels, weights = stream()
    scores = np.ascontiguousarray(SHAPES[shape](logits))
    columns = (scores, labels, weights) if weighted else (scores, labels)
    metric = updated(AUC(), *columns)
    expected = roc_auc_score(labels, scores, sample_weight=weights if weighted else None)
    error = abs(metric.compute() - expected)
    assert error <= 1e-4
    assert error <= metric.error_bound() + 1e-9
    assert metric.error_bound() <= 2e-4


@pytest.mark.parametrize("order", ["ascending", "descending", "negatives first"])
def test_the_order_of_the_stream_does_not_matter(order: str) -> None:
    logits, labels, _ = stream()
    by = {"ascending": logits, "descending": -logits, "negatives first": labels}[order]
    index = np.argsort(by, kind="stable")
    metric = updated(AUC(), logits[index], labels[index])
    assert abs(metric.compute() - roc_auc_score(labels, logits)) <= 1e-4


def test_memory_is_bounded_and_the_bound_still_holds() -> None:
    logits, labels, _ = stream(50_000)
    metric = AUC(capacity=64)
    expected = roc_auc_score(labels, logits)
    updated(metric, logits, labels, batch=500)
    assert sum(tensor.numel() for tensor in metric.state_dict().values()) <= 4 * 64 + 1
    assert 0 < abs(metric.compute() - expected) <= metric.error_bound()


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_adversarial_scores_stay_within_the_reported_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Scores crowd at a point, at another scale each time: the worst for cells laid out earlier.
    scores = np.concatenate(
        [rng.normal(size=97) * 10.0 ** -rng.integers(0, 15) + rng.integers(-1, 2) for _ in range(20)]
    )
    labels = rng.random(len(scores)) < 0.3
    metric = updated(AUC(capacity=32), scores, labels, batch=31)
    assert abs(metric.compute() - roc_auc_score(labels, scores)) <= metric.error_bound() + 1e-12


def test_scores_that_change_their_scale_again_and_again_do_not_pile_up_uncertainty() -> None:
    logits, labels, _ = stream()
    scales = 10.0 ** -(np.arange(len(logits)) // 6000 % 7)
    metric = updated(AUC(capacity=1024), 0.5 + sigmoid(logits) * scales, labels)
    assert metric.error_bound() <= 5e-3


def test_one_score_that_becomes_frequent_stays_exact_beside_merged_ones() -> None:
    rng = np.random.default_rng(0)
    metric = AUC(capacity=64)
    scores = np.linspace(0, 1, 5000)
    metric.update(scores, rng.random(5000) < scores)
    state = metric.state_dict()
    merged = (state["low"] != state["high"]).nonzero()[:, 0]
    frequent = state["low"][merged[len(merged) // 3]].view(torch.float64).item()
    for _ in range(50):
        metric.update(np.full(1000, frequent), rng.random(1000) < 0.5)
        metric.compute()
    assert metric.error_bound() <= 0.01


def test_workers_merged_equal_one_stream() -> None:
    logits, labels, weights = stream()
    workers = [updated(AUC(), logits[i::3], labels[i::3], weights[i::3]) for i in range(3)]
    before = workers[1].compute()
    workers[0].merge(workers[1])
    workers[0].merge(workers[2])
    assert abs(workers[0].compute() - roc_auc_score(labels, logits, sample_weight=weights)) <= 1e-4
    assert workers[1].compute() == before


def test_a_saved_metric_continues_where_it_was() -> None:
    logits, labels, _ = stream(150_000)
    whole = updated(AUC(capacity=1024), logits, labels)
    half = updated(AUC(capacity=1024), logits[:81920], labels[:81920])
    state = half.state_dict()
    updated(half, logits[:9], labels[:9])
    resumed = AUC(capacity=1024)
    resumed.load_state_dict(state)
    updated(resumed, logits[81920:], labels[81920:])
    # Folding happens at other moments, so the cells differ, within the bounds of both.
    assert abs(resumed.compute() - whole.compute()) <= resumed.error_bound() + whole.error_bound()


def test_fractional_labels_split_an_example() -> None:
    metric, split = AUC(), AUC()
    metric.update([0.2, 0.6, 0.7], [0.25, 1.0, 0.0])
    split.update([0.2, 0.2, 0.6, 0.7], [1, 0, 1, 0], [0.25, 0.75, 1, 1])
    assert metric.compute() == pytest.approx(split.compute())


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_alone_has_no_area(label: int) -> None:
    metric = AUC()
    metric.update([0.1, 0.2], [label, label])
    assert math.isnan(metric.compute())
    assert math.isnan(metric.error_bound())


def test_one_class_alone_can_be_long_before_the_other_comes() -> None:
    metric = AUC(capacity=64)
    scores = np.linspace(0, 1, 1000)
    metric.update(scores, np.zeros(1000))
    metric.update([2.0], [1])
    assert metric.compute() == 1.0


def test_a_capacity_too_small_to_mean_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity: expected at least 16"):
        AUC(capacity=15)
