"""Undoing the effect of negative sampling on a logit: train on z - ln(sample rate), serve z."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from monolith.nn.layers.activations import Activation, make_activation

__all__ = ["LogitCorrection", "correct_logits"]


def correct_logits(
    logits: torch.Tensor, sample_rate: torch.Tensor | float | None = None, *, sample_bias: bool = False
) -> torch.Tensor:
    """z' = z - ln(sample_rate), with sample_bias after z := ln(sigmoid(z)): logits [*], sample_rate [*] -> [*].

    Keeping each negative with probability r multiplies the odds in the data by 1 / r: ln(odds) rises by -ln(r). A model whose
    loss sees z - ln(r), for positives as for negatives, therefore learns the z of the data before sampling. sample_bias is for
    streams that have emitted every positive once as a negative, before it was clicked: the odds are then p instead of
    p / (1 - p). An example with a rate of 0 or less cannot have been sampled; it gives infinity or NaN, and so does the loss.

    Example:
        >>> correct_logits(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.1]))
        tensor([0.0000, 3.3026])
    """
    if sample_bias:
        logits = F.logsigmoid(logits)
    if sample_rate is None:
        return logits
    return logits - torch.log(torch.as_tensor(sample_rate, dtype=logits.dtype, device=logits.device))


class LogitCorrection(nn.Module):
    """act(z - ln(sample_rate)) in training, act(z) in evaluation: logits [*], sample_rate [*] -> [*].

    An exported model is in evaluation mode and thus serves z. For a loss that is corrected in evaluation too, call
    `correct_logits`, as `monolith.nn.get_sigmoid_loss_and_pred` does.

    Args:
        activation: after the correction; none unless told.
        sample_bias: z := ln(sigmoid(z)) first, see `correct_logits`.

    Example:
        >>> correction = LogitCorrection()
        >>> correction(torch.tensor([0.0]), torch.tensor([0.5]))
        tensor([0.6931])
        >>> correction.eval()(torch.tensor([0.0]), torch.tensor([0.5]))
        tensor([0.])
    """

    def __init__(self, *, activation: Activation = None, sample_bias: bool = False) -> None:
        super().__init__()
        self.activation = make_activation(activation, 1)
        self.sample_bias = sample_bias

    def forward(self, logits: torch.Tensor, sample_rate: torch.Tensor | float | None = None) -> torch.Tensor:
        """[*], [*] -> [*]; without a rate nothing was sampled away."""
        if self.training:
            logits = correct_logits(logits, sample_rate, sample_bias=self.sample_bias)
        y: torch.Tensor = self.activation(logits)
        return y
