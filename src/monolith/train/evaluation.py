"""Forward passes without training, and the streaming metrics of every head over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch, as_batch, num_rows
from monolith.metrics.auc import AUC
from monolith.metrics.gauc import GAUC
from monolith.metrics.losses import MAE, MSE, Calibration, LogLoss, NormalizedEntropy
from monolith.metrics.metric import Metric
from monolith.nn.heads import Head, column, logits_by_head, sums_over_examples, total_loss
from monolith.train.hooks.hook import Hook, hooks_running
from monolith.train.trainer import StepResult, Trainer

__all__ = ["HeadMetrics", "forward_passes"]

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


def forward_passes(
    trainer: Trainer, source: Iterable[Batch], *, steps: int | None, hooks: Sequence[Hook] = (), labelled: bool
) -> Generator[tuple[Batch, dict[str, Tensor]]]:
    """Yield each batch, or the first `steps`, with the logits that the trainer's model has for it. Nothing is trained.

    All moments of the hooks but `before_update` are called, and `trainer.step` stays the same. Their `StepResult` has the loss if
    the batches are `labelled`, otherwise NaN. A stop that they request ends this pass only.

    Example:
        >>> from torch import nn
        >>> class Half(nn.Module):
        ...     def forward(self, batch):
        ...         return batch["x"] / 2
        >>> passes = forward_passes(Trainer(Half()), [{"x": torch.tensor([4.0])}], steps=None, labelled=False)
        >>> [logits for _, logits in passes]
        [{'output': tensor([2.])}]
    """
    if steps is not None and steps < 0:
        raise InvalidArgumentError(f"steps: expected at least 0, got {steps}")
    with hooks_running(hooks, trainer, start=trainer.restore):
        batches = iter(source)
        for _ in itertools.count() if steps is None else range(steps):
            if _asked_to_stop(trainer, hooks, lambda hook: hook.before_step(trainer)):
                return
            batch = next(batches, None)
            if batch is None:
                return
            batch = as_batch(batch)
            trainer.model.eval()
            with torch.no_grad():
                logits = logits_by_head(trainer.model(batch), trainer.heads)
            stop = bool(hooks) and _seen(trainer, hooks, batch, logits, labelled)
            yield batch, logits
            if stop:
                return


def _seen(trainer: Trainer, hooks: Sequence[Hook], batch: Batch, logits: dict[str, Tensor], labelled: bool) -> bool:
    result = StepResult(
        step=trainer.step,
        loss=total_loss(logits, batch, trainer.heads) if labelled else torch.tensor(math.nan),
        grad_norm=None,
        logits=logits,
        batch=batch,
        examples=num_rows(batch),
        loss_is_sum=sums_over_examples(trainer.heads),
    )
    return _asked_to_stop(trainer, hooks, lambda hook: hook.after_step(trainer, result))


def _asked_to_stop(trainer: Trainer, hooks: Sequence[Hook], moment: Callable[[Hook], None]) -> bool:
    # A hook of a training run may evaluate: its own stop reason must survive the evaluation.
    outer, trainer.stop_reason = trainer.stop_reason, None
    try:
        for hook in hooks:
            moment(hook)
        return trainer.stop_reason is not None
    finally:
        trainer.stop_reason = outer
