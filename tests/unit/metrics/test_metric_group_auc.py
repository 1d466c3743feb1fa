"""Danger: a group AUC that mixes users, weighs them wrongly, or falls apart when there are more users than memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.metrics import GAUC


def expected(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> float:
    """The definition, group by group and pair by pair."""
    total, area = 0.0, 0.0
    order = np.argsort(groups)
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        positive, negative = (rows[labels[rows] == label] for label in (1, 0))
        if len(positive) and len(negative):
            wins = (np.sign(scores[positive][:, None] - scores[negative]) + 1) / 2
            pairs = weights[positive][:, None] * weights[negative]
            total += weights[rows].sum()
            area += weights[rows].sum() * (wins * pairs).sum() / pairs.sum()
    return area / total if total else math.nan


def users(rows: int, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Users with their own click rate and of different activity; items scored with noise."""
    rng = np.random.default_rng(seed)
    groups = (rng.pareto(1.5, rows) * count / 8).astype(np.int64) % count
    quality = rng.normal(size=rows)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-quality - rng.normal(size=count)[groups]))).astype(np.float64)
    return quality + rng.normal(size=rows), labels, rng.gamma(1.0, size=rows), groups * 7919 - 3


def updated(metric: GAUC, columns: tuple[np.ndarray, ...], batch: int = 1000) -> GAUC:
    for start in range(0, len(columns[0]), batch):
        metric.update(*(torch.from_numpy(column[start : start + batch]) for column in columns))
    return metric


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_few_examples_with_ties_are_exact(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 40))
    columns = (
        rng.integers(0, 4, rows).astype(float),
        rng.integers(0, 2, rows).astype(float),
        rng.gamma(1.0, size=rows) + 0.01,
        rng.integers(-count, count, rows),
    )
    assert updated(GAUC(), columns, batch=7).compute() == pytest.approx(expected(*columns), abs=1e-12, nan_ok=True)


def test_a_stream_that_fits_is_exact() -> None:
    columns = users(20_000, 500)
    metric = updated(GAUC(), columns)
    assert metric.compute() == pytest.approx(expected(*columns), abs=1e-12)
    assert metric.sampled_fraction() == 1


def test_more_examples_than_memory_leave_whole_groups_out() -> None:
    scores, labels, weights, groups = users(60_000, 6_000)
    metric = updated(GAUC(capacity=8192), (scores, labels, weights, groups))
    assert 1 / 32 <= metric.sampled_fraction() <= 1 / 4
    kept = metric.state_dict()["group"].numpy()
    assert len(kept) <= 8192
    # Exact over the groups that are left, close to the mean over all.
    rows = np.isin(groups, kept)
    assert metric.compute() == pytest.approx(
        expected(scores[rows], labels[rows], weights[rows], groups[rows]), abs=1e-9
    )
    assert metric.compute() == pytest.approx(expected(scores, labels, weights, groups), abs=0.02)


def test_one_huge_group_does_not_push_the_others_out() -> None:
    scores, labels, weights, groups = users(10_000, 300)
    # Every visitor who is not logged in has the user id 0.
    groups[np.random.default_rng(1).random(len(groups)) < 0.7] = 0
    metric = updated(GAUC(capacity=4096), (scores, labels, weights, groups))
    assert metric.sampled_fraction() == 1
    assert metric.compute() == pytest.approx(expected(scores, labels, weights, groups), abs=1e-3)


def test_workers_merged_equal_one_stream() -> None:
    columns = users(30_000, 3_000)
    whole = updated(GAUC(capacity=4096), columns)
    parts = [updated(GAUC(capacity=4096), tuple(column[i::3] for column in columns)) for i in range(3)]
    parts[0].merge(parts[1])
    parts[0].merge(parts[2])
    assert parts[0].sampled_fraction() == whole.sampled_fraction()
    assert parts[0].compute() == pytest.approx(whole.compute(), abs=1e-9)


def test_a_short_stream_takes_over_the_sampling_of_a_long_one() -> None:
    short, long = updated(GAUC(capacity=4096), users(500, 3_000)), updated(GAUC(capacity=4096), users(30_000, 3_000))
    groups = set(long.state_dict()["group"].tolist())
    short.merge(long)
    assert short.sampled_fraction() == long.sampled_fraction() < 1
    assert len(set(short.state_dict()["group"].tolist()) - groups) <= 500 * short.sampled_fraction() * 1.5


def test_a_saved_metric_continues_where_it_was() -> None:
    columns = users(30_000, 3_000)
    whole = updated(GAUC(capacity=4096), columns)
    half = updated(GAUC(capacity=4096), tuple(column[:15_000] for column in columns))
    resumed = GAUC(capacity=4096)
    resumed.load_state_dict(half.state_dict())
    updated(resumed, tuple(column[15_000:] for column in columns))
    assert resumed.sampled_fraction() == whole.sampled_fraction()
    assert resumed.compute() == pytest.approx(whole.compute(), abs=1e-9)


def test_groups_with_one_class_do_not_count() -> None:
    metric = GAUC()
    metric.update([0.9, 0.1, 0.5, 0.6], [1, 0, 1, 1], groups=[1, 1, 2, 2])
    assert metric.compute() == 1.0
    metric.reset()
    metric.update([0.5, 0.6], [1, 0], groups=[1, 2])
    assert math.isnan(metric.compute())


def test_the_callers_array_may_be_reused() -> None:
    metric, groups = GAUC(), np.array([1, 1])
    metric.update([0.9, 0.1], [1, 0], groups=groups)
    groups[:] = [3, 4]
    assert metric.compute() == 1.0


def test_missing_groups_are_an_error() -> None:
    with pytest.raises(ValueError, match="groups: GAUC needs an int64 group id"):
        GAUC().update([0.5], [1])
