"""Danger: batch statistics that leak into serving, or running statistics that never move, as the original's momentum did."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from layer_oracle import assert_same, random, tensor
from monolith import InvalidArgumentError
from monolith.nn import BatchNorm


def test_training_and_evaluation_agree_with_torch() -> None:
    ours, theirs = BatchNorm(4, eps=1e-3, momentum=0.1).double(), nn.BatchNorm1d(4, eps=1e-3, momentum=0.1).double()
    for step in range(3):
        x = tensor(3 * random(1000, 4, seed=step) + 1)
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    # Torch keeps the unbiased variance, n / (n - 1) times ours.
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=2e-3, atol=0)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=2e-3, atol=1e-3)


def test_gradients_agree_with_torch() -> None:
    ours, theirs = BatchNorm(3, eps=1e-3).double(), nn.BatchNorm1d(3, eps=1e-3).double()
    left, right = (tensor(random(6, 3)).requires_grad_() for _ in range(2))
    (ours(left) ** 3).sum().backward()
    (theirs(right) ** 3).sum().backward()
    torch.testing.assert_close(left.grad, right.grad)


def test_all_dimensions_but_the_last_are_one_batch() -> None:
    x = tensor(random(5, 3, 4))
    flat = BatchNorm(4).double()(x.reshape(15, 4)).reshape(5, 3, 4)
    torch.testing.assert_close(BatchNorm(4).double()(x), flat)


def test_stopped_statistics_are_constants_of_the_backward_pass() -> None:
    norm = BatchNorm(1, eps=0.0, stop_grad_of_var_mean=True).double()
    x = tensor([[1.0], [5.0]]).requires_grad_()
    norm(x).sum().backward()
    assert_same(x.grad, [[0.5], [0.5]])  # 1 / standard deviation; without the stop it would be 0


def test_a_share_of_the_running_statistics_can_be_used_in_training() -> None:
    norm = BatchNorm(1, eps=0.0, global_dist_momentum=0.25).double()
    x = np.array([[1.0], [5.0]])
    mean, var = 0.75 * 3 + 0.25 * 0, 0.75 * 4 + 0.25 * 1
    assert_same(norm(tensor(x)), (x - mean) / np.sqrt(var))
    assert_same(norm.running_mean, [0.03])


def test_renorm_has_the_value_of_the_running_and_the_gradient_of_the_batch_statistics() -> None:
    norm, plain = (BatchNorm(3, renorm=renorm).double() for renorm in (True, False))
    x = random(6, 3)
    left, right = tensor(x).requires_grad_(), tensor(x).requires_grad_()
    for module in (norm, plain):
        module.running_mean.fill_(0.3)
        module.running_var.fill_(2.0)
    y = norm(left)
    assert_same(y, (x - 0.3) / np.sqrt(2 + 1e-6))
    stretch = np.sqrt(x.var(0) + 1e-6) / np.sqrt(2 + 1e-6)
    y.square().sum().backward()
    plain(right).backward(2 * y.detach() * tensor(stretch))
    assert right.grad is not None
    assert_same(left.grad, right.grad.numpy())


def test_renorm_and_a_share_of_the_running_statistics_exclude_each_other() -> None:
    with pytest.raises(InvalidArgumentError, match="global_dist_momentum: expected 0 with renorm=True"):
        BatchNorm(3, renorm=True, global_dist_momentum=0.5)
