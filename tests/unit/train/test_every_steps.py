"""Danger: with several workers the global step jumps over the very steps at which something was to be reported."""

from __future__ import annotations

import pytest

from monolith.errors import InvalidArgumentError
from monolith.train.hooks.hook import EverySteps


def due(every: int, steps: list[int]) -> list[int]:
    timer = EverySteps(every)
    return [step for step in steps if timer.is_due(step)]


def test_without_jumps_it_is_every_multiple() -> None:
    assert due(3, list(range(1, 10))) == [3, 6, 9]


def test_a_multiple_that_is_jumped_over_counts_once() -> None:
    assert due(10, [7, 13, 18, 21, 22, 57, 59, 60]) == [13, 21, 57, 60]


def test_the_first_step_counts_only_if_it_is_one() -> None:
    assert due(10, [15, 16]) == []
    assert due(10, [20, 21]) == [20]


def test_a_step_that_is_asked_for_again_is_not_due_again() -> None:
    assert due(2, [2, 2, 1, 2]) == [2, 2]


def test_there_is_no_period_of_nothing() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one step"):
        EverySteps(0)
