"""Danger: a threshold the counters cannot reach would never admit anything, without an error."""

from __future__ import annotations

from typing import Any

import pytest

from monolith import ConfigError
from monolith.table.admission import ProbabilisticAdmission, SlidingAdmission


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"default_threshold": 16}, "SlidingAdmission.default_threshold: .* less than or equal to 15; got 16"),
        ({"default_threshold": -1}, "SlidingAdmission.default_threshold: .*got -1"),
        ({"slot_thresholds": {3: 16}}, "SlidingAdmission.slot_thresholds.3: .*got 16"),
        ({"slot_thresholds": {32768: 1}}, "SlidingAdmission.slot_thresholds.32768.*got 32768"),
        ({"slot_thresholds": {-1: 1}}, "SlidingAdmission.slot_thresholds.-1.*got -1"),
        ({"capacity": 299}, "SlidingAdmission.capacity: .*got 299"),
        ({"capacity": 1e6}, "SlidingAdmission.capacity: .*got 1000000.0"),
        ({"split_num": 4}, "SlidingAdmission.split_num: .*got 4"),
        ({"capacity": 300, "split_num": 200}, "split_num 200 leaves fewer than 2 of capacity 300 to a split"),
        ({"capcity": 300}, "did you mean 'capacity'"),
    ],
)
def test_what_the_sliding_filter_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlidingAdmission(**fields)


@pytest.mark.parametrize(
    "fields", [{"default_threshold": -1}, {"seed": -1}, {"seed": 2**64}, {"slot_thresholds": {-1: 1}}]
)
def test_what_the_probabilistic_filter_cannot_do_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ProbabilisticAdmission(**fields)


def test_configurations_survive_json() -> None:
    for config in (
        SlidingAdmission(capacity=1000, default_threshold=2, slot_thresholds={5: 3}),
        ProbabilisticAdmission(default_threshold=20, slot_thresholds={5: 100}, seed=2**64 - 1),
    ):
        assert type(config).model_validate_json(config.model_dump_json()) == config
