"""Danger: a learning rate off by one step, or a schedule that is lost or mixed up on resume."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.config import Config
from monolith.errors import ConfigError
from monolith.optim import ConstantRate, LinearWarmup, PolynomialDecay, Schedule, lr_scheduler
from monolith.table import SGD, Zeros


def test_the_golden_number_of_the_original() -> None:
    schedule = PolynomialDecay(initial_learning_rate=0.01, decay_steps=10, end_learning_rate=0.11)
    assert schedule(1) == pytest.approx(0.02)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cycle", [False, True])
def test_polynomial_decay_follows_its_formula(power: float, cycle: bool) -> None:
    schedule = PolynomialDecay(
        initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.25, power=power, cycle=cycle
    )
    for step in range(14):
        span = 4 * max(1, math.ceil(step / 4)) if cycle else 4
        expected = (1.0 - 0.25) * (1 - min(step, span) / span) ** power + 0.25
        assert schedule(step) == pytest.approx(expected)
    assert schedule(0) == 1.0
    assert schedule(4) == 0.25
    assert schedule(5) == (pytest.approx(0.75 * 0.375**power + 0.25) if cycle else 0.25)


def test_warm_up_is_the_polynomial_of_the_original() -> None:
    warmup = LinearWarmup(learning_rate=0.3, warmup_steps=7)
    polynomial = PolynomialDecay(initial_learning_rate=0.0, decay_steps=7, end_learning_rate=0.3)
    assert [warmup(step) for step in range(12)] == pytest.approx([polynomial(step) for step in range(12)])


def test_schedules_survive_json_inside_another_config() -> None:
    class Plan(Config):
        schedule: Schedule

    for schedule in (
        ConstantRate(learning_rate=0.1),
        LinearWarmup(learning_rate=0.1, warmup_steps=3),
        PolynomialDecay(initial_learning_rate=0.1, decay_steps=3, cycle=True),
    ):
        copy = Plan.from_json(Plan(schedule=schedule).model_dump_json()).schedule
        assert copy == schedule
        assert hash(copy) == hash(schedule)
        assert type(copy) is type(schedule)


@pytest.mark.parametrize("fields", [{"decay_steps": 0}, {"power": 0.0}, {"initial_learning_rate": -0.1}, {"steps": 3}])
def test_fields_out_of_range_or_unknown_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        PolynomialDecay(**({"initial_learning_rate": 0.1, "decay_steps": 3} | fields))


def test_a_table_segment_trains_at_the_scheduled_rate() -> None:
    schedule = LinearWarmup(learning_rate=1.0, warmup_steps=4)
    segment = Segment(dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=9.0))
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    for step in range(6):
        table.apply_gradients(np.array([1]), np.array([[-1.0]], np.float32), learning_rates=[schedule(step)])
    assert table.lookup(np.array([1])).tolist() == [[0 + 0.25 + 0.5 + 0.75 + 1 + 1]]


def optimizer() -> torch.optim.Optimizer:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.0}], lr=0.5)


def test_a_dense_optimizer_trains_at_the_scheduled_rate_whatever_its_own() -> None:
    sgd = optimizer()
    scheduler = lr_scheduler(sgd, LinearWarmup(learning_rate=1.0, warmup_steps=4))
    rates = []
    for _ in range(6):
        rates.append([group["lr"] for group in sgd.param_groups])
        sgd.step()
        scheduler.step()
    assert rates == [[rate, rate] for rate in (0, 0.25, 0.5, 0.75, 1, 1)]


def test_resuming_keeps_the_step_and_takes_the_schedule_of_the_new_run() -> None:
    sgd = optimizer()
    scheduler = lr_scheduler(sgd, ConstantRate(learning_rate=1.0))
    for _ in range(3):
        sgd.step()
        scheduler.step()
    resumed_sgd = optimizer()
    changed = LinearWarmup(learning_rate=1.0, warmup_steps=8)
    resumed = lr_scheduler(resumed_sgd, changed)
    resumed_sgd.load_state_dict(sgd.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    resumed_sgd.step()
    resumed.step()
    assert resumed_sgd.param_groups[0]["lr"] == changed(4)
    assert changed == LinearWarmup(learning_rate=1.0, warmup_steps=8)
