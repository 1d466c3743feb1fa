"""Sparse optimizers: one step per unique id and call, run inside the core on the rows themselves.

Notation: `w` weights, `g` the summed gradient of the id, `lr` the learning rate of the call. `weight_decay` is coupled
(`g + weight_decay * w`) unless stated otherwise. Optimizer state is kept per row under the slot names given below.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from monolith.config import Config, Fraction, NonNegative, Positive

__all__ = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamom",
    "Amsgrad",
    "BatchSoftmax",
    "DelayCompensation",
    "DynamicWdAdagrad",
    "Ftrl",
    "GroupAdagrad",
    "GroupFtrl",
    "Momentum",
    "MovingAverage",
    "Optimizer",
    "RMSprop",
    "RMSpropV2",
    "RowwiseAdagrad",
    "SGD",
]


class _WithLearningRate(Config):
    learning_rate: NonNegative
    """Used when a call names no learning rate of its own."""


class SGD(_WithLearningRate):
    """w -= lr * g. No state, no weight decay."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: NonNegative = 0.01


class Momentum(_WithLearningRate):
    """`n' = momentum * n - lr * (g + weight_decay * w), w += n'`, or with nesterov `w += (1 + momentum) * n' - momentum * n`.

    Slot: `n`.
    """

    kind: Literal["momentum"] = "momentum"
    learning_rate: NonNegative = 0.01
    momentum: Fraction = 0.9
    nesterov: bool = False
    weight_decay: NonNegative = 0.0


class Adagrad(_WithLearningRate):
    """`norm += g², w -= lr * g / sqrt(norm)`, with g after weight decay. Slot: `norm`."""

    kind: Literal["adagrad"] = "adagrad"
    learning_rate: NonNegative = 0.05
    initial_accumulator_value: Positive = 0.1
    weight_decay: NonNegative = 0.0


class DynamicWdAdagrad(_WithLearningRate):
    """Adagrad whose weight decay is coupled, or decoupled: `norm += g², w -= lr * g / sqrt(norm) + lr * weight_decay * w`.

    Slot: `norm`.
    """

    kind: Literal["dynamic_wd_adagrad"] = "dynamic_wd_adagrad"
    learning_rate: NonNegative = 0.05
    initial_accumulator_value: Positive = 0.1
    weight_decay: NonNegative = 0.0
    decouple_weight_decay: bool = False


class RowwiseAdagrad(_WithLearningRate):
    """One accumulator per row: `norm += mean(g²), w -= lr * g / (sqrt(norm) + epsilon)`. Slot: `norm` (scalar)."""

    kind: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    learning_rate: NonNegative = 0.01
    initial_accumulator_value: NonNegative = 0.0
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.0


class Adadelta(_WithLearningRate):
    """Adadelta with averaging ratio rho. Slots: `accum`, `accum_update`.

    `accum = rho * accum + (1 - rho) * g², u = sqrt(accum_update + epsilon) / sqrt(accum + epsilon) * g, w -= lr * u,
    accum_update = rho * accum_update + (1 - rho) * u²`.
    """

    kind: Literal["adadelta"] = "adadelta"
    learning_rate: NonNegative = 0.01
    averaging_ratio: Fraction = 0.9
    epsilon: Positive = 0.01
    weight_decay: NonNegative = 0.0


class Adam(_WithLearningRate):
    """Adam with per-row bias correction. Slots: `m`, `v`, `beta1_power`, `beta2_power` (scalars).

    `w -= lr * sqrt(1 - beta2_power) / (1 - beta1_power) * m / (sqrt(v) + epsilon)`. With nesterov the numerator is
    `(1 - beta1) * g + beta1 * m`.
    """

    kind: Literal["adam"] = "adam"
    learning_rate: NonNegative = 0.01
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    epsilon: Positive = 0.01
    nesterov: bool = False
    weight_decay: NonNegative = 0.0


class Amsgrad(_WithLearningRate):
    """Adam that divides by the largest `v` seen. Slots: `m`, `v`, `vhat`, `beta1_power`, `beta2_power` (scalars)."""

    kind: Literal["amsgrad"] = "amsgrad"
    learning_rate: NonNegative = 0.01
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    epsilon: Positive = 0.01
    nesterov: bool = False
    weight_decay: NonNegative = 0.0


class Adamom(_WithLearningRate):
    """`m = mom * m + (1 - mom) * g, v = ada * v + g², c = ada * c + 1, w -= lr * m / sqrt(v / c + epsilon)`.

    Slots: `m`, `v`, `c` (scalar).
    """

    kind: Literal["adamom"] = "adamom"
    learning_rate: NonNegative = 5e-6
    ada_decay: Fraction = 0.9999
    mom_decay: Fraction = 0.99
    epsilon: Positive = 1e-6
    weight_decay: NonNegative = 0.0


