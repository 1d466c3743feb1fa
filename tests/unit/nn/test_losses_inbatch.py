"""Danger: in-batch losses with the wrong sign, as the original's AUC loss has, or that punish items for being popular."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layer_oracle import assert_same, random, sigmoid, softmax, tensor
from monolith import InvalidArgumentError
from monolith.nn import batch_softmax_loss, inbatch_auc_loss

INTERVAL, REWARD = np.array([0.5, 1, 10, 1000, 3]), np.array([1.0, 0, 2, 0.5, 1])


@pytest.mark.parametrize("normalize", [True, False])
def test_batch_softmax(normalize: bool) -> None:
    query, item = random(5, 4), random(5, 4, seed=1)
    loss = batch_softmax_loss(
        tensor(query), tensor(item), tensor(INTERVAL), tensor(REWARD), normalize=normalize, temperature=0.5
    )
    if normalize:
        query, item = (x / np.sqrt((x**2).sum(1, keepdims=True)) for x in (query, item))
    scores = query @ item.T / 0.5 + np.log(np.maximum(INTERVAL, 1))
    assert_same(loss, -(REWARD * np.log(np.diag(softmax(scores)))).sum())


def test_batch_softmax_gradients() -> None:
    query, item = (tensor(random(4, 3, seed=s)).requires_grad_() for s in (0, 1))
    rest = tensor(INTERVAL[:4]), tensor(REWARD[:4])
    assert torch.autograd.gradcheck(lambda q, v: batch_softmax_loss(q, v, *rest, temperature=0.3), (query, item))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_batch_softmax_refuses_a_temperature_that_is_not_positive(temperature: float) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(InvalidArgumentError, match="temperature: expected a number > 0"):
        batch_softmax_loss(x, x, torch.ones(2), torch.ones(2), temperature=temperature)


LABELS = np.array([1, 0, 0.5, -3, -10000, 0])


def test_inbatch_auc_is_a_loss_over_all_pairs() -> None:
    z = random(6)
    pairs = [-np.log(sigmoid(z[p] - z[n])) for p in (0, 2) for n in (1, 3, 5)]
    assert_same(inbatch_auc_loss(tensor(z), tensor(LABELS)), sum(pairs))


def test_inbatch_auc_scales_the_gradient_of_negatives_and_not_the_value() -> None:
    def run(neg_weight: float) -> tuple[float, torch.Tensor]:
        z = tensor(random(6)).requires_grad_()
        loss = inbatch_auc_loss(z, tensor(LABELS), neg_weight=neg_weight)
        loss.backward()
        assert z.grad is not None
        return loss.item(), z.grad

    (full, gradient), (reduced, scaled) = run(1.0), run(0.25)
    assert reduced == pytest.approx(full)
    factor = torch.tensor([1, 0.25, 1, 0.25, 1, 0.25], dtype=torch.float64)
    torch.testing.assert_close(scaled, gradient * factor)
    assert gradient[4] == 0
    assert (gradient[[0, 2]] < 0).all()  # a step downhill raises the positives


def test_inbatch_auc_is_linear_far_below_and_zero_far_above() -> None:
    z = torch.tensor([-500.0, 500.0], requires_grad=True)
    assert inbatch_auc_loss(z, torch.tensor([1.0, 0.0])).item() == 1000
    assert inbatch_auc_loss(z, torch.tensor([0.0, 1.0])).item() == 0


def test_inbatch_auc_without_pairs_is_zero_and_trains_nothing() -> None:
    z = torch.randn(3, requires_grad=True)
    loss = inbatch_auc_loss(z, torch.ones(3))
    loss.backward()
    assert loss.item() == 0
    assert z.grad is not None
    assert not z.grad.any()


@pytest.mark.parametrize("neg_weight", [0.0, 1.5])
def test_inbatch_auc_refuses_other_weights(neg_weight: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"neg_weight: expected a number in \(0, 1\]"):
        inbatch_auc_loss(torch.zeros(2), torch.zeros(2), neg_weight=neg_weight)
