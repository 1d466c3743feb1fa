"""Losses over ranked lists: logits [B, L], labels [B, L] with labels below 0 where a list is padded, weights [B, L] or [B, 1].

Padding never changes a loss. `reduction` is over the weighted terms w * loss:
"sum_by_nonzero_weights" (the default) is sum / number of terms with a weight, "mean" sum / sum of weights, and
"sum_over_batch_size" sum / number of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_number, require_shape
from monolith.nn.losses.lambda_weights import ItemWeight, PairWeight, inverse_max_dcg, ndcg_discount, ndcg_gain

__all__ = [
    "RankingLists",
    "RankingLossKey",
    "Reduction",
    "approx_ndcg_loss",
    "group_by_rank_id",
    "list_mle_loss",
    "make_loss_fn",
    "mean_squared_loss",
    "pairwise_hinge_loss",
    "pairwise_logistic_loss",
    "pairwise_soft_zero_one_loss",
    "sigmoid_cross_entropy_loss",
    "softmax_loss",
]

Reduction = Literal["sum_by_nonzero_weights", "sum", "mean", "sum_over_batch_size"]

_DEFAULT: Reduction = "sum_by_nonzero_weights"


def pairwise_hinge_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    lambda_weight: PairWeight | None = None,
    reduction: Reduction = _DEFAULT,
) -> torch.Tensor:
    """max(0, 1 - d) over the pairs of a list with label_i > label_j, d = logit_i - logit_j. Returns a scalar.

    A pair weighs (number of items in its list) * weight_i * (label_i - label_j), or lambda_weight's number instead of the last.

    Example:
        >>> pairwise_hinge_loss(torch.tensor([[0.0, 0.5]]), torch.tensor([[1.0, 0.0]])).item()
        3.0
    """
    return _pairwise(lambda d: F.relu(1 - d), logits, labels, weights, lambda_weight, reduction)


def pairwise_logistic_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    lambda_weight: PairWeight | None = None,
    reduction: Reduction = _DEFAULT,
) -> torch.Tensor:
    """ln(1 + e^-d) over the pairs of a list, with weights as in `pairwise_hinge_loss`. Returns a scalar.

    Example:
        >>> pairwise_logistic_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
        tensor(1.3863)
    """
    return _pairwise(lambda d: -F.logsigmoid(d), logits, labels, weights, lambda_weight, reduction)


def pairwise_soft_zero_one_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    lambda_weight: PairWeight | None = None,
    reduction: Reduction = _DEFAULT,
) -> torch.Tensor:
    """1 - sigmoid(d) over the pairs of a list, with weights as in `pairwise_hinge_loss`. Returns a scalar.

    Example:
        >>> pairwise_soft_zero_one_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])).item()
        1.0
    """
    return _pairwise(lambda d: torch.sigmoid(-d), logits, labels, weights, lambda_weight, reduction)


def softmax_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    lambda_weight: ItemWeight | None = None,
    reduction: Reduction = _DEFAULT,
) -> torch.Tensor:
    """-sum_i l_i ln softmax(logits)_i per list, l = label * weight. A list's weight is sum_i l_i. Returns a scalar.

    With lambda_weight its individual weights, in the order of the scores, stand for the labels.

    Example:
        >>> softmax_loss(torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([[1.0, 0.0, -1.0]]))
        tensor(0.6931)
    """
    valid, relevance, item_weights = _prepare(logits, labels, weights)
    if lambda_weight is not None:
        order = _by_score(logits, valid)
        weighed = lambda_weight.individual_weights(relevance.gather(1, order)) * valid.gather(1, order)
        relevance = torch.zeros_like(relevance).scatter(1, order, weighed)
    target = (relevance * item_weights).detach()
    total = target.sum(1)
    losses = -(target * _log_softmax(logits, valid)).sum(1)
    return _reduce(losses / total.clamp(min=torch.finfo(total.dtype).tiny), total, reduction)


def sigmoid_cross_entropy_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None, *, reduction: Reduction = _DEFAULT
) -> torch.Tensor:
    """Binary cross entropy of each item. Returns a scalar.

    Example:
        >>> sigmoid_cross_entropy_loss(torch.tensor([[0.0, 9.0]]), torch.tensor([[1.0, -1.0]]))
        tensor(0.6931)
    """
    _, relevance, item_weights = _prepare(logits, labels, weights)
    return _reduce(F.binary_cross_entropy_with_logits(logits, relevance, reduction="none"), item_weights, reduction)


def mean_squared_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None, *, reduction: Reduction = _DEFAULT
) -> torch.Tensor:
    """(logit - label)² of each item. Returns a scalar.

    Example:
        >>> mean_squared_loss(torch.tensor([[3.0, 9.0]]), torch.tensor([[1.0, -1.0]])).item()
        4.0
    """
    _, relevance, item_weights = _prepare(logits, labels, weights)
    return _reduce((logits - relevance).square(), item_weights, reduction)


def list_mle_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    lambda_weight: ItemWeight | None = None,
    reduction: Reduction = _DEFAULT,
) -> torch.Tensor:
    """-ln P(the order of the labels) of each list under Plackett-Luce. Returns a scalar.

    It is the sum over positions p of ln(sum_{q >= p} e^{logit_q}) - logit_p, with items in the order of their labels, best
    first, equal ones as they come. `lambda_weight` weighs the positions. `weights` are those of lists, [B, 1].

    Example:
        >>> list_mle_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
        tensor(0.6931)
    """
    valid, relevance, _ = _prepare(logits, labels, None)
    order = torch.where(valid, relevance, -1.0).argsort(dim=1, descending=True, stable=True)
    there, sorted_logits = valid.gather(1, order), logits.gather(1, order)
    lowest = torch.finfo(logits.dtype).min
    tails = sorted_logits.masked_fill(~there, lowest).flip(1).logcumsumexp(1).flip(1)
    terms = (tails - sorted_logits).masked_fill(~there, 0.0)
    if lambda_weight is not None:
        terms = terms * lambda_weight.individual_weights(relevance.gather(1, order)).detach()
    return _reduce(terms.sum(1), _list_weights(weights, valid.any(1), logits), reduction)


def approx_ndcg_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    alpha: float = 10.0,
    reduction: Reduction = _DEFAULT,
) -> torch.Tensor:
    """-NDCG of each list with smooth ranks, rank_i = ½ + sum_j sigmoid(alpha (s_j - s_i)). Returns a scalar in [-1, 0].

    Lists without a label above 0 have no NDCG and are left out. `weights` are those of lists, [B, 1].

    Example:
        >>> approx_ndcg_loss(torch.tensor([[9.0, 0.0, 5.0]]), torch.tensor([[1.0, 0.0, -1.0]]))
        tensor(-1.)
    """
    require_number("approx_ndcg_loss.alpha", alpha, "a number > 0", holds=alpha > 0)
    valid, relevance, _ = _prepare(logits, labels, None)
    above = torch.sigmoid(alpha * (logits.unsqueeze(1) - logits.unsqueeze(2))) * valid.unsqueeze(1)
    rank = 0.5 + above.sum(2)
    dcg = (ndcg_gain(relevance) * ndcg_discount(rank) * valid).sum(1)
    losses = -dcg * inverse_max_dcg(relevance).squeeze(1)
    return _reduce(losses, _list_weights(weights, (relevance > 0).any(1), logits), reduction)


def _prepare(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which items exist, their labels (0 elsewhere) and their weights (0 elsewhere), all [B, L]."""
    require_shape("logits", logits, "B", "L")
    require_shape("labels", labels, *logits.shape)
    valid = labels >= 0
    relevance = torch.where(valid, labels, 0).to(logits.dtype)
    item_weights = valid.to(logits.dtype)
    if weights is not None:
        require_shape("weights", weights, len(logits), weights.shape[-1] if weights.shape[-1] == 1 else logits.shape[1])
        item_weights = item_weights * weights
    return valid, relevance, item_weights


