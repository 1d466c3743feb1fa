"""Danger: a feature that means two things at once and is silently read as one of them."""

from __future__ import annotations

from typing import Any

import pytest

from monolith import ConfigError, Segment
from monolith.features import Feature
from monolith.table import SGD, Adagrad, Fp16, Ftrl, Ones, Zeros


def test_dim_is_short_for_one_segment() -> None:
    feature = Feature(name="a", dim=4, initializer=Ones(), optimizer=SGD(), compressor=Fp16(), precision="bf16")
    segment = Segment(dim=4, initializer=Ones(), optimizer=SGD(), compressor=Fp16(), precision="bf16")
    assert feature.row == (segment,)
    assert Feature(name="a", dim=4).row == Feature(name="a", segments=(Segment(dim=4),)).row


def test_the_bias_comes_first_with_the_optimizer_of_the_original() -> None:
    bias, vector = Feature(name="a", dim=4, bias=True).row
    assert (bias.dim, bias.initializer, vector.dim) == (1, Zeros(), 4)
    assert bias.optimizer == Ftrl(initial_accumulator_value=1e-6, beta=1.0)
    assert Feature(name="a", dim=4, bias=Segment(dim=1, initializer=Ones())).row[0].initializer == Ones()


def test_schedules_are_one_for_all_or_one_for_each() -> None:
    def constant(step: int) -> float:
        return 0.5

    segments = (Segment(dim=1), Segment(dim=2))
    assert Feature(name="a", segments=segments).schedules == (None, None)
    assert Feature(name="a", segments=segments, learning_rate=constant).schedules == (constant, constant)
    assert Feature(name="a", segments=segments, learning_rate=(None, constant)).schedules == (None, constant)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either dim or segments"),
        ({"dim": 4, "segments": (Segment(dim=4),)}, "give either dim or segments"),
        ({"segments": (Segment(dim=4),), "optimizer": Adagrad()}, "optimizer: set it in each segment"),
        ({"shared_with": "b", "slot": 3}, "slot: decided by the feature it is shared_with"),
        ({"shared_with": "b", "optimizer": SGD()}, "optimizer: decided by the feature"),
        ({"dim": 4, "pooling": "first_n"}, "max_length goes with pooling"),
        ({"dim": 4, "pooling": "mean", "max_length": 3}, "max_length goes with pooling"),
        ({"dim": 4, "pooling": "max"}, "Feature.pooling"),
        ({"dim": 0}, "Feature.dim"),
        ({"dim": 4, "slot": 32768}, "Feature.slot"),
        ({"dim": 4, "occurrence_threshold": 16}, "Feature.occurrence_threshold"),
        ({"dim": 4, "bias": Segment(dim=2)}, "bias: expected a segment of dim 1, not 2"),
        ({"dim": 4, "bias": True, "learning_rate": (None,)}, "expected 2 schedules"),
        ({"dim": 4, "slots": 3}, "did you mean 'slot'"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Feature(name="a", **fields)
