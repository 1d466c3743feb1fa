"""Danger: hooks that run in another order than promised, a batch drawn and lost by a stop, a hook that is never closed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from monolith.features.batch import Batch
from monolith.train import RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook
from monolith.train.hooks.hook import overriding
from training import ClickModel, Stream, batch_of


class Diary(Hook):
    def __init__(self, name: str, pages: list[str], *, fail_in: str = "", stop_in: str = "", stop_at: int = -1) -> None:
        self.name, self.pages = name, pages
        self.fail_in, self.stop_in, self.stop_at = fail_in, stop_in, stop_at

    def write(self, moment: str, trainer: Trainer) -> None:
        self.pages.append(f"{self.name}.{moment}@{trainer.step}")
        if moment == self.fail_in:
            raise RuntimeError(f"{self.name} fails in {moment}")
        if moment == self.stop_in and trainer.step == self.stop_at:
            trainer.request_stop(f"{self.name} stops")

    def begin(self, trainer: Trainer) -> None:
        self.write("begin", trainer)

    def after_start(self, trainer: Trainer) -> None:
        self.write("after_start", trainer)

    def before_step(self, trainer: Trainer) -> None:
        self.write("before_step", trainer)

    def before_update(self, trainer: Trainer, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        self.write("before_update", trainer)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        assert result.step == trainer.step
        self.write("after_step", trainer)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        self.write("end" if error is None else f"end({error})", trainer)


def trainer_of(*hooks: Hook, config: RunConfig | None = None) -> Trainer:
    model = ClickModel()
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), hooks=hooks, config=config)


class Counted:
    """Counts the batches drawn from it."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[Batch]:
        for number in range(10):
            self.drawn += 1
            yield batch_of(number)


def test_moments_and_hooks_come_in_the_stated_order() -> None:
    pages: list[str] = []
    trainer_of(Diary("a", pages), Diary("b", pages)).fit(Stream(), steps=2)
    one_step = ["before_step", "before_update", "after_step"]
    moments = ["begin@0", "after_start@0"]
    for step in (0, 1):
        moments += [f"{moment}@{step + (moment == 'after_step')}" for moment in one_step]
    moments.append("end@2")
    assert pages == [f"{hook}.{moment}" for moment in moments for hook in "ab"]


def test_after_start_sees_the_restored_step_and_begin_does_not(tmp_path: object) -> None:
    config = RunConfig(model_dir=str(tmp_path))
    trainer_of(config=config).fit(Stream(), steps=3)
    pages: list[str] = []
    trainer_of(Diary("a", pages), config=config).fit(Stream(), steps=0)
    assert pages == ["a.begin@0", "a.after_start@3", "a.end@3"]


def test_a_stop_before_a_step_draws_no_batch() -> None:
    pages: list[str] = []
    source = Counted()
    trainer = trainer_of(Diary("a", pages, stop_in="before_step", stop_at=2), Diary("b", pages))
    assert trainer.fit(source) == 2
    assert source.drawn == 2
    assert trainer.stop_reason == "a stops"
    assert pages[-3:] == ["b.before_step@2", "a.end@2", "b.end@2"]


def test_a_stop_after_a_step_makes_it_the_last() -> None:
    pages: list[str] = []
    source = Counted()
    trainer = trainer_of(Diary("a", pages, stop_in="after_step", stop_at=2), Diary("b", pages))
    assert trainer.fit(source) == 2
    assert source.drawn == 2
    assert "b.after_step@2" in pages


@pytest.mark.parametrize("moment", ["after_start", "before_step", "before_update", "after_step"])
def test_a_failing_hook_fails_the_run_and_every_hook_hears_why(moment: str) -> None:
    pages: list[str] = []
    with pytest.raises(RuntimeError, match=f"b fails in {moment}"):
        trainer_of(Diary("a", pages), Diary("b", pages, fail_in=moment)).fit(Stream(), steps=3)
    last = [page.split("@")[0] for page in pages[-2:]]
    assert last == [f"a.end(b fails in {moment})", f"b.end(b fails in {moment})"]


def test_a_hook_that_did_not_begin_does_not_end() -> None:
    pages: list[str] = []
    with pytest.raises(RuntimeError):
        trainer_of(Diary("a", pages), Diary("b", pages, fail_in="begin"), Diary("c", pages)).fit(Stream(), steps=3)
    assert pages == ["a.begin@0", "b.begin@0", "a.end(b fails in begin)@0"]


def test_all_hooks_end_even_if_one_fails_to() -> None:
    pages: list[str] = []
    with pytest.raises(RuntimeError, match="a fails in end"):
        trainer_of(Diary("a", pages, fail_in="end"), Diary("b", pages)).fit(Stream(), steps=1)
    assert pages[-2:] == ["a.end@1", "b.end@1"]


def test_what_broke_a_run_is_raised_even_if_the_end_of_a_hook_fails_too(caplog: pytest.LogCaptureFixture) -> None:
    pages: list[str] = []
    with pytest.raises(RuntimeError, match="b fails in after_step"):
        trainer_of(
            Diary("a", pages, fail_in="end(b fails in after_step)"), Diary("b", pages, fail_in="after_step")
        ).fit(Stream(), steps=3)
    assert "Diary could not end after the run had failed: a fails in end(b fails in after_step)" in caplog.text


def test_a_broken_run_is_not_saved(tmp_path: object) -> None:
    config = RunConfig(model_dir=str(tmp_path))
    trainer_of(config=config).fit(Stream(), steps=2)
    with pytest.raises(RuntimeError):
        trainer_of(Diary("a", [], fail_in="after_step"), config=config).fit(Stream(), steps=2)
    again = trainer_of(config=config)
    assert again.restore()
    assert again.step == 2


def test_hooks_that_do_nothing_at_a_moment_are_left_out_and_all_others_called() -> None:
    class Counting(Hook):
        def after_step(self, trainer: Trainer, result: object) -> None:
            seen.append("after_step")

    seen: list[str] = []
    idle, own = Hook(), Hook()
    own.before_update = lambda trainer, loss, norm: seen.append("before_update")  # type: ignore[method-assign]
    hooks = [idle, Counting(), own]
    assert overriding(hooks, "before_update") == [own]
    assert overriding(hooks, "before_step") == []
    model = ClickModel()
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), hooks=hooks).fit(Stream(), steps=1)
    assert seen == ["before_update", "after_step"]
