"""How surprised a model is by the labels: log loss, and log loss relative to knowing only the base rate."""

from __future__ import annotations

import math

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.metrics.metric import Examples, Floats, SumMetric, require_fractions

__all__ = ["LogLoss", "NormalizedEntropy"]


class LogLoss(SumMetric):
    """Mean cross entropy of predicted probabilities: -Σ w (y ln p + (1 - y) ln(1 - p)) / Σ w, in nats.

    Predictions are probabilities in [0, 1]; anything else, logits for one, is refused. They are moved into
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
        """The mean loss of an example."""
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
    then the base rate already says everything.

    Example:
        >>> metric = NormalizedEntropy()
        >>> metric.update([0.9, 0.1, 0.1, 0.1], [1, 0, 0, 0])
        >>> round(metric.compute(), 4)
        0.1874
    """

    def compute(self) -> float:
        """The mean loss in units of the base rate's entropy."""
        _, positive, weight = self._sums
        if not 0 < positive < weight:
            return math.nan
        rate = float(positive / weight)
        return super().compute() / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
