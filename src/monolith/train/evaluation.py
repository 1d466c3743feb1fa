"""Streaming metrics of every head while batches pass by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from monolith.features.batch import Batch
from monolith.metrics import AUC, GAUC, MAE, MSE, Calibration, LogLoss, Metric, NormalizedEntropy
from monolith.nn.heads import Head, column

__all__ = ["HeadMetrics"]

_METRICS: dict[str, Callable[[], Metric]] = {
    "auc": AUC,
    "calibration": Calibration,
    "gauc": GAUC,
    "log_loss": LogLoss,
    "mae": MAE,
    "mse": MSE,
    "ne": NormalizedEntropy,
}


class HeadMetrics:
    """The metrics that `heads` name and their mean loss per labelled example, kept up to date in bounded memory.

    Example:
        >>> import torch
        >>> metrics = HeadMetrics([Head(name="ctr", label="click", metrics=("auc",))])
        >>> metrics.update({"ctr": torch.tensor([-1.0, 1.0])}, {"click": torch.tensor([0.0, 1.0])})
        >>> metrics.compute()["ctr/auc"]
        1.0
    """

    def __init__(self, heads: Sequence[Head]) -> None:
        self.heads = tuple(heads)
        self._metrics = {head.name: {name: _METRICS[name]() for name in head.metric_names} for head in heads}
        self._losses = {head.name: 0.0 for head in heads}
        self._examples = {head.name: 0 for head in heads}

    def update(self, logits: Mapping[str, Tensor], batch: Batch) -> None:
        """Take in one batch: its logits by head, and the columns with the labels."""
        for head in self.heads:
            rows, z = head.select(batch, logits[head.name].detach())
            if not len(z):
                continue
            # Metrics speak of the stream as it is served, where a negative kept at rate r stands for 1/r of its kind.
            predictions, labels, weights = head.predict(z), head.labels(rows), head.importance(rows)
            loss = head.loss(logits[head.name].detach(), batch).item()
            self._losses[head.name] += loss * (len(z) if head.reduction == "mean" else 1)
            self._examples[head.name] += len(z)
            groups = None if head.group is None else column(rows, head.group, f"head {head.name!r}, group")
            for metric in self._metrics[head.name].values():
                metric.update(predictions, labels, weights, groups)

    def compute(self) -> dict[str, float]:
        """`<head>/<metric>` to its value, NaN where there was nothing to measure."""
        results: dict[str, float] = {}
        for head in self.heads:
            for name, metric in self._metrics[head.name].items():
                results[f"{head.name}/{name}"] = metric.compute()
            examples = self._examples[head.name]
            results[f"{head.name}/loss"] = self._losses[head.name] / examples if examples else math.nan
            results[f"{head.name}/examples"] = examples
        return results
