"""RMSprop with momentum over the scaled step, in the original's two versions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from monolith.optim.optimizer import DenseOptimizer, Tensors, require

__all__ = ["RMSprop"]


class RMSprop(DenseOptimizer):
    """RMSprop whose momentum holds steps, learning rate included: a new rate acts on new gradients only.

    With g the gradient after coupled weight decay, g + weight_decay * w:

        v = beta2 * v + (1 - beta2) * g²                  with use_v2: v = beta2 * v + g²
        m = beta1 * m + lr * g / sqrt(v + epsilon)        with use_v2: m = beta1 * m + lr * g / (sqrt(v) + epsilon)
        w = w - m

    State per parameter, each of its shape: `m`, `v`. The rules for rows of a table are `monolith.table.RMSprop` and
    `RMSpropV2`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.1]))
        >>> optimizer = RMSprop([weight], lr=0.1, beta1=0.9, beta2=0.9, epsilon=0.1, weight_decay=1.0, use_v2=True)
        >>> (0.12 * weight).sum().backward()
        >>> optimizer.step()
        >>> round(weight.item(), 6)
        0.03125
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 5e-6,
        beta1: float = 0.99,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        use_v2: bool = False,
    ) -> None:
        require("lr", lr, 0)
        require("beta1", beta1, 0, 1)
        require("beta2", beta2, 0, 1)
        require("epsilon", epsilon, 0)
        require("weight_decay", weight_decay, 0)
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": epsilon,
            "weight_decay": weight_decay,
            "use_v2": use_v2,
        }
        super().__init__(params, defaults)

    def _update(self, parameters: list[Tensor], gradients: Tensors, group: dict[str, Any]) -> None:
        m, v = self._slots(parameters, "m", "v")
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        torch._foreach_mul_(v, group["beta2"])
        if group["use_v2"]:
            torch._foreach_addcmul_(v, gradients, gradients)
            scale = torch._foreach_sqrt(v)
            torch._foreach_add_(scale, group["epsilon"])
        else:
            torch._foreach_addcmul_(v, gradients, gradients, value=1 - group["beta2"])
            scale = torch._foreach_add(v, group["epsilon"])
            torch._foreach_sqrt_(scale)
        torch._foreach_mul_(m, group["beta1"])
        torch._foreach_addcdiv_(m, gradients, scale, value=group["lr"])
        torch._foreach_sub_(parameters, m)
