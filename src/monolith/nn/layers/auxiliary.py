"""Losses that layers have of their own: sparsity of routes, load of experts, cost of dimensions."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn

__all__ = ["HasAuxiliaryLoss", "auxiliary_loss"]


@runtime_checkable
class HasAuxiliaryLoss(Protocol):
    """A module with a loss of its own, which `auxiliary_loss` finds."""

    def auxiliary_loss(self) -> torch.Tensor:
        """The layer's own loss, a scalar."""


def auxiliary_loss(model: nn.Module) -> torch.Tensor:
    """The sum of the losses that the modules of `model` have of their own, a scalar; 0 if there are none.

    Call it after the forward pass and add it to the loss: a layer's loss has no effect unless someone does.

    Example:
        >>> from monolith.nn import IRazor
        >>> model = nn.Sequential(IRazor(2, [0, 4], feature_weight=[1.0, 3.0]), nn.Flatten(), nn.Linear(8, 1))
        >>> loss = model(torch.ones(5, 2, 4)).square().mean() + 0.01 * auxiliary_loss(model)
        >>> auxiliary_loss(model).item()
        8.0
    """
    total: torch.Tensor | None = None
    for module in model.modules():
        if isinstance(module, HasAuxiliaryLoss):
            loss = module.auxiliary_loss()
            total = loss if total is None else total + loss
    if total is None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return torch.zeros((), device=device)
    return total
