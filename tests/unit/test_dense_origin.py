"""Danger: dense parameters that are trained on servers by another rule than the script says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.optim import Adamom
from monolith.ps.dense_optimizers import make_optimizer
from monolith.train.dense_origin import server_optimizer

Make = Callable[[list[Tensor]], torch.optim.Optimizer]

SAME: list[Make] = [
    lambda p: torch.optim.SGD(p, lr=0.3),
    lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5, nesterov=True, weight_decay=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.2, initial_accumulator_value=0.5, eps=1e-3),
    lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.6), eps=1e-2, weight_decay=0.2),
]
OTHERS: list[tuple[Make, str]] = [
    (lambda p: torch.optim.AdamW(p), "SGD, Adagrad and Adam.*AdamW"),
    (lambda p: Adamom(p, lr=0.1), "got Adamom"),
    (lambda p: torch.optim.Adam(p, amsgrad=True), "'amsgrad'"),
    (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "'lr_decay'"),
    (lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:]}], lr=0.1), "this SGD has 2"),
]


def trained(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    for _ in range(3):
        parameter.grad = parameter.detach() * 0.5 + 1
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("make", SAME)
def test_servers_do_what_the_optimizer_does(make: Make) -> None:
    here, there = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    optimizer = make([here])
    assert torch.equal(trained(optimizer, here), trained(make_optimizer(server_optimizer(optimizer), [there]), there))


@pytest.mark.parametrize(("make", "said"), OTHERS)
def test_what_servers_cannot_do_is_refused(make: Make, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        server_optimizer(make([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]))
