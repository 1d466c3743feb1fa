"""Masks of padded sequences: bool [B, T], true where there is a step."""

from __future__ import annotations

import torch

from monolith.errors import InvalidArgumentError
from monolith.features.ragged import Ragged
from monolith.nn.checks import require_positive, require_shape

__all__ = ["masked_softmax", "sequence_mask", "step_mask"]


def sequence_mask(offsets: Ragged | torch.Tensor, max_length: int) -> torch.Tensor:
    """Which steps of the padded rows are there: bool [B, max_length], the first min(length, max_length) of each row true.

    `offsets` is the `Ragged` itself or its splits, integers [B + 1].

    Example:
        >>> sequence_mask(torch.tensor([0, 1, 1, 4]), 2).tolist()
        [[True, False], [False, False], [True, True]]
    """
    require_positive("sequence_mask.max_length", max_length)
    splits = offsets.offsets if isinstance(offsets, Ragged) else offsets
    require_shape("sequence_mask.offsets", splits, "B + 1")
    return torch.arange(max_length, device=splits.device) < splits.diff().unsqueeze(1)


def step_mask(where: str, mask: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """`mask` [B, T] of `sequence` [B, T, ...] as bool; numbers are true from 1 on.

    Example:
        >>> step_mask("DIN.mask", torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2, 3)).tolist()
        [[True, False]]
    """
    if mask.shape != sequence.shape[:2]:
        raise InvalidArgumentError(
            f"{where}: expected shape {list(sequence.shape[:2])}, one per step, got {list(mask.shape)}"
        )
    return mask if mask.dtype == torch.bool else mask >= 1


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """softmax over the last dimension among the true entries of `mask`, 0 elsewhere and in rows that have none.

    Example:
        >>> masked_softmax(torch.zeros(2, 2), torch.tensor([[True, False], [False, False]])).tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    # The smallest number, not -inf: a row without steps would be NaN.
    filled = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.softmax(filled, dim=-1) * mask
