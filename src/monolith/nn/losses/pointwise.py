"""Loss and prediction of a head in one call, with negative sampling undone in the loss and not in the prediction."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from monolith.nn.checks import require_number, require_shape
from monolith.nn.layers.logit_correction import correct_logits

__all__ = ["LossAndPred", "get_sigmoid_loss_and_pred", "get_softmax_loss_and_pred"]


class LossAndPred(NamedTuple):
    """What a head gives.

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

    The loss sees z' = z - ln(sample_rate) (see `correct_logits`); the prediction is sigmoid(z), that of the data before sampling.

    Args:
        logits: z.
        labels: in [0, 1].
        sample_rate: the rate at which negatives were kept where the example comes from, [*] or one number; positives have it too.
        sample_bias: see `correct_logits`.
        mask: examples without it, false or 0, have no loss, whatever their label; [*].
        instance_weight: factor of each example's loss, [*].
        logit_clip_threshold: t in (0, 0.5); z' is clipped to ±ln((1 - t) / t), probabilities t and 1 - t.
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
