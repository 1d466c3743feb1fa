"""Danger: a ranking loss that counts padding, compares the wrong pairs, or weighs them by the wrong metric."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from layer_oracle import Array, assert_same, random, sigmoid, tensor
from monolith import nn
from monolith.nn.losses.ranking import Reduction

LOGITS = random(4, 5)
LABELS = np.array([[2, 0, 1, 0, 3.0], [1, 0, -1, -1, -1], [0, 0, 0, -1, -1], [-1, -1, -1, -1, -1]])
WEIGHTS = np.abs(random(4, 5, seed=1)) + 0.1
LIST_WEIGHTS = np.array([[1.0], [2.0], [0.5], [3.0]])

Terms = list[tuple[float, float]]


def reduced(terms: Terms, reduction: str = "sum_by_nonzero_weights", slots: int = 1) -> float:
    total = sum(weight * loss for weight, loss in terms)
    count = {
        "sum": 1,
        "mean": sum(weight for weight, _ in terms),
        "sum_by_nonzero_weights": sum(weight != 0 for weight, _ in terms),
        "sum_over_batch_size": slots,
    }[reduction]
    return total / count


def ndcg_discount(rank: float) -> float:
    return 1 / np.log(1 + rank)


def max_dcg(labels: Array, gain: Callable[[float], float], discount: Callable[[float], float], topn: int = 99) -> float:
    return sum(gain(label) * discount(r) for r, label in enumerate(sorted(labels)[::-1][:topn], start=1))


def lists() -> list[tuple[Array, Array, Array]]:
    """Only what is there: logits, labels and weights of each list."""
    return [(z[y >= 0], y[y >= 0], w[y >= 0]) for z, y, w in zip(LOGITS, LABELS, WEIGHTS, strict=True)]


def ranks(z: Array) -> Array:
    return np.argsort(np.argsort(-z)) + 1


def pair_terms(loss: Callable[[float], float], weigh: Callable[[Array, Array, int, int], float]) -> Terms:
    return [
        (len(z) * w[i] * weigh(z, y, i, j), loss(z[i] - z[j]))
        for z, y, w in lists()
        for i, j in itertools.permutations(range(len(z)), 2)
        if y[i] > y[j]
    ]


PAIRWISE: dict[str, tuple[Any, Callable[[float], float]]] = {
    "hinge": (nn.pairwise_hinge_loss, lambda d: max(0.0, 1 - d)),
    "logistic": (nn.pairwise_logistic_loss, lambda d: np.log1p(np.exp(-d))),
    "soft_zero_one": (nn.pairwise_soft_zero_one_loss, lambda d: 1 - sigmoid(np.array(d))),
}


@pytest.mark.parametrize("name", PAIRWISE)
def test_pairwise_losses_weigh_by_the_difference_of_labels(name: str) -> None:
    function, loss = PAIRWISE[name]
    expected = reduced(pair_terms(loss, lambda z, y, i, j: y[i] - y[j]))
    assert_same(function(tensor(LOGITS), tensor(LABELS), tensor(WEIGHTS)), expected)


@pytest.mark.parametrize("smooth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("topn", [99, 2])
@pytest.mark.parametrize("metric", ["ndcg", "mrr"])
def test_lambda_weights_are_the_change_of_the_metric(metric: str, topn: int, smooth: float) -> None:
    gain, discount = {
        "ndcg": (lambda y: 2**y - 1, ndcg_discount),
        "mrr": (lambda y: y, lambda r: 1 / r),
    }[metric]

    def weigh(z: Array, y: Array, i: int, j: int) -> float:
        ri, rj = ranks(z)[i], ranks(z)[j]
        if min(ri, rj) > topn:
            return 0.0
        distance = abs(ri - rj)
        u = abs(discount(distance) - discount(distance + 1))
        v = abs(discount(ri) - discount(rj))
        return (gain(y[i]) - gain(y[j])) / max_dcg(y, gain, discount, topn) * ((1 - smooth) * u + smooth * v)

    create = {"ndcg": nn.create_ndcg_lambda_weight, "mrr": nn.create_mrr_lambda_weight}[metric]
    loss = nn.pairwise_logistic_loss(
        tensor(LOGITS), tensor(LABELS), tensor(WEIGHTS), lambda_weight=create(topn=topn, smooth_fraction=smooth)
    )
    assert_same(loss, reduced(pair_terms(PAIRWISE["logistic"][1], weigh)))


def test_precision_weights_count_swaps_over_the_cut() -> None:
    def weigh(z: Array, y: Array, i: int, j: int) -> float:
        inside = ranks(z) <= 2
        return float(((y[i] >= 1) != (y[j] >= 1)) and inside[i] != inside[j])

    weight = nn.PrecisionLambdaWeight(2)
    loss = nn.pairwise_hinge_loss(tensor(LOGITS), tensor(LABELS), tensor(WEIGHTS), lambda_weight=weight)
    assert_same(loss, reduced(pair_terms(PAIRWISE["hinge"][1], weigh)))


def log_softmax(z: Array) -> Array:
    return z - np.log(np.exp(z).sum())


def test_softmax() -> None:
    terms = []
    for z, y, w in lists()[:3]:
        target = y * w
        terms.append((1.0 if target.any() else 0.0, -(target * log_softmax(z)).sum()))
    assert_same(nn.softmax_loss(tensor(LOGITS), tensor(LABELS), tensor(WEIGHTS)), reduced(terms))


def test_softmax_with_the_individual_weights_of_ndcg() -> None:
    total = 0.0
    for z, y, _ in lists()[:2]:
        target = (2**y - 1) / max_dcg(y, lambda v: 2**v - 1, ndcg_discount) * ndcg_discount(ranks(z))
        total -= (target * log_softmax(z)).sum()
    loss = nn.softmax_loss(
        tensor(LOGITS), tensor(LABELS), lambda_weight=nn.create_ndcg_lambda_weight(), reduction="sum"
    )
    assert_same(loss, total)


POINTWISE: dict[str, tuple[Any, Callable[[float, float], float]]] = {
    "sigmoid": (nn.sigmoid_cross_entropy_loss, lambda z, y: np.log1p(np.exp(z)) - y * z),
    "squared": (nn.mean_squared_loss, lambda z, y: (z - y) ** 2),
}


@pytest.mark.parametrize("reduction", ["sum_by_nonzero_weights", "sum", "mean", "sum_over_batch_size"])
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_losses_and_reductions(name: str, reduction: Reduction) -> None:
    function, loss = POINTWISE[name]
    terms = [(w[i], loss(z[i], y[i])) for z, y, w in lists() for i in range(len(z))]
    expected = reduced(terms, reduction, LOGITS.size)
    assert_same(function(tensor(LOGITS), tensor(LABELS), tensor(WEIGHTS), reduction=reduction), expected)


def plackett_luce(z: Array, y: Array, weigh: Callable[[int], float]) -> float:
    order = np.argsort(-y, kind="stable")
    return sum(weigh(p + 1) * (np.log(np.exp(z[order[p:]]).sum()) - z[order[p]]) for p in range(len(z)))


def test_list_mle() -> None:
    terms = [(LIST_WEIGHTS[i, 0], plackett_luce(z, y, lambda p: 1.0)) for i, (z, y, _) in enumerate(lists()[:3])]
    assert_same(nn.list_mle_loss(tensor(LOGITS), tensor(LABELS), tensor(LIST_WEIGHTS)), reduced(terms))


def test_position_aware_list_mle() -> None:
    terms = [(1.0, plackett_luce(z, y, lambda p: 2.0 ** (5 - p) - 1)) for z, y, _ in lists()[:3]]
    loss = nn.list_mle_loss(tensor(LOGITS), tensor(LABELS), lambda_weight=nn.ListMLELambdaWeight(5))
    assert_same(loss, reduced(terms))


def test_approx_ndcg() -> None:
    terms = []
    for i, (z, y, _) in enumerate(lists()[:2]):
        rank = 0.5 + sigmoid(10 * (z[None] - z[:, None])).sum(1)
        dcg = ((2**y - 1) / np.log1p(rank)).sum()
        terms.append((LIST_WEIGHTS[i, 0], -dcg / max_dcg(y, lambda v: 2**v - 1, ndcg_discount)))
    assert_same(nn.approx_ndcg_loss(tensor(LOGITS), tensor(LABELS), tensor(LIST_WEIGHTS)), reduced(terms))


ALL = [
    *(pytest.param(function, id=name) for name, (function, _) in (PAIRWISE | POINTWISE).items()),
    nn.softmax_loss,
    nn.list_mle_loss,
    nn.approx_ndcg_loss,
]


@pytest.mark.parametrize("function", ALL)
def test_padding_changes_nothing_and_gets_no_gradient(function: Any) -> None:  # noqa: ANN401
    logits = tensor(LOGITS).requires_grad_()
    loss = function(logits, tensor(LABELS))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[tensor(LABELS) < 0].any()
    wider = (
        tensor(np.concatenate([LOGITS, 50 + random(4, 3)], 1)),
        tensor(np.pad(LABELS, ((0, 0), (0, 3)), constant_values=-1)),
    )
    torch.testing.assert_close(function(*wider), loss.detach())


@pytest.mark.parametrize("function", ALL)
def test_gradients(function: Any) -> None:  # noqa: ANN401
    logits = tensor(LOGITS[:2]).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: function(z, tensor(LABELS[:2])), (logits,))


@pytest.mark.parametrize("function", ALL)
def test_lists_with_nothing_to_rank_have_no_loss(function: Any) -> None:  # noqa: ANN401
    loss = function(tensor(LOGITS), torch.full((4, 5), -1.0, dtype=torch.float64))
    assert loss.item() == 0


@pytest.mark.parametrize("function", ALL)
def test_large_logits_stay_finite(function: Any) -> None:  # noqa: ANN401
    logits = (1e4 * torch.tensor(LOGITS, dtype=torch.float32)).requires_grad_()
    function(logits, torch.tensor(LABELS, dtype=torch.float32)).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
