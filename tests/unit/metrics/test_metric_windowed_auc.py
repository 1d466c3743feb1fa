"""Danger: a progress display that shows the model of an hour ago, or of the wrong examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from monolith.metrics import WindowedAUC


@given(st.integers(1, 30), st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_only_the_last_examples_count(window: int, batches: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    metric = WindowedAUC(window)
    scores, labels = rng.integers(0, 5, sum(batches)).astype(float), rng.integers(0, 2, sum(batches))
    for start, size in zip(np.cumsum([0, *batches]), batches, strict=False):
        metric.update(scores[start : start + size], labels[start : start + size])
    recent = labels[-window:]
    if 0 < recent.sum() < len(recent):
        assert metric.compute() == pytest.approx(roc_auc_score(recent, scores[-window:]))
    else:
        assert math.isnan(metric.compute())


def test_nan_leaves_with_its_example() -> None:
    metric = WindowedAUC(window=2)
    metric.update([math.nan], [1])
    assert math.isnan(metric.compute())
    metric.update([0.2, 0.1], [1, 0])
    assert metric.compute() == 1.0


def test_merging_appends_and_saving_keeps_the_order() -> None:
    older, newer = WindowedAUC(window=3), WindowedAUC(window=3)
    older.update([0.1, 0.9], [1, 0])
    newer.update([0.3, 0.2], [1, 0])
    older.merge(newer)
    assert older.state_dict()["examples"][0].tolist() == [0.9, 0.3, 0.2]
    resumed = WindowedAUC(window=2)
    resumed.load_state_dict(older.state_dict())
    assert resumed.compute() == 1.0


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window: expected at least 1"):
        WindowedAUC(0)