def _list_weights(weights: torch.Tensor | None, there: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    present = there.to(logits.dtype)
    if weights is None:
        return present
    require_shape("weights", weights, len(logits), 1)
    return present * weights.squeeze(1)


def _by_score(logits: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    lowest = torch.finfo(logits.dtype).min
    return logits.detach().masked_fill(~valid, lowest).argsort(dim=1, descending=True, stable=True)


def _log_softmax(logits: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    filled = logits.masked_fill(~valid, torch.finfo(logits.dtype).min)
    return torch.log_softmax(filled, dim=1).masked_fill(~valid, 0.0)


def _pairwise(
    loss: Callable[[torch.Tensor], torch.Tensor],
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None,
    lambda_weight: PairWeight | None,
    reduction: Reduction,
) -> torch.Tensor:
    valid, relevance, item_weights = _prepare(logits, labels, weights)
    order = _by_score(logits, valid)
    logits, relevance = logits.gather(1, order), relevance.gather(1, order)
    valid, item_weights = valid.gather(1, order), item_weights.gather(1, order)
    label_difference = relevance.unsqueeze(2) - relevance.unsqueeze(1)
    importance = label_difference if lambda_weight is None else lambda_weight.pair_weights(relevance)
    ordered = (label_difference > 0) & valid.unsqueeze(2) & valid.unsqueeze(1)
    list_size = valid.sum(1)[:, None, None]
    pair_weights = (importance * ordered * item_weights.unsqueeze(2) * list_size).detach()
    return _reduce(loss(logits.unsqueeze(2) - logits.unsqueeze(1)), pair_weights, reduction)


def _reduce(losses: torch.Tensor, weights: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    require_choice("reduction", reduction, get_args(Reduction))
    total = (losses * weights).sum()
    if reduction == "sum":
        return total
    if reduction == "sum_over_batch_size":
        return total / max(losses.numel(), 1)
    count = weights.sum() if reduction == "mean" else (weights != 0).sum()
    return total / torch.where(count == 0, torch.ones_like(count), count)


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
    "pairwise_hinge": pairwise_hinge_loss,
    "pairwise_logistic": pairwise_logistic_loss,
    "pairwise_soft_zero_one": pairwise_soft_zero_one_loss,
}
_LISTWISE: dict[str, Loss] = {"list_mle": list_mle_loss, "softmax": softmax_loss}
_UNWEIGHED: dict[str, Loss] = {
    "approx_ndcg": approx_ndcg_loss,
    "mean_squared": mean_squared_loss,
    "sigmoid_cross_entropy": sigmoid_cross_entropy_loss,
}


def make_loss_fn(
    loss_keys: RankingLossKey | Sequence[RankingLossKey],
    loss_weights: Sequence[float] | None = None,
    *,
    lambda_weight: PairWeight | ItemWeight | None = None,
    reduction: Reduction = "sum_by_nonzero_weights",
) -> Callable[..., torch.Tensor]:
    """Return loss(logits, labels, weights=None) = sum_i loss_weights_i * loss_i(logits, labels, weights), a scalar.

    Args:
        loss_keys: one name or several, see `RankingLossKey`.
        loss_weights: one factor per name, by default all 1.
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
    """The position of each example of a flat batch in padded lists. `group_by_rank_id` makes it.

    Example:
        >>> lists = group_by_rank_id(torch.tensor([7, 3, 7]))
        >>> lists.pad(torch.tensor([1.0, 0.0, 2.0]), fill=-1).tolist()
        [[0.0, -1.0], [1.0, 2.0]]
    """

    row: torch.Tensor
    """The list of each example, int64 [B]."""
    position: torch.Tensor
    """Its position in that list, int64 [B]."""
    sizes: torch.Tensor
    """How many examples each list has, int64 [lists]."""

    def pad(self, column: torch.Tensor, *, fill: float) -> torch.Tensor:
        """Return the column as lists, [B] -> [lists, longest], `fill` where a list has ended. Differentiable in `column`."""
        require_shape("RankingLists.column", column, len(self.row))
        shape = (len(self.sizes), int(self.sizes.max()) if len(self.sizes) else 0)
        return column.new_full(shape, fill).index_put((self.row, self.position), column)


def group_by_rank_id(rank_id: torch.Tensor) -> RankingLists:
    """Group examples with equal ids into lists: integers [B] -> lists in order of id, each in order of the batch.

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
