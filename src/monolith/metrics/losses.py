"""Metrics of single predictions: log loss, normalized entropy, calibration, squared and absolute errors."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.metrics.metric import Examples, Floats, SumMetric, require_fractions

__all__ = ["Calibration", "CalibrationBucket", "LogLoss", "MAE", "MSE", "NormalizedEntropy", "RMSE"]


class LogLoss(SumMetric):
    """Mean cross entropy of predicted probabilities: -Σ w (y ln p + (1 - y) ln(1 - p)) / Σ w, in nats.

    Predictions are probabilities in [0, 1]. Anything else, such as logits, is refused. They are clipped to
    [epsilon, 1 - epsilon] first, because a float32 sigmoid saturates at exactly 1 and one such error would be infinite.

    Example:
        >>> metric = LogLoss()
        >>> metric.update([0.5, 0.25], [1, 0])
        >>> round(metric.compute(), 6)
        0.490415
    """

    def __init__(self, epsilon: float = 1e-7) -> None:
        if not 0 < epsilon < 0.5:
            raise InvalidArgumentError(f"epsilon: expected a number between 0 and 0.5, got {epsilon}")
        super().__init__((3,))
        self.epsilon = epsilon

    def compute(self) -> float:
        """Return the mean loss of an example."""
        loss, _, weight = self._sums
        return float(loss / weight) if weight else math.nan

    def _terms(self, examples: Examples) -> Floats:
        require_fractions(examples, predictions=True)
        p, y, w = examples.predictions.clip(self.epsilon, 1 - self.epsilon), examples.labels, examples.weights
        return np.array([-(w @ (y * np.log(p) + (1 - y) * np.log1p(-p))), w @ y, w.sum()])

    def _settings(self) -> dict[str, torch.Tensor]:
        return {"epsilon": torch.tensor(self.epsilon, dtype=torch.float64)}


class NormalizedEntropy(LogLoss):
    """Log loss divided by the entropy of the base rate ȳ, the mean label: below 1 is better than predicting ȳ for all.

    Comparable between data sets with different base rates, as log loss is not. NaN while all labels are 0 or all are 1:
    then the base rate alone predicts every label.

    Example:
        >>> metric = NormalizedEntropy()
        >>> metric.update([0.9, 0.1, 0.1, 0.1], [1, 0, 0, 0])
        >>> round(metric.compute(), 4)
        0.1874
    """

    def compute(self) -> float:
        """Return the mean loss in units of the base rate's entropy."""
        _, positive, weight = self._sums
        if not 0 < positive < weight:
            return math.nan
        rate = float(positive / weight)
        return super().compute() / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


_TENTHS = tuple(i / 10 for i in range(1, 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBucket:
    """The examples with low <= prediction < high. The last bucket includes its upper end.

    Example:
        >>> CalibrationBucket(low=0.0, high=0.5, weight=10.0, predicted=0.3, observed=0.25).ratio
        1.2
    """

    low: float
    high: float
    weight: float
    """Sum of the examples' weights, or their number without weights."""
    predicted: float
    """Mean prediction, NaN in an empty bucket."""
    observed: float
    """Mean label, NaN in an empty bucket."""

    @property
    def ratio(self) -> float:
        """predicted / observed. Infinite when nothing predicted was observed, NaN when there is nothing to compare."""
        return _ratio(self.predicted, self.observed)


class Calibration(SumMetric):
    """Predicted over observed positives, Σ w p / Σ w y: 1 is calibrated, above 1 is overconfident.

    Infinite when positives were predicted and none was observed. `buckets()` splits it by prediction at `edges`,
    increasing numbers inside (0, 1). Give edges around the base rate where clicks are rare. A NaN prediction is counted
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
        """Return predicted over observed positives of all examples."""
        predicted, observed, _ = self._sums.sum(axis=1)
        return _ratio(float(predicted), float(observed))

    def buckets(self) -> list[CalibrationBucket]:
        """Return the calibration of each bucket of predictions, from low to high, empty buckets included."""
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


class _MeanDeviation(SumMetric):
    def __init__(self) -> None:
        super().__init__((2,))

    def compute(self) -> float:
        """Return the mean error of an example."""
        error, weight = self._sums
        return float(error / weight) if weight else math.nan

    def _terms(self, examples: Examples) -> Floats:
        error = self._error(examples.predictions - examples.labels)
        return np.array([examples.weights @ error, examples.weights.sum()])

    @staticmethod
    @abstractmethod
    def _error(difference: Floats) -> Floats: ...


class MSE(_MeanDeviation):
    """Mean squared error: Σ w (p - y)² / Σ w.

    Example:
        >>> metric = MSE()
        >>> metric.update([1.0, 2.0], [1.0, 4.0])
        >>> metric.compute()
        2.0
    """

    @staticmethod
    def _error(difference: Floats) -> Floats:
        return np.square(difference)


class RMSE(MSE):
    """Root mean squared error: √(Σ w (p - y)² / Σ w).

    Example:
        >>> metric = RMSE()
        >>> metric.update([1.0, 2.0], [4.0, 5.0])
        >>> metric.compute()
        3.0
    """

    def compute(self) -> float:
        """Return the root of the mean squared error."""
        return math.sqrt(super().compute())


class MAE(_MeanDeviation):
    """Mean absolute error: Σ w |p - y| / Σ w.

    Example:
        >>> metric = MAE()
        >>> metric.update([1.0, 2.0], [4.0, 3.0])
        >>> metric.compute()
        2.0
    """

    @staticmethod
    def _error(difference: Floats) -> Floats:
        return np.abs(difference)
