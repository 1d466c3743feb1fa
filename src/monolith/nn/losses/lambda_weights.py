"""Weights that tie pairwise and list-wise losses to a ranking metric: what would swapping two items change?

All work on lists in the order of their scores, best first: labels [B, L], 0 where padded, ranks 1 .. L.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from monolith.nn.checks import require_number, require_positive

__all__ = [
    "DCGLambdaWeight",
    "ItemWeight",
    "ListMLELambdaWeight",
    "PairWeight",
    "PrecisionLambdaWeight",
    "create_mrr_lambda_weight",
    "create_ndcg_lambda_weight",
    "inverse_max_dcg",
    "ndcg_discount",
    "ndcg_gain",
]

Curve = Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class PairWeight(Protocol):
    """Weighs pairs, for the pairwise losses."""

    def pair_weights(self, labels: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, L, L], entry (i, j) for the pair in which i should be above j."""


@runtime_checkable
class ItemWeight(Protocol):
    """Weighs items, for the list-wise losses."""

    def individual_weights(self, labels: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, L]."""


def ndcg_gain(labels: torch.Tensor) -> torch.Tensor:
    """2^label - 1.

    Example:
        >>> ndcg_gain(torch.tensor([0.0, 1.0, 3.0])).tolist()
        [0.0, 1.0, 7.0]
    """
    return torch.exp2(labels) - 1


def ndcg_discount(rank: torch.Tensor) -> torch.Tensor:
    """1 / ln(1 + rank).

    Example:
        >>> ndcg_discount(torch.tensor([1.0]))
        tensor([1.4427])
    """
    return 1 / torch.log1p(rank)


def inverse_max_dcg(
    labels: torch.Tensor, *, gain: Curve = ndcg_gain, discount: Curve = ndcg_discount, topn: int | None = None
) -> torch.Tensor:
    """1 / (sum of gain * discount of the first topn in the best order), 0 if that is 0: [B, L] -> [B, 1].

    Example:
        >>> inverse_max_dcg(torch.tensor([[0.0, 1.0]]), discount=lambda rank: 1 / rank).tolist()
        [[1.0]]
    """
    best = labels.sort(dim=1, descending=True).values[:, :topn]
    dcg = (gain(best) * discount(_ranks(best))).sum(1, keepdim=True)
    return torch.where(dcg > 0, 1 / dcg.clamp(min=torch.finfo(dcg.dtype).tiny), 0.0)


class DCGLambdaWeight:
    """The change of discounted cumulative gain by a swap: |gain_i - gain_j| * ((1 - smooth_fraction) * u + smooth_fraction * v).

    u = |discount(d) - discount(d + 1)| with d = |rank_i - rank_j| looks at the distance, v = |discount(rank_i) -
    discount(rank_j)| at the positions (LambdaMART's). Individual weights are gain * discount(rank).

    Args:
        topn: only pairs with a member among the first topn count. None counts all.
        gain: of a label.
        discount: of a rank.
        normalized: divide gains by the best DCG of the list.
        smooth_fraction: in [0, 1].

    Example:
        >>> weight = DCGLambdaWeight(discount=lambda rank: 1 / rank, smooth_fraction=1.0)
        >>> weight.pair_weights(torch.tensor([[0.0, 1.0]])).tolist()
        [[[0.0, 0.0], [0.5, 0.0]]]
    """

    def __init__(
        self,
        *,
        topn: int | None = None,
        gain: Curve = ndcg_gain,
        discount: Curve = ndcg_discount,
        normalized: bool = True,
        smooth_fraction: float = 0.0,
    ) -> None:
        if topn is not None:
            require_positive("DCGLambdaWeight.topn", topn)
        fraction = smooth_fraction
        require_number("DCGLambdaWeight.smooth_fraction", fraction, "a number in [0, 1]", holds=0 <= fraction <= 1)
        self.topn, self.gain, self.discount = topn, gain, discount
        self.normalized, self.smooth_fraction = normalized, smooth_fraction

    def pair_weights(self, labels: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, L, L], 0 unless label i > label j."""
        gain = self._gain(labels)
        gain_difference = (gain.unsqueeze(2) - gain.unsqueeze(1)).clamp(min=0)
        rank = _ranks(labels)
        distance = (rank.unsqueeze(1) - rank).abs()
        apart = distance.clamp(min=1)  # a pair of one item with itself has no distance, and no gain either
        relative = (self.discount(apart) - self.discount(apart + 1)).abs()
        discount = self.discount(rank)
        absolute = (discount.unsqueeze(1) - discount).abs()
        change = (1 - self.smooth_fraction) * relative + self.smooth_fraction * absolute
        if self.topn is not None:
            change = change * ((rank.unsqueeze(1) <= self.topn) | (rank <= self.topn))
        return gain_difference * change

    def individual_weights(self, labels: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, L]."""
        return self._gain(labels) * self.discount(_ranks(labels))

    def _gain(self, labels: torch.Tensor) -> torch.Tensor:
        gain = self.gain(labels)
        if not self.normalized:
            return gain
        return gain * inverse_max_dcg(labels, gain=self.gain, discount=self.discount, topn=self.topn)


class PrecisionLambdaWeight:
    """The change of precision@topn by a swap: 1 if one item is positive and the other not, and one is inside and the other not.

    Args:
        topn: where the metric cuts.
        positive_from: the smallest label that is positive.

    Example:
        >>> PrecisionLambdaWeight(topn=1).pair_weights(torch.tensor([[0.0, 1.0]])).tolist()
        [[[0.0, 1.0], [1.0, 0.0]]]
    """

    def __init__(self, topn: int, *, positive_from: float = 1.0) -> None:
        require_positive("PrecisionLambdaWeight.topn", topn)
        self.topn, self.positive_from = topn, positive_from

    def pair_weights(self, labels: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, L, L]."""
        positive, inside = labels >= self.positive_from, _ranks(labels) <= self.topn
        differ = positive.unsqueeze(2) != positive.unsqueeze(1)
        return (differ & (inside.unsqueeze(1) != inside)).to(labels.dtype)


class ListMLELambdaWeight:
    """Position-aware ListMLE: rank r of n has the weight 2^(n - r) - 1, the top rank the most.

    Args:
        list_size: n. Ranks beyond it count 0.

    Example:
        >>> ListMLELambdaWeight(list_size=3).individual_weights(torch.zeros(1, 3)).tolist()
        [[3.0, 1.0, 0.0]]
    """

    def __init__(self, list_size: int) -> None:
        require_positive("ListMLELambdaWeight.list_size", list_size)
        self.list_size = list_size

    def individual_weights(self, labels: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, L]."""
        return (torch.exp2(self.list_size - _ranks(labels)) - 1).clamp(min=0).expand_as(labels)


def create_ndcg_lambda_weight(*, topn: int | None = None, smooth_fraction: float = 0.0) -> DCGLambdaWeight:
    """Return weights for NDCG: gain 2^label - 1, discount 1 / ln(1 + rank), normalized.

    Example:
        >>> create_ndcg_lambda_weight(topn=10).topn
        10
    """
    return DCGLambdaWeight(topn=topn, smooth_fraction=smooth_fraction)


def create_mrr_lambda_weight(*, topn: int | None = None, smooth_fraction: float = 0.0) -> DCGLambdaWeight:
    """Return weights for the mean reciprocal rank: gain label, discount 1 / rank, normalized.

    Example:
        >>> create_mrr_lambda_weight().individual_weights(torch.tensor([[0.0, 1.0]])).tolist()
        [[0.0, 0.5]]
    """
    return DCGLambdaWeight(topn=topn, gain=torch.clone, discount=torch.reciprocal, smooth_fraction=smooth_fraction)


def _ranks(labels: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, labels.shape[1] + 1, dtype=labels.dtype, device=labels.device)
