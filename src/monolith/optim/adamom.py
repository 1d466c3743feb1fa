"""Adamom: momentum scaled by a decaying average of squared gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from monolith.optim.optimizer import DenseOptimizer, Tensors, require

__all__ = ["Adamom"]


class Adamom(DenseOptimizer):
    """Momentum over the root of a decaying average of squared gradients, which needs no bias correction.

    With g the gradient after coupled weight decay, g + weight_decay * w:

        m = mom_decay * m + (1 - mom_decay) * g
        v = ada_decay * v + g²
        c = ada_decay * c + 1
        w = w - lr * m / sqrt(v / c + epsilon)

    State per parameter, each of its shape: `m`, `v`, `c`. The rule for rows of a table is `monolith.table.Adamom`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.1]))
        >>> optimizer = Adamom([weight], lr=0.1, ada_decay=0.99, mom_decay=0.9, weight_decay=0.01)
        >>> (0.12 * weight).sum().backward()
        >>> optimizer.step()
        >>> round(weight.item(), 6)
        0.09
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 5e-6,
        ada_decay: float = 0.9999,
        mom_decay: float = 0.99,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        require("lr", lr, 0)
        require("ada_decay", ada_decay, 0, 1)
        require("mom_decay", mom_decay, 0, 1)
        require("epsilon", epsilon, 0)
        require("weight_decay", weight_decay, 0)
        defaults = {
            "lr": lr,
            "ada_decay": ada_decay,
            "mom_decay": mom_decay,
            "epsilon": epsilon,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def _update(self, parameters: list[Tensor], gradients: Tensors, group: dict[str, Any]) -> None:
        m, v, c = self._slots(parameters, "m", "v", "c")
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        torch._foreach_lerp_(m, gradients, 1 - group["mom_decay"])
        torch._foreach_mul_(v, group["ada_decay"])
        torch._foreach_addcmul_(v, gradients, gradients)
        torch._foreach_mul_(c, group["ada_decay"])
        torch._foreach_add_(c, 1)
        scale = torch._foreach_div(v, c)
        torch._foreach_add_(scale, group["epsilon"])
        torch._foreach_sqrt_(scale)
        torch._foreach_addcdiv_(parameters, m, scale, value=-group["lr"])
