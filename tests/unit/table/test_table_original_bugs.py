"""Danger: porting the original's bugs together with its formulas. One test per optimizer bug we fixed
(docs/differences.md), each of which the original would fail, and the arithmetic corners that turn a row into NaN
for good.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparison import assert_close, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.table import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Amsgrad,
    BatchSoftmax,
    Constant,
    Ftrl,
    GroupAdagrad,
    GroupFtrl,
    RMSprop,
    RowwiseAdagrad,
    Zeros,
)
from monolith.testing import every_optimizer


def table_of(optimizer: Any, dim: int = 1, start: float = 0.0) -> EmbeddingTable:  # noqa: ANN401 - any optimizer config
    segment = Segment(dim=dim, initializer=Constant(value=start), optimizer=optimizer)
    return EmbeddingTable(TableConfig(name="t", segments=(segment,)))


def test_adagrad_decays_every_lane_alike() -> None:
    # The original's 8-lane kernel forgot the decay in the weight update; only dims after the last full group had it.
    table = table_of(Adagrad(weight_decay=0.5), dim=11, start=2.0)
    table.apply_gradients(int64([1]), float32(np.ones((1, 11))), learning_rates=[0.1])
    assert_close(table.lookup(int64([1])), np.full((1, 11), 2 - 0.1 * 2 / np.sqrt(4.1)), rtol=1e-6)


def test_ftrl_l1_pulls_both_signs_towards_zero() -> None:
    # The original used the sign bit (1 or 0) where FTRL wants the sign (1 or -1).
    table = table_of(Ftrl(l1=0.5), dim=2)
    table.apply_gradients(int64([1]), float32([[2.0, -2.0]]), learning_rates=[0.1])
    down, up = table.lookup(int64([1]))[0].tolist()
    assert down == -up
    assert_close(up, 0.1 * 1.5 / np.sqrt(4.1), rtol=1e-6)


@pytest.mark.parametrize("kind", [Adam, Amsgrad])
def test_beta_powers_survive_save_and_load(kind: type[Adam] | type[Amsgrad], tmp_path: Path) -> None:
    # The original's restore wrote both powers into the first.
    table = table_of(kind(beta1=0.5, beta2=0.75))
    table.apply_gradients(int64([1]), float32([[1.0]]))
    table.save(tmp_path / "t")
    slots = EmbeddingTable.load(tmp_path / "t").lookup_entry(int64([1])).slots
    assert slots["0/beta1_power"].tolist() == [[0.25]]
    assert slots["0/beta2_power"].tolist() == [[0.5625]]


def test_rmsprop_uses_the_learning_rate_of_the_call() -> None:
    # The original's v1 used the configured rate, so schedules had no effect.
    table = table_of(RMSprop(learning_rate=1.0, momentum=0.0))
    table.apply_gradients(int64([1]), float32([[3.0]]), learning_rates=[0.5])
    assert_close(table.lookup(int64([1])), [[-0.5 * 3 / 4]], rtol=1e-6)


def test_group_adagrad_of_a_zero_row_and_a_zero_gradient_stays_zero() -> None:
    # 0/0 made the row NaN in the original.
    table = table_of(GroupAdagrad(), dim=4)
    table.apply_gradients(int64([1]), float32(np.zeros((1, 4))))
    assert table.lookup(int64([1])).tolist() == [[0.0] * 4]


def test_group_adagrad_from_an_accumulator_of_zero() -> None:
    # Before the first gradient the rate is infinite, which set the row to 0.
    table = table_of(GroupAdagrad(learning_rate=0.5, initial_accumulator_value=0.0), dim=2, start=0.25)
    table.apply_gradients(int64([1]), float32([[0.0, 0.0]]))
    assert table.lookup(int64([1])).tolist() == [[0.25, 0.25]]
    table.apply_gradients(int64([1]), float32([[2.0, 0.0]]))
    assert_close(table.lookup(int64([1])), [[0.25 - 0.5 * 2 / 2, 0.25]], rtol=1e-6)


def test_group_ftrl_of_a_zero_row_and_a_zero_gradient_stays_zero() -> None:
    table = table_of(GroupFtrl(), dim=4)
    table.apply_gradients(int64([1]), float32(np.zeros((1, 4))))
    assert table.lookup(int64([1])).tolist() == [[0.0] * 4]


def test_group_ftrl_element_that_never_saw_a_gradient_stays_zero() -> None:
    # Its zero and norm are 0, and with beta = l2 = 0 so is its divisor.
    table = table_of(GroupFtrl(beta=0.0, initial_accumulator_value=0.0), dim=2)
    table.apply_gradients(int64([1]), float32([[3.0, 0.0]]), learning_rates=[0.5])
    assert_close(table.lookup(int64([1])), [[-0.5, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("name", every_optimizer())
def test_a_zero_gradient_on_a_zero_row_never_makes_nan(name: str) -> None:
    optimizer = every_optimizer()[name]
    dim = 1 if isinstance(optimizer, BatchSoftmax) else 9
    table = EmbeddingTable(
        TableConfig(name="t", segments=(Segment(dim=dim, initializer=Zeros(), optimizer=optimizer),))
    )
    for _ in range(3):
        table.apply_gradients(int64([1]), float32(np.zeros((1, dim))), snapshot=float32(np.zeros((1, dim))))
    assert table.lookup(int64([1])).tolist() == [[0.0] * dim]


@pytest.mark.parametrize("kind", [Ftrl, GroupFtrl, GroupAdagrad])
def test_a_rate_of_zero_where_the_formula_divides_by_it_is_refused_or_finite(kind: type[Any]) -> None:
    table = table_of(kind(), dim=2, start=0.5)
    try:
        table.apply_gradients(int64([1]), float32([[1.0, 0.0]]), learning_rates=[0.0])
    except InvalidArgumentError:
        assert len(table) == 0
    else:
        assert np.isfinite(table.lookup(int64([1])).numpy()).all()


# Positive, and below one, as Python floats; 0 or 1 once stored as float32.
VANISHING = {
    "adagrad": lambda: Adagrad(initial_accumulator_value=1e-60),
    "group_adagrad": lambda: GroupAdagrad(initial_accumulator_value=1e-60),
    "rowwise_adagrad": lambda: RowwiseAdagrad(epsilon=1e-60),
    "adadelta": lambda: Adadelta(epsilon=1e-60),
    "adam epsilon": lambda: Adam(epsilon=1e-60),
    "adam beta1": lambda: Adam(beta1=1 - 1e-12),
    "amsgrad beta1": lambda: Amsgrad(beta1=1 - 1e-12),
    "sgd rate": lambda: SGD(learning_rate=1e60),
}


@pytest.mark.parametrize("name", VANISHING)
def test_hyperparameters_that_float32_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises((ConfigError, InvalidArgumentError)):
        table_of(VANISHING[name]()).apply_gradients(int64([1]), float32([[0.0]]))
