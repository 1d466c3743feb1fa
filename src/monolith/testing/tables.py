"""Table configurations that tests want: one whose numbers a person can check by hand, and one of every optimizer."""

from __future__ import annotations

from monolith.table.config import Segment, TableConfig
from monolith.table.initializers import Zeros
from monolith.table.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamom,
    Amsgrad,
    BatchSoftmax,
    DelayCompensation,
    DynamicWdAdagrad,
    Ftrl,
    GroupAdagrad,
    GroupFtrl,
    Momentum,
    MovingAverage,
    Optimizer,
    RMSprop,
    RMSpropV2,
    RowwiseAdagrad,
)

__all__ = ["every_optimizer", "sgd_table_config"]


def sgd_table_config(dim: int, *, name: str = "test") -> TableConfig:
    """A table that starts at zero and subtracts each gradient once, so that expected values are plain sums.

    Example:
        >>> from monolith.testing import sgd_table_config
        >>> sgd_table_config(4).learning_rates
        (1.0,)
    """
    return TableConfig(name=name, segments=(Segment(dim=dim, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),))


def every_optimizer() -> dict[str, Optimizer]:
    """One instance of every sparse optimizer under a readable name, with weight decay and variants switched on.

    Example:
        >>> from monolith.testing import every_optimizer
        >>> sorted(every_optimizer())[:3]
        ['adadelta', 'adagrad', 'adam']
    """
    return {
        "sgd": SGD(learning_rate=0.1),
        "momentum": Momentum(learning_rate=0.1, weight_decay=0.01),
        "momentum_nesterov": Momentum(learning_rate=0.1, momentum=0.7, nesterov=True, weight_decay=0.01),
        "adagrad": Adagrad(learning_rate=0.1, weight_decay=0.01),
        "dynamic_wd_adagrad_coupled": DynamicWdAdagrad(learning_rate=0.1, weight_decay=0.1),
        "dynamic_wd_adagrad_decoupled": DynamicWdAdagrad(
            learning_rate=0.1, weight_decay=0.1, decouple_weight_decay=True
        ),
        "rowwise_adagrad": RowwiseAdagrad(learning_rate=0.1, weight_decay=0.01),
        "adadelta": Adadelta(learning_rate=0.5, weight_decay=0.01),
        "adam": Adam(learning_rate=0.1, weight_decay=0.01),
        "adam_nesterov": Adam(learning_rate=0.1, nesterov=True, weight_decay=0.01),
        "amsgrad": Amsgrad(learning_rate=0.1, weight_decay=0.01),
        "adamom": Adamom(learning_rate=0.1, ada_decay=0.9, mom_decay=0.8, weight_decay=0.01),
        "rmsprop": RMSprop(learning_rate=0.1, weight_decay=0.01),
        "rmsprop_v2": RMSpropV2(learning_rate=0.1, weight_decay=0.01),
        "ftrl": Ftrl(learning_rate=0.1, beta=0.5, l1=0.05, l2=0.1),
        "group_ftrl": GroupFtrl(learning_rate=0.1, l1=0.05, l2=0.1),
        "group_adagrad": GroupAdagrad(learning_rate=0.1, beta=0.5, l2=0.05, weight_decay=0.01),
        "moving_average": MovingAverage(momentum=0.75),
        "batch_softmax": BatchSoftmax(learning_rate=0.25),
        "delay_compensation": DelayCompensation(base=Adagrad(learning_rate=0.1), lambda_=0.5),
    }
