"""Dense optimizers and learning-rate schedules."""

from monolith.optim.adamom import Adamom
from monolith.optim.rmsprop import RMSprop
from monolith.optim.schedules import ConstantRate, LinearWarmup, PolynomialDecay, Schedule, lr_scheduler
from monolith.optim.shampoo import Shampoo

__all__ = [
    "Adamom",
    "ConstantRate",
    "LinearWarmup",
    "PolynomialDecay",
    "RMSprop",
    "Schedule",
    "Shampoo",
    "lr_scheduler",
]
