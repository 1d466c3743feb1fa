"""Danger: the oracle and the core sharing one mistake. These numbers were worked out by hand from the formulas in
`monolith.table.optimizers`, with hyperparameters chosen so that a person can redo them, and hold for both.

They may change only if a formula's contract changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import pytest

from comparison import assert_close, float32, initial_rows, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamom,
    Amsgrad,
    BatchSoftmax,
    Constant,
    DelayCompensation,
    DynamicWdAdagrad,
    Ftrl,
    GroupAdagrad,
    GroupFtrl,
    Momentum,
    MovingAverage,
    RMSprop,
    RMSpropV2,
    RowwiseAdagrad,
)
from monolith.testing import every_optimizer
from oracle import DictTable


@dataclass(frozen=True)
class Step:
    """One call and what the row must hold after it."""

    grad: tuple[float, ...]
    weights: tuple[float, ...]
    slots: dict[str, tuple[float, ...]] = field(default_factory=dict)
    at_step: int = 0
    seen: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Golden:
    """A worked example."""

    optimizer: Any
    rate: float
    start: float
    steps: tuple[Step, ...]


ADAM = {"beta1": 0.5, "beta2": 0.75, "epsilon": 0.5}

GOLDENS = {
    "sgd": Golden(SGD(), 0.25, 1.0, (Step((2.0,), (0.5,)), Step((-1.0,), (0.75,)))),
    "momentum": Golden(
        Momentum(momentum=0.5),
        0.5,
        1.0,
        (Step((1.0,), (0.5,), {"n": (-0.5,)}), Step((1.0,), (-0.25,), {"n": (-0.75,)})),
    ),
    "momentum, nesterov, weight decay": Golden(
        Momentum(momentum=0.5, nesterov=True, weight_decay=0.5),
        0.5,
        1.0,
        # dx = 0.5 * 1.5, n = -0.75, w += 1.5 n; dx = 0.5 * (1 - 0.0625), n = -0.375 - 0.46875, w += 1.5 n + 0.5 * 0.75
        (Step((1.0,), (-0.125,), {"n": (-0.75,)}), Step((1.0,), (-1.015625,), {"n": (-0.84375,)})),
    ),
    "adagrad": Golden(
        Adagrad(initial_accumulator_value=7.0, weight_decay=0.5),
        0.5,
        1.0,
        # g' = 3, sqrt(16) = 4; then g' = 2.6875 + 0.3125 = 3, sqrt(25) = 5
        (Step((2.5,), (0.625,), {"norm": (16.0,)}), Step((2.6875,), (0.325,), {"norm": (25.0,)})),
    ),
    "adagrad, zero gradient": Golden(
        Adagrad(initial_accumulator_value=4.0), 0.5, 1.0, (Step((0.0,), (1.0,), {"norm": (4.0,)}),)
    ),
    "dynamic wd adagrad, coupled": Golden(
        DynamicWdAdagrad(initial_accumulator_value=7.0, weight_decay=0.5),
        0.5,
        1.0,
        (Step((2.5,), (0.625,), {"norm": (16.0,)}),),
    ),
    "dynamic wd adagrad, decoupled": Golden(
        DynamicWdAdagrad(initial_accumulator_value=7.0, weight_decay=0.5, decouple_weight_decay=True),
        0.5,
        1.0,
        # 1 - (0.5 * 3 / 4 + 0.5 * 0.5 * 1)
        (Step((3.0,), (0.375,), {"norm": (16.0,)}),),
    ),
    "rowwise adagrad": Golden(
        RowwiseAdagrad(initial_accumulator_value=0.0),
        1.0,
        0.5,
        # mean(1, 49) = 25
        (Step((1.0, 7.0), (0.3, -0.9), {"norm": (25.0,)}),),
    ),
    "rowwise adagrad, epsilon, weight decay": Golden(
        RowwiseAdagrad(initial_accumulator_value=11.0, epsilon=1.0, weight_decay=2.0),
        1.0,
        0.5,
        # g' = (0, 2) + 2 * 0.5 = (1, 3), norm = 11 + mean(1, 9), divisor 4 + 1
        (Step((0.0, 2.0), (0.5 - 1 / 5, 0.5 - 3 / 5), {"norm": (16.0,)}),),
    ),
    "adadelta": Golden(
        Adadelta(averaging_ratio=0.5, epsilon=0.25),
        0.75,
        1.0,
        # accum = 0.5 * 4, u = sqrt(0.25) / sqrt(2.25) * 2 = 2/3, accum_update = 0.5 * 4/9
        (Step((2.0,), (0.5,), {"accum": (2.0,), "accum_update": (2 / 9,)}),),
    ),
    "adam": Golden(
        Adam(**ADAM),
        1.0,
        1.0,
        # rate = sqrt(1 - 0.75) / (1 - 0.5) = 1, m = 1, v = 1; then rate = sqrt(0.4375) / 0.75, m = 0.5, v = 0.75
        (
            Step((2.0,), (1 / 3,), {"m": (1.0,), "v": (1.0,), "beta1_power": (0.25,), "beta2_power": (0.5625,)}),
            Step(
                (0.0,),
                (1 / 3 - sqrt(0.4375) / 0.75 * 0.5 / (sqrt(0.75) + 0.5),),
                {"m": (0.5,), "v": (0.75,), "beta1_power": (0.125,), "beta2_power": (0.421875,)},
            ),
        ),
    ),
    "adam, nesterov, weight decay": Golden(
        Adam(**ADAM, nesterov=True, weight_decay=0.5),
        1.0,
        1.0,
        # g' = 2, numerator 0.5 * 2 + 0.5 * 1 = 1.5, divisor 1.5
        (Step((1.5,), (0.0,), {"m": (1.0,), "v": (1.0,)}),),
    ),
    "amsgrad": Golden(
        Amsgrad(**ADAM),
        1.0,
        1.0,
        (
            Step((2.0,), (1 / 3,), {"m": (1.0,), "v": (1.0,), "vhat": (1.0,)}),
            # v falls to 0.75 but the divisor stays sqrt(1) + 0.5
            Step(
                (0.0,),
                (1 / 3 - sqrt(0.4375) / 0.75 * 0.5 / 1.5,),
                {"m": (0.5,), "v": (0.75,), "vhat": (1.0,), "beta1_power": (0.125,), "beta2_power": (0.421875,)},
            ),
        ),
    ),
    "adamom": Golden(
        Adamom(ada_decay=0.99, mom_decay=0.9, epsilon=1e-6, weight_decay=0.01),
        0.1,
        0.1,
        # The dense golden of the original: g' = 0.121
        (Step((0.12,), (0.090000336,), {"m": (0.0121,), "v": (0.014641,), "c": (1.0,)}),),
    ),
    "rmsprop": Golden(
        RMSprop(momentum=0.75, weight_decay=0.5),
        0.75,
        1.0,
        # g' = 4, n = 0.25 * 16; then w = 0, g' = 2, n = 3 + 1
        (Step((3.5,), (0.0,), {"n": (4.0,)}), Step((2.0,), (-0.5,), {"n": (4.0,)})),
    ),
    "rmsprop v2": Golden(
        RMSpropV2(momentum=0.75, weight_decay=0.5),
        0.5,
        1.0,
        # g' = 4, n = 16; then g' = 1.7 + 0.3, n = 12 + 4
        (Step((3.5,), (0.6,), {"n": (16.0,)}), Step((1.7,), (0.4,), {"n": (16.0,)})),
    ),
    "ftrl, positive zero": Golden(
        Ftrl(initial_accumulator_value=9.0, beta=1.0, l1=0.5, l2=2.0),
        0.5,
        0.5,
        # sigma = (5 - 3) / 0.5, zero = 4 - 4 * 0.5, divisor 5 + 1 + 1
        (Step((4.0,), (0.5 * (0.5 - 2) / 7,), {"zero": (2.0,), "norm": (25.0,)}),),
    ),
    "ftrl, negative zero": Golden(
        Ftrl(initial_accumulator_value=9.0, beta=1.0, l1=0.5, l2=2.0),
        0.5,
        0.5,
        (Step((-4.0,), (0.5 * (-0.5 + 6) / 7,), {"zero": (-6.0,), "norm": (25.0,)}),),
    ),
    "ftrl, inside l1": Golden(
        Ftrl(initial_accumulator_value=9.0, l1=2.0),
        0.5,
        0.5,
        (Step((4.0,), (0.0,), {"zero": (2.0,), "norm": (25.0,)}),),
    ),
    "group ftrl": Golden(
        GroupFtrl(l1=1.0, l2=2.0),
        0.5,
        0.0,
        # |zero| = 5, factor 0.5 * (1 - 5) / 5 = -0.4, divisors 1 + 3 + 1 and 1 + 4 + 1
        (Step((3.0, 4.0), (-0.4 * 3 / 5, -0.4 * 4 / 6), {"zero": (3.0, 4.0), "norm": (9.0, 16.0)}),),
    ),
    "group ftrl, inside l1": Golden(
        GroupFtrl(l1=5.5), 0.5, 0.0, (Step((3.0, 4.0), (0.0, 0.0), {"zero": (3.0, 4.0), "norm": (9.0, 16.0)}),)
    ),
    "group adagrad": Golden(
        GroupAdagrad(initial_accumulator_value=9.0, l2=1.0),
        1.0,
        0.0,
        # a = 9 + max(16, 0) = 25, e = 0.2, z = (4, 0); then z = 0.6 / 0.2 = 3 and w = -0.2 * 2 / 3 * 3
        (
            Step((4.0, 0.0), (-0.6, 0.0), {"grad_square_sum": (25.0,)}),
            Step((0.0, 0.0), (-0.4, 0.0), {"grad_square_sum": (25.0,)}),
        ),
    ),
    "group adagrad, inside l2": Golden(
        GroupAdagrad(initial_accumulator_value=9.0, l2=4.5),
        1.0,
        0.0,
        (Step((4.0, 0.0), (0.0, 0.0), {"grad_square_sum": (25.0,)}),),
    ),
    "moving average": Golden(MovingAverage(momentum=0.75), 0.0, 1.0, (Step((3.0,), (1.5,)), Step((1.5,), (1.5,)))),
    "batch softmax": Golden(
        BatchSoftmax(),
        0.25,
        8.0,
        # 0.75 * 8 + 0.25 * 4, then 0.75 * 7 + 0.25 * (10 - 4); the gradient plays no part
        (
            Step((123.0,), (7.0,), {"global_step": (4,)}, at_step=4),
            Step((-5.0,), (6.75,), {"global_step": (10,)}, at_step=10),
        ),
    ),
    "delay compensation": Golden(
        DelayCompensation(base=SGD(), lambda_=0.5),
        0.5,
        1.0,
        # g + 0.5 * 4 * (1 - 0.5) = 3
        (Step((2.0,), (-0.5,), seen=(0.5,)),),
    ),
    "delay compensation, read up to date": Golden(
        DelayCompensation(base=SGD(), lambda_=0.5), 0.5, 1.0, (Step((2.0,), (0.0,), seen=(1.0,)),)
    ),
}


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("implementation", ["core", "oracle"])
def test_worked_example(implementation: str, name: str) -> None:
    golden = GOLDENS[name]
    segment = Segment(
        dim=len(golden.steps[0].grad), initializer=Constant(value=golden.start), optimizer=golden.optimizer
    )
    config = TableConfig(name="t", segments=(segment,))
    for done, step in enumerate(golden.steps, start=1):
        # From the start each time: neither implementation is read between its steps.
        table: Any = EmbeddingTable(config) if implementation == "core" else DictTable(config, initial_rows(config))
        for earlier in golden.steps[:done]:
            _apply(table, earlier, golden.rate)
        entry = table.lookup_entry(int64([5]))
        assert_close(entry.values, [step.weights], "weights", rtol=1e-6, atol=1e-7)
        for slot, expected in step.slots.items():
            assert_close(entry.slots[f"0/{slot}"], [expected], slot, rtol=1e-6, atol=1e-9)


def _apply(table: Any, step: Step, rate: float) -> None:  # noqa: ANN401 - the table or the oracle
    grads, seen = float32([step.grad]), None if step.seen is None else float32([step.seen])
    if isinstance(table, DictTable):
        seen_array = None if seen is None else seen.numpy()
        table.apply_gradients([5], grads.numpy(), learning_rates=[rate], step=step.at_step, snapshot=seen_array)
    else:
        table.apply_gradients(int64([5]), grads, learning_rates=[rate], step=step.at_step, snapshot=seen)


def test_every_optimizer_has_a_worked_example() -> None:
    worked = {golden.optimizer.kind for golden in GOLDENS.values()}
    assert worked == {optimizer.kind for optimizer in every_optimizer().values()}


def test_batch_softmax_converges_to_the_interval_between_occurrences() -> None:
    segment = Segment(dim=1, initializer=Constant(value=1.0), optimizer=BatchSoftmax(learning_rate=0.1))
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    for step in range(0, 500, 5):
        table.apply_gradients(int64([3]), float32([[0.0]]), step=step)
    assert_close(1 / table.lookup(int64([3])), [[0.2]], rtol=1e-3)


def test_batch_softmax_keeps_steps_beyond_float_precision() -> None:
    segment = Segment(dim=1, initializer=Constant(value=1.0), optimizer=BatchSoftmax())
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    table.apply_gradients(int64([3]), float32([[0.0]]), step=2**53 + 1)
    slot = table.lookup_entry(int64([3])).slots["0/global_step"].numpy()
    assert slot.dtype == np.int64
    assert slot.tolist() == [[2**53 + 1]]
