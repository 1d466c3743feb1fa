"""Danger: dense parameters are restored half, into the wrong shape, or silently not at all."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import CheckpointMismatchError, InvalidArgumentError
from monolith.state import plan_dense


def parameters(*names: str, rows: int = 2) -> dict[str, torch.Tensor]:
    return {name: torch.full((rows, 3), float(number)) for number, name in enumerate(names)}


def test_equal_names() -> None:
    report = plan_dense(parameters("a", "b"), parameters("a", "b"), step=9)
    report.require()
    assert (sorted(report.values), report.step, report.aliases, report.notes) == (["a", "b"], 9, {}, ())


def test_everything_that_does_not_fit_is_said() -> None:
    current = {**parameters("a", "new"), "b": torch.zeros(4)}
    report = plan_dense(current, parameters("a", "b", "gone"))
    assert report.problems == (
        "'new' is not in the checkpoint; give its old name in reload_alias_map if it was renamed",
        "'b' has shape [4], saved with [2, 3]",
        "'gone' is not in the model",
    )
    with pytest.raises(
        CheckpointMismatchError, match=r"^model.ckpt-1: does not fit the model: 'new' .*clear_nn.*another model_dir$"
    ):
        report.require("model.ckpt-1")


def test_what_the_model_does_not_have_may_be_left_out() -> None:
    report = plan_dense(parameters("a"), parameters("a", "gone"), allow_unused=True)
    assert (report.problems, report.notes) == ((), ("'gone' is not in the model",))


def test_an_alias_map() -> None:
    report = plan_dense(parameters("new"), {"old": torch.ones(2, 3)}, aliases={"new": "old"})
    assert torch.equal(report.values["new"], torch.ones(2, 3))
    assert report.notes == ("'new' is restored from 'old'",)
    with pytest.raises(InvalidArgumentError, match="aliases: the model has no parameter 'typo'"):
        plan_dense(parameters("new"), parameters("old"), aliases={"typo": "old"})


def test_an_alias_map_is_not_used_once_the_new_names_are_saved() -> None:
    saved = {"new": torch.ones(2, 3), "old": torch.zeros(2, 3)}
    report = plan_dense(parameters("new"), saved, aliases={"new": "old"}, allow_unused=True)
    assert torch.equal(report.values["new"], torch.ones(2, 3))
    assert report.aliases == {}


def test_names_are_guessed_unless_told_not_to() -> None:
    saved = {"t/dense/bias": torch.ones(2, 3)}
    assert plan_dense(parameters("t/dense_4/bias"), saved).problems == ()
    assert len(plan_dense(parameters("t/dense_4/bias"), saved, auto_alias=False).problems) == 2


def test_a_parameter_that_is_in_parts_now() -> None:
    whole = torch.arange(15.0).reshape(5, 3)
    current = {
        "w/part_10": torch.zeros(1, 3),
        "w/part_2": torch.zeros(2, 3),
        "w/part_0": torch.zeros(2, 3),
    }
    report = plan_dense(current, {"w": whole})
    assert report.problems == ()
    assert torch.equal(torch.cat([report.values[f"w/part_{n}"] for n in (0, 2, 10)]), whole)
    short = plan_dense({"w/part_0": torch.zeros(2, 3)}, {"w": whole})
    assert "do not add up" in short.problems[0]


@pytest.mark.parametrize(("continue_training", "step"), [(False, 0), (True, 9)])
def test_clearing_the_network_restores_no_parameter(continue_training: bool, step: int) -> None:
    report = plan_dense(parameters("a"), parameters("b"), step=9, clear_nn=True, continue_training=continue_training)
    assert (report.values, report.step, report.problems) == ({}, step, ())
    with pytest.raises(InvalidArgumentError, match="of no use with clear_nn"):
        plan_dense(parameters("a"), parameters("b"), clear_nn=True, aliases={"a": "b"})