class RMSprop(_WithLearningRate):
    """`n = momentum * n + (1 - momentum) * g², w -= lr * g / (sqrt(n) + 1)`. Slot: `n`."""

    kind: Literal["rmsprop"] = "rmsprop"
    learning_rate: NonNegative = 0.01
    momentum: Fraction = 0.9
    weight_decay: NonNegative = 0.0


class RMSpropV2(_WithLearningRate):
    """`n = momentum * n + g², w -= lr * g / (sqrt(n) + 1)`. Slot: `n`."""

    kind: Literal["rmsprop_v2"] = "rmsprop_v2"
    learning_rate: NonNegative = 0.01
    momentum: Fraction = 0.9
    weight_decay: NonNegative = 0.0


class Ftrl(_WithLearningRate):
    """FTRL-proximal. Slots: `zero`, `norm`.

    `n' = norm + g², zero += g - (sqrt(n') - sqrt(norm)) / lr * w,
    w = 0 if |zero| <= l1 else lr * (sign(zero) * l1 - zero) / (sqrt(n') + beta + l2 * lr)`.
    """

    kind: Literal["ftrl"] = "ftrl"
    learning_rate: Positive = 0.01
    initial_accumulator_value: NonNegative = 0.1
    beta: NonNegative = 0.0
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0


class GroupFtrl(_WithLearningRate):
    """FTRL with group sparsity: the whole segment is zero unless the norm of `zero` reaches l1. Slots: `zero`, `norm`.

    `Z = ‖zero‖₂, w = 0 if Z < l1 else lr * zero * (l1 - Z) / Z / (beta + sqrt(norm) + l2 * lr)`.
    """

    kind: Literal["group_ftrl"] = "group_ftrl"
    learning_rate: Positive = 0.01
    initial_accumulator_value: NonNegative = 0.0
    beta: NonNegative = 1.0
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0


class GroupAdagrad(_WithLearningRate):
    """Adagrad with a group lasso over the whole segment. Slot: `grad_square_sum` (scalar).

    `a += max(g²), e = lr / (beta + sqrt(a)), z = g - w / e, w = 0 if ‖z‖ < l2 (or ‖z‖ = 0) else -e * (‖z‖ - l2) / ‖z‖ * z`.
    """

    kind: Literal["group_adagrad"] = "group_adagrad"
    learning_rate: Positive = 0.01
    initial_accumulator_value: NonNegative = 0.1
    """With 0 (and `beta` 0) a row stays as it is until its first gradient that is not zero."""
    beta: NonNegative = 0.0
    l2: NonNegative = 0.0
    weight_decay: NonNegative = 0.0


class MovingAverage(Config):
    """w = momentum * w + (1 - momentum) * g: the "gradient" is the observed value. No state, no learning rate."""

    kind: Literal["moving_average"] = "moving_average"
    momentum: Fraction = 0.9


class BatchSoftmax(_WithLearningRate):
    """Streaming mean of the number of steps between two occurrences of an id. dim must be 1. Slot: `global_step` (int64).

    `w = (1 - lr) * w + lr * (step - global_step), global_step = step`. The gradient's value is ignored.
    """

    kind: Literal["batch_softmax"] = "batch_softmax"
    learning_rate: NonNegative = 0.1


BaseOptimizer = Annotated[
    SGD
    | Momentum
    | Adagrad
    | DynamicWdAdagrad
    | RowwiseAdagrad
    | Adadelta
    | Adam
    | Amsgrad
    | Adamom
    | RMSprop
    | RMSpropV2
    | Ftrl
    | GroupFtrl
    | GroupAdagrad
    | MovingAverage
    | BatchSoftmax,
    Field(discriminator="kind"),
]


class DelayCompensation(Config):
    """Corrects a stale gradient before `base` sees it: g + lambda_ * g² * (w - w*), w* the value g was computed at.

    A feature of an `EmbeddingBagCollection` keeps the values it looked up. `EmbeddingTable.apply_gradients` must be given them
    as `snapshot`. Rows on servers are refused. Slots: those of `base`.
    """

    kind: Literal["delay_compensation"] = "delay_compensation"
    base: BaseOptimizer
    """The optimizer that receives the corrected gradient."""
    lambda_: NonNegative = 0.0
    """Strength of the correction. 0 turns it off."""


Optimizer = Annotated[BaseOptimizer | DelayCompensation, Field(discriminator="kind")]
"""Any of the optimizers above."""
