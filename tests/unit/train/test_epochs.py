"""Passes over the data. The danger: a finished job that is started again trains on the same data a second time, or a job that
should make several passes makes one, without a message.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Ragged
from monolith.train import RunConfig, Trainer
from training import ClickModel, Stream, assert_same, batch_of


def trainer(folder: Path | None = None, **config: object) -> Trainer:
    model_dir = None if folder is None else str(folder)
    model = ClickModel()
    sgd = torch.optim.SGD(model.mlp.parameters(), lr=0.1)
    return Trainer(model, sgd, config=RunConfig(model_dir=model_dir, **config))  # type: ignore[arg-type]


def test_a_finished_run_that_is_started_again_says_so_and_makes_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = trainer(tmp_path)
    assert first.fit(Stream(5)) == 5
    files = sorted(path.name for path in tmp_path.rglob("*"))
    again = trainer(tmp_path)
    assert (again.fit(Stream(5)), again.steps_made) == (5, 0)
    assert "nothing to do: the run has finished" in caplog.text
    assert "epochs=2" in caplog.text
    assert sorted(path.name for path in tmp_path.rglob("*")) == files
    assert_same(again.model, first.model)


def test_so_does_one_whose_last_step_is_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path).fit(Stream(5), max_steps=3)
    files = sorted(path.name for path in tmp_path.rglob("*"))
    assert trainer(tmp_path).fit(Stream(5), max_steps=3) == 3
    assert "nothing to do: the run is at step 3 of 3" in caplog.text
    assert sorted(path.name for path in tmp_path.rglob("*")) == files


def test_a_larger_number_of_epochs_goes_on(tmp_path: Path) -> None:
    trainer(tmp_path).fit(Stream(5))
    assert trainer(tmp_path, epochs=3).fit(Stream(5)) == 15


def test_other_data_is_trained_on_when_it_is_said_to_be_other(tmp_path: Path) -> None:
    trainer(tmp_path).fit(Stream(5))
    assert trainer(tmp_path, resume_data=False).fit(Stream(2)) == 7


def test_steps_that_are_asked_for_are_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path).fit(Stream(5))
    with caplog.at_level(logging.INFO):
        assert trainer(tmp_path).fit(Stream(5), steps=2) == 7
    assert "is read again" in caplog.text


def test_data_that_ends_before_the_steps_are_made_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer().fit(Stream(5), steps=8) == 5
    assert "the data ended after 5 of the 8 steps that were asked for" in caplog.text
    caplog.clear()
    assert trainer().fit(Stream(5), steps=5) == 5
    assert "asked for" not in caplog.text


def test_a_second_call_in_one_process_is_a_new_pass() -> None:
    run = trainer()
    assert (run.fit(Stream(5)), run.fit(Stream(2))) == (5, 7)


@pytest.mark.parametrize("capacity", [0, 2])
def test_several_epochs_are_one_run_and_equal_as_many_calls(capacity: int) -> None:
    one, many = trainer(epochs=3, embedding_prefetch_capacity=capacity), trainer()
    assert one.fit(Stream(5)) == 15
    for _ in range(3):
        many.fit(Stream(5))
    assert_same(one.model, many.model)


@pytest.mark.parametrize("stopped_at", [4, 5, 7, 10])
def test_a_run_that_stops_in_a_later_epoch_goes_on_there(tmp_path: Path, stopped_at: int) -> None:
    whole = trainer(epochs=3)
    whole.fit(Stream(5))
    trainer(tmp_path, epochs=3).fit(Stream(5), max_steps=stopped_at)
    rest = trainer(tmp_path, epochs=3)
    assert rest.fit(Stream(5)) == 15
    assert_same(rest.model, whole.model)


def test_without_a_number_the_data_is_repeated_until_the_steps_are_made() -> None:
    assert trainer(epochs=None).fit(Stream(5), max_steps=13) == 13


def test_data_that_can_be_read_once_is_refused_when_it_should_be_read_again() -> None:
    batches = (batch_of(number) for number in range(3))
    with pytest.raises(InvalidArgumentError, match="generator gave no rows when it was read again for epoch 2"):
        trainer(epochs=2).fit(batches)


@pytest.mark.parametrize("epochs", [1, None])
@pytest.mark.parametrize("batches", [0, 2])
def test_data_without_rows_is_refused(epochs: int | None, batches: int) -> None:
    empty = {n: Ragged.from_lists([]) if isinstance(c, Ragged) else c[:0] for n, c in batch_of(0).items()}
    with pytest.raises(InvalidArgumentError, match="the data has no rows; check its paths and filters"):
        trainer(epochs=epochs).fit([empty] * batches)
