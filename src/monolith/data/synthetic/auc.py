"""The AUC nobody can beat, from the true probabilities."""

from __future__ import annotations

import torch

from monolith.errors import InvalidArgumentError

__all__ = ["best_auc"]


def best_auc(probability: torch.Tensor) -> float:
    """The AUC of ranking rows by their true `probability` [n] of label 1, expected over the labels.

    The share of pairs (i, j), i labelled 1 and j labelled 0, in which i has the higher probability; a tie counts half:
    sum_(i != j) p_i (1 - p_j) ([p_i > p_j] + [p_i = p_j] / 2) / sum_(i != j) p_i (1 - p_j).

    Example:
        >>> round(best_auc(torch.tensor([0.1, 0.5, 0.9])), 4)
        0.9396
        >>> best_auc(torch.full((10,), 0.3))
        0.5
    """
    p = torch.sort(probability.detach().double().flatten()).values
    if len(p) < 2 or not (p[0] >= 0 and p[-1] <= 1 and p[0] < 1 and p[-1] > 0):
        raise InvalidArgumentError(
            f"probability: expected at least two numbers in [0, 1] that make both labels possible, got {probability}"
        )
    below = torch.cumsum(1 - p, 0)
    first = torch.searchsorted(p, p, right=False)
    last = torch.searchsorted(p, p, right=True)
    zero = torch.cat([torch.zeros(1, dtype=p.dtype), below])
    lower, tied = zero[first], zero[last] - zero[first] - (1 - p)
    every = p.sum() * (1 - p).sum() - (p * (1 - p)).sum()
    return float((p * (lower + tied / 2)).sum() / every)
