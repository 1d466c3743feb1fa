"""Activations by name, and the layers under all others: `Dense`, `AddBias` and `BatchNorm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from monolith.config import nearest_name
from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_dims, require_number, require_positive, require_shape

__all__ = [
    "Activation",
    "AddBias",
    "BatchNorm",
    "Dense",
    "Sigmoid2",
    "WeightInitializer",
    "WeightNorm",
    "make_activation",
]

Activation = str | Callable[[], nn.Module] | None
"""A name (see `make_activation`), or a callable that makes a module, such as `nn.ReLU`. None is the identity."""


class Sigmoid2(nn.Module):
    """2 * sigmoid(x): a gate that is 1 at 0, so that it initially neither damps nor amplifies. Shapes [*] -> [*].

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
    """One slope per unit of the last dimension. `nn.PReLU` counts units in dimension 1, which is time in a sequence."""

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
    """Return a new module for `activation`, acting on tensors [*, width].

    Names, in any case: elu, exponential, gelu, hard_sigmoid (clip(x / 5 + 1/2, 0, 1)), leakyrelu (slope 0.3), linear,
    prelu (a learned slope per unit, initially 0), relu, selu, sigmoid, sigmoid2 (2 * sigmoid(x)), softmax, softplus,
    softsign, swish, tanh, thresholdedrelu (x where x > 1, else 0). For other constants pass a callable that makes the module,
    such as `nn.LeakyReLU` or `functools.partial(nn.LeakyReLU, 0.1)`: each layer gets a module of its own.

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
            f"activation: expected a name or a callable that makes a module, such as nn.ReLU, got {activation!r}"
        )
    return made


WeightInitializer = Callable[[torch.Tensor], object]
"""Fills a weight [out, in] in place, as `nn.init.xavier_uniform_` does."""
WeightNorm = Literal["fixed", "learnable"]
"""Each unit's weight vector has length 1 ("fixed"), or a learned length that starts as that of the initial weights."""

_SMALLEST_NORM = 1e-3  # sqrt(1e-6): a unit whose weights are all zero gives zeros, not NaN


class AddBias(nn.Module):
    """y = x + b with a bias for every position of an example: x [B, *shape] -> [B, *shape].

    Args:
        shape: dimensions of one example.
        initializer: fills the bias in place, by default with zeros.

    Example:
        >>> layer = AddBias([2, 3], initializer=nn.init.ones_)
        >>> layer(torch.zeros(5, 2, 3)).sum().item()
        30.0
    """

    def __init__(self, shape: Sequence[int], *, initializer: WeightInitializer = nn.init.zeros_) -> None:
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

    Without weight_norm W' = W. With "fixed" W' = W / max(||W||, 1e-3) unit by unit, with "learnable" that times `scale` [out],
    which starts as the norms of the initial weights, so that at first nothing changes. Plain `nn.Linear` differs in its initial
    values: here Xavier uniform and a bias of zeros.

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
        initializer: WeightInitializer = nn.init.xavier_uniform_,
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
        """Draw the weights again, set the bias to zero and the scale to the norms of the weights."""
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
        """Return what `repr` shows besides the activation."""
        out_features, in_features = self.weight.shape
        norm = f", weight_norm={self.weight_norm!r}" if self.weight_norm else ""
        return f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}{norm}"


class BatchNorm(nn.Module):
    """y = weight * (x - mean) / sqrt(var + eps) + bias, unit by unit of the last dimension: x [*, num_features] -> the same.

    In training mean and (biased) variance are those of the batch, over all dimensions but the last. In evaluation they are the
    running ones, which training moves by running += momentum * (batch - running), as `nn.BatchNorm1d` does.

    Args:
        num_features: size of the last dimension.
        eps: added to the variance.
        momentum: share of the new batch in the running statistics (torch's convention: 0.01 here is 0.99 in Keras).
        affine: whether there are weight and bias.
        renorm: batch renormalisation: in training too the value is that of the running statistics, while the gradient is that
            of the batch statistics. Training and serving then compute the same function, which small batches need.
        global_dist_momentum: share of the running statistics in those used in training. 0 is batch normalisation, 1 uses the
            running ones only.
        stop_grad_of_var_mean: treat the batch statistics as constants in the backward pass.

    Example:
        >>> norm = BatchNorm(1, eps=0.0)
        >>> norm(torch.tensor([[1.0], [3.0]])).flatten().tolist()
        [-1.0, 1.0]
        >>> norm.running_mean
        tensor([0.0200])
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-6,
        momentum: float = 0.01,
        affine: bool = True,
        renorm: bool = False,
        global_dist_momentum: float = 0.0,
        stop_grad_of_var_mean: bool = False,
    ) -> None:
        super().__init__()
        require_positive("BatchNorm.num_features", num_features)
        require_number("BatchNorm.eps", eps, "a number >= 0", holds=eps >= 0)
        require_number("BatchNorm.momentum", momentum, "a number in (0, 1]", holds=0 < momentum <= 1)
        share = global_dist_momentum
        require_number("BatchNorm.global_dist_momentum", share, "a number in [0, 1]", holds=0 <= share <= 1)
        if renorm and global_dist_momentum:
            raise InvalidArgumentError(
                "BatchNorm.global_dist_momentum: expected 0 with renorm=True, which already uses the running statistics, "
                f"got {global_dist_momentum!r}"
            )
        self.eps, self.momentum, self.renorm = eps, momentum, renorm
        self.global_dist_momentum, self.stop_grad_of_var_mean = global_dist_momentum, stop_grad_of_var_mean
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[*, num_features] -> [*, num_features]."""
        require_shape("BatchNorm.x", x, "*", len(self.running_mean))
        wide = x.to(self.running_mean.dtype)  # half precision has too few digits for a variance
        y = self._normalized_by_batch(wide) if self.training else self._normalized_by_running(wide)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight + self.bias
        return y.to(x.dtype)

    def _normalized_by_running(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.running_mean) * (self.running_var + self.eps).rsqrt()

    def _normalized_by_batch(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        mean, var = flat.mean(0), flat.var(0, correction=0)
        if self.stop_grad_of_var_mean:
            mean, var = mean.detach(), var.detach()
        batch_mean, batch_var = mean.detach(), var.detach()
        if self.global_dist_momentum:
            mean = mean.lerp(self.running_mean.clone(), self.global_dist_momentum)
            var = var.lerp(self.running_var.clone(), self.global_dist_momentum)
        y = (x - mean) * (var + self.eps).rsqrt()
        if self.renorm:
            running_std = (self.running_var + self.eps).sqrt()
            stretch = (batch_var + self.eps).sqrt() / running_std
            shift = (batch_mean - self.running_mean) / running_std
            y = y * stretch + shift
        self.running_mean.lerp_(batch_mean, self.momentum)
        self.running_var.lerp_(batch_var, self.momentum)
        return y
