"""Activations by name, with the constants the names have in the original."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from monolith.config import nearest_name
from monolith.errors import InvalidArgumentError

__all__ = ["Activation", "Sigmoid2", "make_activation"]

Activation = str | Callable[[], nn.Module] | None
"""A name (see `make_activation`), or anything that makes a module when called, as `nn.ReLU` does; None is the identity."""


class Sigmoid2(nn.Module):
    """2 * sigmoid(x): a gate that is 1 at 0, so that it neither damps nor amplifies before it has learned to. Shapes [*] -> [*].

    Example:
        >>> Sigmoid2()(torch.zeros(2)).tolist()
        [1.0, 1.0]
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[*] -> [*]."""
        return 2 * torch.sigmoid(x)


class _Exponential(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class _HardSigmoid(nn.Module):
    """Slope 1/5, where `nn.Hardsigmoid` has 1/6."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (0.2 * x + 0.5).clamp(0, 1)


class _PReLU(nn.Module):
    """One slope per unit of the last dimension; `nn.PReLU` would count units in dimension 1, time in a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) - self.slope * F.relu(-x)


_BY_NAME: dict[str, Callable[[int], nn.Module]] = {
    "elu": lambda _: nn.ELU(),
    "exponential": lambda _: _Exponential(),
    "gelu": lambda _: nn.GELU(),
    "hard_sigmoid": lambda _: _HardSigmoid(),
    "leakyrelu": lambda _: nn.LeakyReLU(0.3),
    "linear": lambda _: nn.Identity(),
    "prelu": _PReLU,
    "relu": lambda _: nn.ReLU(),
    "selu": lambda _: nn.SELU(),
    "sigmoid": lambda _: nn.Sigmoid(),
    "sigmoid2": lambda _: Sigmoid2(),
    "softmax": lambda _: nn.Softmax(dim=-1),
    "softplus": lambda _: nn.Softplus(),
    "softsign": lambda _: nn.Softsign(),
    "swish": lambda _: nn.SiLU(),
    "tanh": lambda _: nn.Tanh(),
    "thresholdedrelu": lambda _: nn.Threshold(1.0, 0.0),
}


def make_activation(activation: Activation, width: int) -> nn.Module:
    """A new module for `activation`, acting on tensors [*, width].

    Names, in any case: elu, exponential, gelu, hard_sigmoid (clip(x / 5 + 1/2, 0, 1)), leakyrelu (slope 0.3), linear,
    prelu (a learned slope per unit, at first 0), relu, selu, sigmoid, sigmoid2 (2 * sigmoid(x)), softmax, softplus,
    softsign, swish, tanh, thresholdedrelu (x where x > 1, else 0). For other constants pass what makes the module, as
    `nn.LeakyReLU` or `functools.partial(nn.LeakyReLU, 0.1)`: each layer gets a module of its own.

    Example:
        >>> make_activation("ReLU", 4)
        ReLU()
        >>> make_activation(nn.LeakyReLU, 4)
        LeakyReLU(negative_slope=0.01)
    """
    if activation is None:
        return nn.Identity()
    if isinstance(activation, str):
        make = _BY_NAME.get(activation.lower())
        if make is None:
            near = nearest_name(activation.lower(), _BY_NAME)
            known = f"did you mean {near!r}?" if near else f"known names: {', '.join(_BY_NAME)}"
            raise InvalidArgumentError(f"activation: unknown name {activation!r}; {known}")
        return make(width)
    made = None if isinstance(activation, nn.Module) or not callable(activation) else activation()
    if not isinstance(made, nn.Module):
        raise InvalidArgumentError(
            f"activation: expected a name or what makes a module when called without arguments, as nn.ReLU, got {activation!r}"
        )
    return made
