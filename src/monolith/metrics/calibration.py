"""Whether predicted probabilities happen as often as they say, overall and by bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.metrics.metric import Examples, Floats, SumMetric, require_fractions

__all__ = ["Calibration", "CalibrationBucket"]

_TENTHS = tuple(i / 10 for i in range(1, 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBucket:
    """The examples with low <= prediction < high; the last bucket includes its upper end.

    Example:
        >>> CalibrationBucket(low=0.0, high=0.5, weight=10.0, predicted=0.3, observed=0.25).ratio
        1.2
    """

    low: float
    high: float
    weight: float
    """Sum of the examples' weights; without weights, their number."""
    predicted: float
    """Mean prediction, NaN in an empty bucket."""
    observed: float
    """Mean label, NaN in an empty bucket."""

    @property
    def ratio(self) -> float:
        """predicted / observed; infinite when nothing predicted was observed, NaN when there is nothing to compare."""
        return _ratio(self.predicted, self.observed)


class Calibration(SumMetric):
    """Predicted over observed positives, Σ w p / Σ w y: 1 is right, above 1 promises too much.

    Infinite when positives were predicted and none was observed. `buckets()` splits it by prediction at `edges`,
    increasing numbers inside (0, 1); give edges around the base rate where clicks are rare. A NaN prediction is counted
    in the last bucket.

    Example:
        >>> metric = Calibration(edges=[0.5])
        >>> metric.update([0.2, 0.4, 0.9], [0, 1, 1])
        >>> metric.compute()
        0.75
        >>> [round(bucket.ratio, 2) for bucket in metric.buckets()]
        [0.6, 0.9]
    """

    def __init__(self, edges: Sequence[float] = _TENTHS) -> None:
        ends = np.array([0.0, *edges, 1.0])
        if not (np.diff(ends) > 0).all():
            raise InvalidArgumentError(f"edges: expected increasing numbers inside (0, 1), got {list(edges)}")
        super().__init__((3, len(ends) - 1))
        self._ends = ends

    def compute(self) -> float:
        """Predicted over observed positives of all examples."""
        predicted, observed, _ = self._sums.sum(axis=1)
        return _ratio(float(predicted), float(observed))

    def buckets(self) -> list[CalibrationBucket]:
        """The same by bucket of prediction, from low to high, empty buckets included."""
        return [
            CalibrationBucket(
                low=float(low),
                high=float(high),
                weight=float(weight),
                predicted=float(predicted / weight) if weight else math.nan,
                observed=float(observed / weight) if weight else math.nan,
            )
            for low, high, (predicted, observed, weight) in zip(
                self._ends[:-1], self._ends[1:], self._sums.T, strict=True
            )
        ]

    def _terms(self, examples: Examples) -> Floats:
        require_fractions(examples, predictions=True)
        p, y, w = examples.predictions, examples.labels, examples.weights
        bucket = np.searchsorted(self._ends[1:-1], p, side="right")
        count = len(self._ends) - 1
        return np.stack([np.bincount(bucket, terms, minlength=count) for terms in (w * p, w * y, w)])

    def _settings(self) -> dict[str, torch.Tensor]:
        return {"ends": torch.from_numpy(self._ends)}


def _ratio(predicted: float, observed: float) -> float:
    if observed:
        return predicted / observed
    return math.inf if predicted > 0 else math.nan
