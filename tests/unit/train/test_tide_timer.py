"""Danger: a run that saves too rarely while its machines may be taken back, twice at one step, or not at all."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from monolith.errors import InvalidArgumentError
from monolith.train.hooks import SecondOrStepTimerWithTideSetting

TIDE = {"tide_start_hour": 1, "tide_end_hour": 3, "tide_every_secs": 5}


class Clock:
    """Seconds since 1970, as told."""

    def __init__(self, hour: int = 0) -> None:
        self.now = datetime(2024, 1, 1, hour, tzinfo=UTC).timestamp()

    def __call__(self) -> float:
        return self.now


def started(clock: Clock, **options: Any) -> SecondOrStepTimerWithTideSetting:  # noqa: ANN401
    """A timer that triggered at step 0."""
    timer = SecondOrStepTimerWithTideSetting(clock=clock, **options)
    timer.update_last_triggered_step(0)
    return timer


@pytest.mark.parametrize(
    ("hour", "tide", "too_early", "late_enough"),
    [(2, TIDE, 5, 15), (4, TIDE, 2, 9), (4, {}, 5, 15)],
    ids=["inside the window", "outside the window", "no window"],
)
def test_numbers_of_the_spec(hour: int, tide: dict[str, int], too_early: int, late_enough: int) -> None:
    clock = Clock(hour)
    timer = started(clock, every_secs=10, **tide)
    start = clock.now
    clock.now = start + too_early
    assert not timer.should_trigger_for_step(1)
    clock.now = start + late_enough
    assert timer.should_trigger_for_step(1)


@pytest.mark.parametrize("missing", list(TIDE))
def test_a_window_needs_all_three_settings(missing: str) -> None:
    clock = Clock(4)
    timer = started(clock, every_secs=10, **{key: value for key, value in TIDE.items() if key != missing})
    clock.now += 9
    assert not timer.should_trigger_for_step(1)


def test_a_window_across_midnight() -> None:
    clock = Clock(23)
    timer = started(clock, every_secs=10, tide_start_hour=22, tide_end_hour=6, tide_every_secs=5)
    clock.now += 6
    assert not timer.should_trigger_for_step(1)


def test_outside_the_window_steps_do_not_count() -> None:
    clock = Clock(4)
    timer = started(clock, every_steps=3, **TIDE)
    assert not timer.should_trigger_for_step(1000)
    clock.now += 5
    assert timer.should_trigger_for_step(1)


def test_steps() -> None:
    timer = started(Clock(), every_steps=3)
    assert [timer.should_trigger_for_step(step) for step in (1, 2, 3, 4)] == [False, False, True, True]
    assert timer.update_last_triggered_step(4) == (0.0, 4)
    assert not timer.should_trigger_for_step(6)
    assert timer.should_trigger_for_step(7)


def test_never_twice_at_one_step_and_always_at_the_first() -> None:
    clock = Clock()
    timer = SecondOrStepTimerWithTideSetting(every_secs=1, clock=clock)
    assert timer.should_trigger_for_step(7)
    assert timer.last_triggered_step() is None
    assert timer.update_last_triggered_step(7) == (None, None)
    clock.now += 100
    assert not timer.should_trigger_for_step(7)
    timer.reset()
    assert timer.should_trigger_for_step(7)


def test_disabled_means_never() -> None:
    timer = SecondOrStepTimerWithTideSetting(every_steps=1, clock=Clock())
    timer.disable()
    assert not timer.should_trigger_for_step(1)
    timer.enable()
    assert timer.should_trigger_for_step(1)


@pytest.mark.parametrize(
    "wrong", [{}, {"every_secs": 1, "every_steps": 1}, {"every_secs": -1.0}, {"every_steps": 0}], ids=str
)
def test_wrong_periods_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="every_secs"):
        SecondOrStepTimerWithTideSetting(**wrong)
