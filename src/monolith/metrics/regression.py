"""Errors of predicted numbers: mean squared, root mean squared, mean absolute."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np

from monolith.metrics.metric import Examples, Floats, SumMetric

__all__ = ["MAE", "MSE", "RMSE"]


class _MeanDeviation(SumMetric):
    def __init__(self) -> None:
        super().__init__((2,))

    def compute(self) -> float:
        """The mean error of an example."""
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
        """The root of the mean squared error."""
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
