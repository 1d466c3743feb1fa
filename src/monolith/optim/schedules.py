"""Learning rates as functions of the step, for segments of a table and for dense optimizers alike.

A schedule is a frozen config and a callable: `schedule(step)` is the learning rate of that step, counted from 0. It holds no
state, so only the step has to be saved. Schedules with equal fields are equal and can be written as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from monolith.config import Config, NonNegative, Positive

__all__ = ["ConstantRate", "LinearWarmup", "PolynomialDecay", "Schedule", "lr_scheduler"]


class ConstantRate(Config):
    """The same learning rate at every step.

    Example:
        >>> ConstantRate(learning_rate=0.5)(7)
        0.5
    """

    kind: Literal["constant"] = "constant"
    learning_rate: NonNegative

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step`."""
        return self.learning_rate


class PolynomialDecay(Config):
    """From `initial_learning_rate` to `end_learning_rate` within `decay_steps`, and constant from there.

    (initial - end) * (1 - s / decay_steps) ** power + end with s = min(step, decay_steps). With `cycle`, decay_steps is instead
    multiplied until it reaches the step: the rate jumps up at each end and decays over a longer time. An end above the start
    makes it a warm-up.

    Example:
        >>> schedule = PolynomialDecay(initial_learning_rate=0.01, decay_steps=10, end_learning_rate=0.11)
        >>> [round(schedule(step), 6) for step in (0, 1, 10, 11)]
        [0.01, 0.02, 0.11, 0.11]
    """

    kind: Literal["polynomial_decay"] = "polynomial_decay"
    initial_learning_rate: NonNegative
    decay_steps: Annotated[int, Field(gt=0)]
    end_learning_rate: NonNegative = 0.0001
    power: Positive = 1.0
    cycle: bool = False

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step`."""
        span = self.decay_steps
        if self.cycle:
            span *= max(1, math.ceil(step / self.decay_steps))
        left: float = (1 - min(step, span) / span) ** self.power
        return (self.initial_learning_rate - self.end_learning_rate) * left + self.end_learning_rate


class LinearWarmup(Config):
    """From 0 up to `learning_rate` in equal steps over `warmup_steps`, and constant from there.

    Example:
        >>> schedule = LinearWarmup(learning_rate=0.5, warmup_steps=10)
        >>> [schedule(step) for step in (0, 5, 10, 1000)]
        [0.0, 0.25, 0.5, 0.5]
    """

    kind: Literal["linear_warmup"] = "linear_warmup"
    learning_rate: NonNegative
    warmup_steps: Annotated[int, Field(gt=0)]

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step`."""
        return self.learning_rate * min(step / self.warmup_steps, 1.0)


Schedule = Annotated[ConstantRate | PolynomialDecay | LinearWarmup, Field(discriminator="kind")]
"""Any of the schedules, as a field of another config."""


def lr_scheduler(optimizer: Optimizer, schedule: Callable[[int], float]) -> LambdaLR:
    """Return a torch scheduler that sets the rate `schedule(step)`. Call its `step()` after the optimizer's.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
        >>> scheduler = lr_scheduler(optimizer, PolynomialDecay(initial_learning_rate=0.5, decay_steps=4, end_learning_rate=0.0))
        >>> optimizer.param_groups[0]["lr"]
        0.5
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.375
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = 1.0
    # Not the schedule itself: LambdaLR saves the fields of a callable object and writes them back into it on loading.
    return LambdaLR(optimizer, lambda step: schedule(step))
