"""Dense parameters of several workers: on the servers, where the optimizer is too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from monolith.errors import ConfigError
from monolith.ps.dense_optimizers import DenseAdagrad, DenseAdam, DenseSgd

__all__ = ["server_optimizer"]

_REFUSED = ("amsgrad", "maximize", "lr_decay", "dampening")


def server_optimizer(optimizer: torch.optim.Optimizer) -> DenseSgd | DenseAdagrad | DenseAdam:
    """The optimizer of servers that does what `optimizer` does here; `ConfigError` if they have none.

    Example:
        >>> parameters = [torch.nn.Parameter(torch.zeros(1))]
        >>> server_optimizer(torch.optim.Adam(parameters, lr=0.01)).learning_rate
        0.01
    """
    name = type(optimizer).__name__
    if len(optimizer.param_groups) != 1:
        raise ConfigError(
            f"optimizer: servers have one group of settings, this {name} has {len(optimizer.param_groups)}; give one"
        )
    (settings,) = optimizer.param_groups
    for option in _REFUSED:
        if settings.get(option):
            raise ConfigError(f"optimizer: servers do not have {option!r} of {name}; leave it out")
    return _equal_one(optimizer, settings)


def _equal_one(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> DenseSgd | DenseAdagrad | DenseAdam:
    rate, decay = float(settings["lr"]), float(settings.get("weight_decay", 0.0))
    # By the exact class: a subclass computes something else.
    if type(optimizer) is torch.optim.SGD:
        momentum, nesterov = float(settings["momentum"]), bool(settings["nesterov"])
        return DenseSgd(learning_rate=rate, weight_decay=decay, momentum=momentum, nesterov=nesterov)
    if type(optimizer) is torch.optim.Adagrad:
        start, epsilon = float(settings["initial_accumulator_value"]), float(settings["eps"])
        return DenseAdagrad(learning_rate=rate, weight_decay=decay, initial_accumulator=start, epsilon=epsilon)
    if type(optimizer) is torch.optim.Adam:
        beta1, beta2 = map(float, settings["betas"])
        epsilon = float(settings["eps"])
        return DenseAdam(learning_rate=rate, weight_decay=decay, beta1=beta1, beta2=beta2, epsilon=epsilon)
    raise ConfigError(
        f"optimizer: several workers share dense parameters on the servers, which have SGD, Adagrad and Adam of torch.optim; "
        f"got {type(optimizer).__name__}"
    )
