"""Danger: ranks with unequal data of which one waits for another that has ended, or that lose the last element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monolith.dataservice import DatasetConfig
from monolith.errors import InvalidArgumentError
from monolith.original import EofAwareTask
from monolith.train import Estimator, Head, RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook


class Elements:
    """A resumable source of numbers."""

    def __init__(self, *numbers: int, as_dict: bool) -> None:
        self._numbers, self._as_dict, self._next = numbers, as_dict, 0

    def __iter__(self) -> Iterator[Any]:
        while self._next < len(self._numbers):
            number = torch.tensor([self._numbers[self._next]])
            self._next += 1
            yield {"1": number} if self._as_dict else number
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next = state["next"]


class Task(nn.Module):
    """The task of the original's test. Its step is to add the element to the global step."""

    heads = (Head(name="output", label="1", kind="regression"),)

    def __init__(self, *, as_dict: bool) -> None:
        super().__init__()
        self.as_dict = as_dict
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def input_fn(self, mode: str) -> Elements:
        return Elements(1, 2, 3, as_dict=self.as_dict)

    def forward(self, element: Any) -> Tensor:  # noqa: ANN401
        assert isinstance(element, dict) == self.as_dict
        assert not self.as_dict or list(element) == ["1"]
        number = element["1"] if self.as_dict else element
        self.seen.append(int(number))
        return self.weight * number


class AddToStep(Hook):
    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        trainer.step += int(result.batch["1"]) - 1  # type: ignore[arg-type]


@pytest.mark.parametrize("as_dict", [False, True])
def test_every_element_counts_in_the_global_step(as_dict: bool) -> None:
    task = EofAwareTask(Task(as_dict=as_dict), use_dataservice=True)
    estimator = Estimator(task, RunConfig(epochs=2))
    assert estimator.train(hooks=[AddToStep(), *task.training_hooks()]) == 6
    assert task.task.seen == [1, 2, 3]
    # With the element that was the last, and not by the end of the data, which would begin again.
    assert estimator.trainer.stop_reason == "a rank has had its last element"


@pytest.mark.parametrize("as_dict", [False, True])
def test_elements_say_whether_they_are_the_last(as_dict: bool) -> None:
    tagged = list(EofAwareTask(Task(as_dict=as_dict), use_dataservice=True).input_fn("train"))
    key = "__EofAwareTask_eof" if as_dict else "2"
    assert [(int(one["1"]), one[key]) for one in tagged] == [(1, False), (2, False), (3, True)]


def test_without_a_data_service_nothing_changes() -> None:
    task = EofAwareTask(Task(as_dict=True))
    assert list(task.input_fn("train")) == list(task.task.input_fn("train"))
    assert task.training_hooks() == []
    assert Estimator(task, RunConfig()).train(hooks=[AddToStep()]) == 6


def test_looking_ahead_does_not_move_the_position() -> None:
    data: Any = EofAwareTask(Task(as_dict=True), use_dataservice=True).input_fn("train")
    elements = iter(data)
    next(elements)
    assert data.state_dict() == {"next": 1}
    again: Any = EofAwareTask(Task(as_dict=True), use_dataservice=True).input_fn("train")
    again.load_state_dict(data.state_dict())
    assert [int(one["1"]) for one in again] == [2, 3]


def test_no_element_is_no_last_element() -> None:
    class Nothing(Task):
        def input_fn(self, mode: str) -> Elements:
            return Elements(as_dict=True)

    assert list(EofAwareTask(Nothing(as_dict=True), use_dataservice=True).input_fn("train")) == []


def test_what_the_task_has_is_found() -> None:
    task = EofAwareTask(Task(as_dict=True))
    assert task.heads == Task.heads
    with pytest.raises(AttributeError, match="nothing"):
        _ = task.nothing


def test_a_data_service_is_asked_to_stop_otherwise() -> None:
    class Served(Task):
        def input_fn(self, mode: str) -> Any:  # noqa: ANN401
            return DatasetConfig(kind="parquet", paths=("a.parquet",), fields={})

    with pytest.raises(InvalidArgumentError, match="end_of_data='stop'"):
        EofAwareTask(Served(as_dict=True), use_dataservice=True).input_fn("train")
