"""Ranking losses by name, mixed, and the lists they need out of a flat batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_shape
from monolith.nn.losses import ranking
from monolith.nn.losses.lambda_weights import ItemWeight, PairWeight
from monolith.nn.losses.ranking import Reduction

__all__ = ["RankingLists", "RankingLossKey", "group_by_rank_id", "make_loss_fn"]

RankingLossKey = Literal[
    "approx_ndcg",
    "list_mle",
    "mean_squared",
    "pairwise_hinge",
    "pairwise_logistic",
    "pairwise_soft_zero_one",
    "sigmoid_cross_entropy",
    "softmax",
]

Loss = Callable[..., torch.Tensor]
_PAIRWISE: dict[str, Loss] = {
    "pairwise_hinge": ranking.pairwise_hinge_loss,
    "pairwise_logistic": ranking.pairwise_logistic_loss,
    "pairwise_soft_zero_one": ranking.pairwise_soft_zero_one_loss,
}
_LISTWISE: dict[str, Loss] = {"list_mle": ranking.list_mle_loss, "softmax": ranking.softmax_loss}
_UNWEIGHED: dict[str, Loss] = {
    "approx_ndcg": ranking.approx_ndcg_loss,
    "mean_squared": ranking.mean_squared_loss,
    "sigmoid_cross_entropy": ranking.sigmoid_cross_entropy_loss,
}


def make_loss_fn(
    loss_keys: RankingLossKey | Sequence[RankingLossKey],
    loss_weights: Sequence[float] | None = None,
    *,
    lambda_weight: PairWeight | ItemWeight | None = None,
    reduction: Reduction = "sum_by_nonzero_weights",
) -> Callable[..., torch.Tensor]:
    """loss(logits, labels, weights=None) = sum_i loss_weights_i * loss_i(logits, labels, weights), a scalar.

    Args:
        loss_keys: one name or several; see `RankingLossKey`.
        loss_weights: one factor per name; all 1 unless told.
        lambda_weight: for those losses that take one of its kind, which at least one must.
        reduction: of every loss.

    Example:
        >>> loss_fn = make_loss_fn(["softmax", "mean_squared"], [1.0, 0.5])
        >>> loss_fn(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
        tensor(0.9431)
    """
    keys = [loss_keys] if isinstance(loss_keys, str) else list(loss_keys)
    if not keys or (loss_weights is not None and len(loss_weights) != len(keys)):
        raise InvalidArgumentError(
            f"make_loss_fn.loss_weights: expected one for each of the losses {keys}, at least one, got {loss_weights!r}"
        )
    parts = [_loss(key, lambda_weight, reduction) for key in keys]
    if lambda_weight is not None and not any("lambda_weight" in part.keywords for part in parts):
        raise InvalidArgumentError(
            f"make_loss_fn.lambda_weight: none of the losses {keys} takes a {type(lambda_weight).__name__}; leave it out"
        )
    factors = [1.0] * len(keys) if loss_weights is None else list(loss_weights)

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        terms = [factor * part(logits, labels, weights) for factor, part in zip(factors, parts, strict=True)]
        return torch.stack(terms).sum()

    return loss_fn


def _loss(key: str, lambda_weight: PairWeight | ItemWeight | None, reduction: Reduction) -> partial[torch.Tensor]:
    require_choice("make_loss_fn.loss_keys", key, get_args(RankingLossKey))
    pairwise = key in _PAIRWISE and isinstance(lambda_weight, PairWeight)
    listwise = key in _LISTWISE and isinstance(lambda_weight, ItemWeight)
    loss = (_PAIRWISE | _LISTWISE | _UNWEIGHED)[key]
    if pairwise or listwise:
        return partial(loss, lambda_weight=lambda_weight, reduction=reduction)
    return partial(loss, reduction=reduction)


class RankingLists(NamedTuple):
    """Where each example of a flat batch lies in padded lists; made by `group_by_rank_id`.

    Example:
        >>> lists = group_by_rank_id(torch.tensor([7, 3, 7]))
        >>> lists.pad(torch.tensor([1.0, 0.0, 2.0]), fill=-1).tolist()
        [[0.0, -1.0], [1.0, 2.0]]
    """

    row: torch.Tensor
    """The list of each example, int64 [B]."""
    position: torch.Tensor
    """Its place in that list, int64 [B]."""
    sizes: torch.Tensor
    """How many examples each list has, int64 [lists]."""

    def pad(self, column: torch.Tensor, *, fill: float) -> torch.Tensor:
        """The column as lists, [B] -> [lists, longest], `fill` where a list has ended; differentiable in `column`."""
        require_shape("RankingLists.column", column, len(self.row))
        shape = (len(self.sizes), int(self.sizes.max()) if len(self.sizes) else 0)
        return column.new_full(shape, fill).index_put((self.row, self.position), column)


def group_by_rank_id(rank_id: torch.Tensor) -> RankingLists:
    """Examples with equal ids belong to one list: integers [B] -> lists in order of id, each in order of the batch.

    Example:
        >>> lists = group_by_rank_id(torch.tensor([7, 3, 7]))
        >>> lists.row.tolist(), lists.position.tolist(), lists.sizes.tolist()
        ([1, 0, 1], [0, 0, 1], [1, 2])
    """
    require_shape("group_by_rank_id.rank_id", rank_id, "B")
    _, row, sizes = torch.unique(rank_id, return_inverse=True, return_counts=True)
    order = row.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(len(row), device=row.device)
    position = torch.empty_like(row).index_put((order,), place - starts[row[order]])
    return RankingLists(row, position, sizes)
