"""Errors of predicted numbers: mean squared, root mean squared, mean absolute."""

from __future__ import annotations

import math

import numpy as np

from monolith.metrics.metric import Examples, Floats, SumMetric

__all__ = ["MAE", "MSE", "RMSE"]


class MSE(SumMetric):
    """Mean squared error: Σ w (p - y)² / Σ w.

    Example:
        >>> metric = MSE()
        >>> metric.update([1.0, 2.0], [1.0, 4.0])
        >>> metric.compute()
        2.0
    """

    def __init__(self) -> None:
        super().__init__((2,))

    def compute(self) -> float:
        """The mean squared error."""
        error, weight = self._sums
        return float(error / weight) if weight else math.nan

    def _terms(self, examples: Examples) -> Floats:
        error = examples.predictions - examples.labels
        return np.array([examples.weights @ (error * error), examples.weights.sum()])


class RMSE(MSE):
    """Root mean squared error: √(Σ w (p - y)² / Σ w).

    Example:
        >>> metric = RMSE()
        >>> metric.update([1.0, 2.0], [4.0, 5.0])
        >>> metric.compute()
        3.0
    """

    def compute(self) -> float:
        """The root of the mean squared error."""
        return math.sqrt(super().compute())


class MAE(MSE):
    """Mean absolute error: Σ w |p - y| / Σ w.

    Example:
        >>> metric = MAE()
        >>> metric.update([1.0, 2.0], [4.0, 3.0])
        >>> metric.compute()
        2.0
    """

    def compute(self) -> float:
        """The mean absolute error."""
        return super().compute()

    def _terms(self, examples: Examples) -> Floats:
        return np.array([examples.weights @ np.abs(examples.predictions - examples.labels), examples.weights.sum()])
