"""Danger: task weights trained by the model's loss, or the model by the weights' loss; a weight that never moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layer_oracle import assert_same, random, softmax, tensor
from monolith import InvalidArgumentError
from monolith.nn import GradNorm


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_formula(power: float, relative: bool) -> None:
    balance = GradNorm(["a", "b", "c"], scale=0.3, loss_pow=power, relative_diff=relative).double()
    v, directions = random(3), random(3, 4, 2)
    with torch.no_grad():
        balance.logits.copy_(tensor(v))
    shared = [tensor(random(4)).requires_grad_(), tensor(random(2)).requires_grad_()]
    left, right = np.abs(directions[:, :, 0]), directions[:, :2, 1]
    losses = {
        name: (tensor(left[i]) * shared[0]).sum() + (tensor(right[i]) * shared[1]).sum() for i, name in enumerate("abc")
    }
    gnorm_loss, weighted_loss = balance(losses, shared)
    w = softmax(v)
    pulls = w * np.sqrt((left**2).sum(1) + (right**2).sum(1))
    difference = (pulls - pulls.mean()) / (pulls.mean() + 1e-6) if relative else pulls - pulls.mean()
    assert_same(gnorm_loss, 0.3 * (np.abs(difference) ** power).sum())
    assert_same(weighted_loss, sum(w[i] * losses[name].item() for i, name in enumerate("abc")))


def test_each_loss_trains_its_own_parameters_only() -> None:
    shared = torch.tensor([1.0, 2.0], requires_grad=True)
    balance = GradNorm(["strong", "weak"])
    losses = {"strong": (10 * shared**2).sum(), "weak": shared.sum()}
    gnorm_loss, weighted_loss = balance(losses, shared)
    weighted_loss.backward(retain_graph=True)
    assert balance.logits.grad is None
    assert shared.grad is not None
    before = shared.grad.clone()
    gnorm_loss.backward()
    assert torch.equal(shared.grad, before)
    assert balance.logits.grad is not None
    # A step downhill lowers the weight of the task that pulls harder.
    assert balance.logits.grad[0] > 0 > balance.logits.grad[1]


def test_losses_must_have_the_declared_names() -> None:
    with pytest.raises(InvalidArgumentError, match=r"losses: expected \['a', 'b'\], got \['a'\]"):
        GradNorm(["a", "b"])({"a": torch.zeros(())}, torch.zeros(1))
    with pytest.raises(InvalidArgumentError, match="loss_names: expected different names"):
        GradNorm(["a", "a"])
