"""The optimizers that a server has for dense parameters, chosen by name with a typed configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from monolith.config import Config, Fraction, NonNegative, Positive

__all__ = ["DenseAdagrad", "DenseAdam", "DenseOptimizer", "DenseSgd", "make_optimizer"]


class DenseSgd(Config):
    """`torch.optim.SGD`.

    Example:
        >>> DenseSgd(learning_rate=0.1).momentum
        0.0
    """

    kind: Literal["sgd"] = "sgd"
    learning_rate: Positive = 0.01
    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> DenseSgd:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class DenseAdagrad(Config):
    """`torch.optim.Adagrad`.

    Example:
        >>> DenseAdagrad().initial_accumulator
        0.1
    """

    kind: Literal["adagrad"] = "adagrad"
    learning_rate: Positive = 0.01
    initial_accumulator: NonNegative = 0.1
    epsilon: Positive = 1e-10
    weight_decay: NonNegative = 0.0


class DenseAdam(Config):
    """`torch.optim.Adam`.

    Example:
        >>> DenseAdam().beta1
        0.9
    """

    kind: Literal["adam"] = "adam"
    learning_rate: Positive = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.0


DenseOptimizer = Annotated[DenseSgd | DenseAdagrad | DenseAdam, Field(discriminator="kind")]
"""Any of the above."""


def make_optimizer(
    config: DenseSgd | DenseAdagrad | DenseAdam, parameters: Sequence[torch.Tensor]
) -> torch.optim.Optimizer:
    """The optimizer of `parameters` that `config` describes."""
    rate, decay = config.learning_rate, config.weight_decay
    match config:
        case DenseSgd():
            return torch.optim.SGD(
                parameters, lr=rate, momentum=config.momentum, nesterov=config.nesterov, weight_decay=decay
            )
        case DenseAdagrad():
            return torch.optim.Adagrad(
                parameters,
                lr=rate,
                initial_accumulator_value=config.initial_accumulator,
                eps=config.epsilon,
                weight_decay=decay,
            )
        case DenseAdam():
            betas = (config.beta1, config.beta2)
            return torch.optim.Adam(parameters, lr=rate, betas=betas, eps=config.epsilon, weight_decay=decay)
