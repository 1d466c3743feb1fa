"""The layers under all others: a linear map with activation and weight normalisation, and a bias of any shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_dims, require_number, require_positive, require_shape
from monolith.nn.layers.activations import Activation, make_activation

__all__ = ["AddBias", "Dense", "Initializer", "WeightNorm"]

Initializer = Callable[[torch.Tensor], object]
"""Fills a weight [out, in] in place, as `nn.init.xavier_uniform_` does."""
WeightNorm = Literal["fixed", "learnable"]
"""Each unit's weight vector has length 1 ("fixed"), or a learned length that starts as that of the initial weights."""

_SMALLEST_NORM = 1e-3  # sqrt(1e-6): a unit whose weights are all zero gives zeros, not NaN


class AddBias(nn.Module):
    """y = x + b with a bias for every position of an example: x [B, *shape] -> [B, *shape].

    Args:
        shape: dimensions of one example.
        initializer: fills the bias in place; zeros unless told.

    Example:
        >>> layer = AddBias([2, 3], initializer=nn.init.ones_)
        >>> layer(torch.zeros(5, 2, 3)).sum().item()
        30.0
    """

    def __init__(self, shape: Sequence[int], *, initializer: Initializer = nn.init.zeros_) -> None:
        super().__init__()
        require_dims("AddBias.shape", shape)
        self.initializer = initializer
        self.bias = nn.Parameter(torch.empty(*shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the bias again."""
        self.initializer(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, *shape] -> [B, *shape]."""
        require_shape("AddBias.x", x, "B", *self.bias.shape)
        return x + self.bias


class Dense(nn.Module):
    """y = activation(x W' + b), where the rows of `weight` [out, in] may be normalised first: x [*, in] -> [*, out].

    W' = W; with weight_norm "fixed" W' = W / max(||W||, 1e-3) unit by unit; with "learnable" that times `scale` [out], which
    starts as the norms of the initial weights, so that at first nothing changes. Plain `nn.Linear` differs in its
    initial values: here Xavier uniform and a bias of zeros.

    Args:
        in_features: size of the last dimension of x.
        out_features: number of units.
        activation: a name or a maker of modules, see `make_activation`.
        bias: whether to add b.
        initializer: fills the weight [out, in] in place.
        weight_norm: None, "fixed" or "learnable".
        inactive_relu_decay: if given, `inactive_relu` [out] follows, in training, each unit's share of outputs that are
            zero: inactive += decay * (share of this batch - inactive). 1 is a dead unit. Only with relu.

    Example:
        >>> layer = Dense(2, 1, weight_norm="fixed", initializer=lambda w: w.data.copy_(torch.tensor([[30.0, 40.0]])))
        >>> layer(torch.tensor([[1.0, 1.0]])).detach()
        tensor([[1.4000]])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = None,
        bias: bool = True,
        initializer: Initializer = nn.init.xavier_uniform_,
        weight_norm: WeightNorm | None = None,
        inactive_relu_decay: float | None = None,
    ) -> None:
        super().__init__()
        require_positive("Dense.in_features", in_features)
        require_positive("Dense.out_features", out_features)
        require_choice("Dense.weight_norm", weight_norm, (None, *get_args(WeightNorm)))
        self.initializer, self.weight_norm, self.inactive_relu_decay = initializer, weight_norm, inactive_relu_decay
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.scale = nn.Parameter(torch.empty(out_features)) if weight_norm == "learnable" else None
        self.activation = make_activation(activation, out_features)
        if inactive_relu_decay is not None:
            share = inactive_relu_decay
            require_number("Dense.inactive_relu_decay", share, "a number in (0, 1]", holds=0 < share <= 1)
            if not isinstance(self.activation, nn.ReLU):
                raise InvalidArgumentError(
                    f"Dense.inactive_relu_decay: needs activation 'relu', got {activation!r}; others have no dead units"
                )
            self.register_buffer("inactive_relu", torch.zeros(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights again; bias zero, scale the norms of the weights."""
        self.initializer(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.scale is not None:
            with torch.no_grad():
                self.scale.copy_(self.weight.norm(dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[*, in] -> [*, out]."""
        require_shape("Dense.x", x, "*", self.weight.shape[1])
        weight: torch.Tensor = self.weight
        if self.weight_norm is not None:
            weight = F.normalize(weight, dim=1, eps=_SMALLEST_NORM)
        if self.scale is not None:
            weight = weight * self.scale.unsqueeze(1)
        y: torch.Tensor = self.activation(F.linear(x, weight, self.bias))
        if self.inactive_relu_decay is not None and self.training:
            self._follow_inactive(y.detach())
        return y

    def _follow_inactive(self, y: torch.Tensor) -> None:
        inactive = self.get_buffer("inactive_relu")
        share = (y == 0).reshape(-1, y.shape[-1]).to(inactive.dtype).mean(0)
        inactive.lerp_(share, self.inactive_relu_decay or 0.0)

    def extra_repr(self) -> str:
        """What `repr` shows besides the activation."""
        out_features, in_features = self.weight.shape
        norm = f", weight_norm={self.weight_norm!r}" if self.weight_norm else ""
        return f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}{norm}"
