"""Danger: an optimizer that is no proper torch optimizer: state lost on resume, gradients changed, sparse ones taken in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.optim import Adamom, RMSprop, Shampoo

# Shampoo with everything in reach of a few steps: renewed statistics, renewed preconditioners, the blend.
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamom": lambda params: Adamom(params, lr=0.02, mom_decay=0.9, weight_decay=0.01),
    "rmsprop": lambda params: RMSprop(params, lr=0.003, beta1=0.9, weight_decay=0.01),
    "rmsprop v2": lambda params: RMSprop(params, lr=0.01, beta1=0.9, use_v2=True),
    "shampoo": lambda params: Shampoo(params, lr=0.01, warmup=2, tau_1=3, tau_2=2, eigen_head=1, eigen_tail=1),
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (net(inputs)[:, 0] - inputs.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MAKERS)
def test_a_saved_state_continues_exactly(name: str) -> None:
    net = model()
    optimizer = MAKERS[name](net.parameters())
    train(net, optimizer, range(5))
    resumed_net = model()
    resumed_net.load_state_dict(net.state_dict())
    resumed = MAKERS[name](resumed_net.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(resumed_net, resumed, range(5, 12)) == train(net, optimizer, range(5, 12))


@pytest.mark.parametrize("name", MAKERS)
def test_the_loss_goes_down(name: str) -> None:
    net = model()
    losses = train(net, MAKERS[name](net.parameters()), range(300))
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])


@pytest.mark.parametrize("name", MAKERS)
def test_a_closure_computes_loss_and_gradients(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = MAKERS[name]([weight])

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert weight.detach().max() < 1


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_stay_and_parameters_without_one_are_left_alone(name: str) -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = MAKERS[name]([used, unused])
    (3 * used).sum().backward()
    for _ in range(4):
        optimizer.step()
    assert used.grad is not None
    assert used.grad.tolist() == [3.0, 3.0]
    assert unused.tolist() == [1.0, 1.0]
    assert unused not in optimizer.state


@pytest.mark.parametrize("name", MAKERS)
def test_sparse_gradients_are_refused_before_anything_changes(name: str) -> None:
    dense, embedding = torch.nn.Parameter(torch.ones(2)), torch.nn.Embedding(5, 2, sparse=True)
    optimizer = MAKERS[name]([dense, *embedding.parameters()])
    (dense.sum() + embedding(torch.tensor([1])).sum()).backward()
    with pytest.raises(InvalidArgumentError, match=r"expected dense gradients, got one of layout torch\.sparse_coo"):
        optimizer.step()
    assert dense.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", MAKERS)
def test_half_precision_parameters(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer = MAKERS[name]([weight])
    for _ in range(6):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert torch.isfinite(weight).all()
    assert weight.detach().max() < 1


BAD: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    *((kind, {"lr": -0.1}) for kind in (Adamom, RMSprop, Shampoo)),
    *((Adamom, {name: 1.5}) for name in ("ada_decay", "mom_decay")),
    *((RMSprop, {name: -0.5}) for name in ("beta1", "beta2", "epsilon", "weight_decay")),
    *((Shampoo, {name: -1}) for name in ("beta_1", "beta_2", "warmup", "eigen_head", "eigen_tail")),
    *((Shampoo, {name: 0}) for name in ("tau_1", "tau_2", "damping_epsilon")),
    (Adamom, {"lr": float("nan")}),
]


@pytest.mark.parametrize(("kind", "setting"), BAD)
def test_settings_out_of_range_are_refused_by_name(kind: type[torch.optim.Optimizer], setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(InvalidArgumentError, match=f"^{name}: expected"):
        kind([torch.nn.Parameter(torch.ones(1))], **setting)
