"""Losses of heads, losses over the pairs of a batch, and `GradNorm`, which balances the losses of several tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_number, require_shape
from monolith.nn.layers.mlp import correct_logits

__all__ = [
    "GradNorm",
    "LossAndPred",
    "batch_softmax_loss",
    "get_sigmoid_loss_and_pred",
    "get_softmax_loss_and_pred",
    "inbatch_auc_loss",
]


class LossAndPred(NamedTuple):
    """Loss and prediction of a head.

    Example:
        >>> LossAndPred(loss=torch.tensor(0.5), pred=torch.tensor([0.1])).loss
        tensor(0.5000)
    """

    loss: torch.Tensor
    """To minimise."""
    pred: torch.Tensor
    """To serve."""


def get_sigmoid_loss_and_pred(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    sample_rate: torch.Tensor | float | None = None,
    sample_bias: bool = False,
    mask: torch.Tensor | None = None,
    instance_weight: torch.Tensor | None = None,
    logit_clip_threshold: float | None = None,
    predict_before_correction: bool = True,
) -> LossAndPred:
    """Binary cross entropy, summed over the batch, and the probability: logits [*], labels [*] -> scalar, [*].

    The loss sees z' = z - ln(sample_rate) (see `correct_logits`). The prediction is sigmoid(z), that of the data before
    sampling.

    Args:
        logits: z.
        labels: in [0, 1].
        sample_rate: the rate at which negatives were kept where the example comes from, [*] or one number, also on positives.
        sample_bias: see `correct_logits`.
        mask: [*]. Examples where it is false or 0 have no loss, whatever their label.
        instance_weight: factor of each example's loss, [*].
        logit_clip_threshold: t in (0, 0.5). z' is clipped to ±ln((1 - t) / t), probabilities t and 1 - t.
        predict_before_correction: False predicts sigmoid(z') instead.

    Example:
        >>> loss, pred = get_sigmoid_loss_and_pred(torch.tensor([0.0]), torch.tensor([1.0]), sample_rate=0.5)
        >>> loss, pred
        (tensor(0.4055), tensor([0.5000]))
    """
    require_shape("get_sigmoid_loss_and_pred.labels", labels, *logits.shape)
    corrected = correct_logits(logits, sample_rate, sample_bias=sample_bias)
    pred = torch.sigmoid(logits if predict_before_correction else corrected)
    if logit_clip_threshold is not None:
        t = logit_clip_threshold
        require_number("logit_clip_threshold", t, "a number in (0, 0.5)", holds=0 < t < 0.5)
        limit = math.log((1 - t) / t)
        corrected = corrected.clamp(-limit, limit)
    losses = F.binary_cross_entropy_with_logits(corrected, labels.to(corrected.dtype), reduction="none")
    return LossAndPred(_weighted(losses, mask, instance_weight).sum(), pred)


def get_softmax_loss_and_pred(logits: torch.Tensor, labels: torch.Tensor) -> LossAndPred:
    """Cross entropy of each example and the most likely class: logits [B, C], labels int64 [B] -> [B], int64 [B].

    Example:
        >>> loss, pred = get_softmax_loss_and_pred(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        >>> loss, pred
        (tensor([0.6931]), tensor([0]))
    """
    require_shape("get_softmax_loss_and_pred.logits", logits, "B", "C")
    require_shape("get_softmax_loss_and_pred.labels", labels, len(logits))
    return LossAndPred(F.cross_entropy(logits, labels.long(), reduction="none"), logits.argmax(1))


def _weighted(losses: torch.Tensor, mask: torch.Tensor | None, instance_weight: torch.Tensor | None) -> torch.Tensor:
    if mask is not None:
        require_shape("get_sigmoid_loss_and_pred.mask", mask, *losses.shape)
        losses = losses.masked_fill(mask < 1 if mask.dtype != torch.bool else ~mask, 0.0)
    if instance_weight is not None:
        require_shape("get_sigmoid_loss_and_pred.instance_weight", instance_weight, *losses.shape)
        losses = losses * instance_weight
    return losses


def batch_softmax_loss(
    query: torch.Tensor,
    item: torch.Tensor,
    item_step_interval: torch.Tensor,
    r: torch.Tensor,
    *,
    normalize: bool = True,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Softmax loss of each query's own item against all items of the batch, corrected for sampling frequency. Returns a scalar.

    With s_ij = q_i · v_j / temperature + ln(max(interval_j, 1)), the loss is -sum_i r_i ln softmax_j(s_i)_i. An item that comes
    back every `interval` steps is in a batch with probability 1 / interval: popular items, which are negatives of almost
    everybody, would otherwise be pushed down for their popularity.

    Args:
        query: [B, k].
        item: [B, k], row i belongs to query i.
        item_step_interval: steps between two occurrences of each item, as `monolith.table.BatchSoftmax` keeps them, [B].
        r: reward of each pair, [B].
        normalize: scale rows of both to length 1 first.
        temperature: divides the similarities.

    Example:
        >>> same = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> batch_softmax_loss(same, same, torch.ones(2), torch.ones(2))
        tensor(1.3863)
    """
    require_number("batch_softmax_loss.temperature", temperature, "a number > 0", holds=temperature > 0)
    require_shape("batch_softmax_loss.query", query, "B", "k")
    require_shape("batch_softmax_loss.item", item, *query.shape)
    if normalize:
        query, item = F.normalize(query, dim=1), F.normalize(item, dim=1)
    interval, reward = item_step_interval.flatten(), r.flatten()
    require_shape("batch_softmax_loss.item_step_interval", interval, len(query))
    require_shape("batch_softmax_loss.r", reward, len(query))
    scores = query @ item.T / temperature + interval.to(query.dtype).clamp(min=1).log()
    own = torch.arange(len(query), device=query.device)
    return (reward * F.cross_entropy(scores, own, reduction="none")).sum()


_UNLABELLED = -10000.0


def inbatch_auc_loss(logits: torch.Tensor, labels: torch.Tensor, *, neg_weight: float = 1.0) -> torch.Tensor:
    """-sum over pairs (p positive, n negative) of ln sigmoid(z_p - z_n), a scalar >= 0 to minimise, 0 without pairs.

    Labels above 0 are positive, those in (-10000, 0] negative, lower ones left out. The gradient of negatives is multiplied by
    neg_weight, the value is not.

    Args:
        logits: [*].
        labels: [*], the same shape.
        neg_weight: in (0, 1].

    Example:
        >>> inbatch_auc_loss(torch.tensor([0.0, 0.0, 9.0]), torch.tensor([1.0, 0.0, -10000.0]))
        tensor(0.6931)
    """
    require_number("inbatch_auc_loss.neg_weight", neg_weight, "a number in (0, 1]", holds=0 < neg_weight <= 1)
    require_shape("inbatch_auc_loss.labels", labels, *logits.shape)
    positive = logits[labels > 0]
    negative = logits[(labels <= 0) & (labels > _UNLABELLED)]
    # The same value with a scaled gradient.
    negative = neg_weight * negative + (1 - neg_weight) * negative.detach()
    return -F.logsigmoid(positive.unsqueeze(1) - negative).sum()


class GradNormLosses(NamedTuple):
    """The two losses of `GradNorm`. Minimise their sum.

    Example:
        >>> GradNormLosses(torch.tensor(0.1), torch.tensor(2.0)).weighted_loss
        tensor(2.)
    """

    gnorm_loss: torch.Tensor
    """Trains the weights of the tasks only."""
    weighted_loss: torch.Tensor
    """Trains the model only."""


class GradNorm(nn.Module):
    """Task weights w = softmax(v), v starting at 0, trained until the gradients of all tasks on the shared parameters have
    equal norms.

    g_i = ||d loss_i / d shared|| (a constant), a = sum_i w_i g_i / n
    gnorm_loss = scale * sum_i |w_i g_i - a|^loss_pow, each term divided by a + eps first if relative_diff
    weighted_loss = sum_i w_i loss_i, w a constant

    Args:
        loss_names: one per task.
        scale: of gnorm_loss.
        loss_pow: its power.
        relative_diff: compare relative to the mean, so that the scale of the losses does not matter.
        eps: keeps the relative form finite.

    Example:
        >>> shared = torch.tensor([1.0], requires_grad=True)
        >>> losses = {"click": (3 * shared).sum(), "buy": shared.sum()}
        >>> balance = GradNorm(["click", "buy"])
        >>> gnorm_loss, weighted_loss = balance(losses, shared)
        >>> gnorm_loss.item(), weighted_loss.item()
        (0.5, 2.0)
    """

    def __init__(
        self,
        loss_names: Sequence[str],
        *,
        scale: float = 1.0,
        loss_pow: float = 2.0,
        relative_diff: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if isinstance(loss_names, str) or not loss_names or len(set(loss_names)) != len(loss_names):
            raise InvalidArgumentError(
                f"GradNorm.loss_names: expected different names, one per task, got {loss_names!r}"
            )
        require_number("GradNorm.loss_pow", loss_pow, "a number >= 1", holds=loss_pow >= 1)
        require_number("GradNorm.eps", eps, "a number > 0", holds=eps > 0)
        self.loss_names = tuple(loss_names)
        self.scale, self.loss_pow, self.relative_diff, self.eps = scale, loss_pow, relative_diff, eps
        self.logits = nn.Parameter(torch.zeros(len(loss_names)))

    def weights(self) -> torch.Tensor:
        """Return w, [n], summing to 1."""
        return torch.softmax(self.logits, dim=0)

    def forward(
        self, losses: Mapping[str, torch.Tensor], shared: torch.Tensor | Sequence[torch.Tensor]
    ) -> GradNormLosses:
        """Scalar losses by name and the shared tensor(s) they all depend on -> both losses, scalars."""
        if set(losses) != set(self.loss_names):
            raise InvalidArgumentError(f"GradNorm.losses: expected {sorted(self.loss_names)}, got {sorted(losses)}")
        tensors = [shared] if isinstance(shared, torch.Tensor) else list(shared)
        norms = torch.stack([self._gradient_norm(losses[name], tensors) for name in self.loss_names])
        weights = self.weights()
        pulls = weights * norms.to(weights.dtype)
        mean = pulls.mean()
        difference = (pulls - mean) / (mean + self.eps) if self.relative_diff else pulls - mean
        gnorm_loss = self.scale * difference.abs().pow(self.loss_pow).sum()
        values = torch.stack([losses[name] for name in self.loss_names])
        return GradNormLosses(gnorm_loss, (weights.detach() * values).sum())

    @staticmethod
    def _gradient_norm(loss: torch.Tensor, shared: list[torch.Tensor]) -> torch.Tensor:
        gradients = torch.autograd.grad(loss, shared, retain_graph=True, allow_unused=True)
        parts = [gradient.norm() for gradient in gradients if gradient is not None]
        return torch.stack(parts).norm() if parts else loss.new_zeros(())
