"""Dense optimizers and learning-rate schedules."""

from monolith.optim.optimizers import Adamom, RMSprop, Shampoo
from monolith.optim.schedules import ConstantRate, LinearWarmup, PolynomialDecay, Schedule, lr_scheduler

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
