"""A smooth stand-in for AUC: every positive of the batch should score above every negative."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from monolith.nn.checks import require_number, require_shape

__all__ = ["inbatch_auc_loss"]

_UNLABELLED = -10000.0


def inbatch_auc_loss(logits: torch.Tensor, labels: torch.Tensor, *, neg_weight: float = 1.0) -> torch.Tensor:
    """-sum over pairs (p positive, n negative) of ln sigmoid(z_p - z_n), a scalar >= 0 to minimise; 0 without pairs.

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
