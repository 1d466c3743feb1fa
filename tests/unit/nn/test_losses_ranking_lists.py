"""Danger: a flat batch cut into the wrong lists, and a mixture of losses that forgets a factor or a lambda weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith import InvalidArgumentError, nn

LOGITS, LABELS = torch.tensor([[0.3, -1.0, 2.0]]), torch.tensor([[0.0, 1.0, 2.0]])


@given(st.lists(st.integers(min_value=-3, max_value=3), max_size=20))
def test_lists_are_in_order_of_id_and_items_in_order_of_the_batch(ids: list[int]) -> None:
    column = torch.arange(len(ids), dtype=torch.float32)
    padded = nn.group_by_rank_id(torch.tensor(ids, dtype=torch.int64)).pad(column, fill=-1)
    expected = [[float(i) for i, other in enumerate(ids) if other == id_] for id_ in sorted(set(ids))]
    assert [[value for value in row if value >= 0] for row in padded.tolist()] == expected
    assert padded.shape == (len(expected), max(map(len, expected), default=0))


def test_gradients_flow_back_to_the_flat_batch() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    lists = nn.group_by_rank_id(torch.tensor([5, 4, 5]))
    (lists.pad(logits, fill=0.0) * torch.tensor([[10.0, 0.0], [20.0, 30.0]])).sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [20.0, 10.0, 30.0]


def test_a_mixture_is_the_weighted_sum() -> None:
    weight = nn.create_ndcg_lambda_weight()
    loss_fn = nn.make_loss_fn(["pairwise_logistic", "softmax", "mean_squared"], [1.0, 2.0, 0.5], lambda_weight=weight)
    expected = (
        nn.pairwise_logistic_loss(LOGITS, LABELS, lambda_weight=weight)
        + 2 * nn.softmax_loss(LOGITS, LABELS, lambda_weight=weight)
        + 0.5 * nn.mean_squared_loss(LOGITS, LABELS)
    )
    torch.testing.assert_close(loss_fn(LOGITS, LABELS), expected)


@pytest.mark.parametrize(
    "key",
    [
        "approx_ndcg",
        "list_mle",
        "mean_squared",
        "pairwise_hinge",
        "pairwise_logistic",
        "pairwise_soft_zero_one",
        "sigmoid_cross_entropy",
        "softmax",
    ],
)
def test_every_key_is_the_function_of_its_name(key: Any) -> None:  # noqa: ANN401
    weights = torch.tensor([[2.0]])
    expected = getattr(nn, f"{key}_loss")(LOGITS, LABELS, weights, reduction="sum")
    torch.testing.assert_close(nn.make_loss_fn(key, reduction="sum")(LOGITS, LABELS, weights), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_keys": ["hinge"]}, "loss_keys: expected one of 'approx_ndcg'"),
        ({"loss_keys": []}, "at least one"),
        ({"loss_keys": ["softmax"], "loss_weights": [1.0, 2.0]}, "loss_weights: expected one for each"),
        ({"loss_keys": ["mean_squared"], "lambda_weight": nn.PrecisionLambdaWeight(1)}, "none of the losses"),
        ({"loss_keys": ["softmax"], "lambda_weight": nn.PrecisionLambdaWeight(1)}, "none of the losses"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        nn.make_loss_fn(**arguments)
