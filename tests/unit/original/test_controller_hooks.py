"""Danger: a request in a file that nobody answers, that is done twice, or that ends a run by a typing error."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from monolith.errors import StorageError
from monolith.original import ControllerHook, QueryActionHook, StopHelper
from monolith.state.restore_points import restore_points
from monolith.train import RunConfig, Trainer
from monolith.train.distributed.barrier import LocalBarrier
from monolith.train.hooks import Hook
from training import ClickModel, batch_of


class Ask(Hook):
    """Writes a request before one step, and notes the answer and whether the request is gone before the next."""

    def __init__(self, folder: Path, text: str, *, at: int = 2) -> None:
        self.folder, self.text, self.at, self.answer, self.left = folder, text, at, "", True

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step == self.at:
            (self.folder / "monolith_action").write_text(self.text)
        if trainer.step == self.at + 1:
            self.look()

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        if not self.answer:
            self.look()

    def look(self) -> None:
        self.answer = (self.folder / "monolith_action_response").read_text()
        self.left = (self.folder / "monolith_action").exists()


def fit(folder: Path, text: str) -> tuple[Trainer, Ask]:
    model, ask = ClickModel(), Ask(folder, text)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        config=RunConfig(model_dir=str(folder), save_checkpoints_secs=0.0),
        hooks=[ask, QueryActionHook(poll_seconds=0)],
    )
    trainer.fit([batch_of(number) for number in range(6)])
    return trainer, ask


@pytest.mark.parametrize("text", ["action: TRIGGER_SAVE\n", "action:1"])
def test_a_save_is_made_and_answered(tmp_path: Path, text: str) -> None:
    trainer, ask = fit(tmp_path, text)
    assert (trainer.step, ask.answer, ask.left) == (6, "OK", False)
    assert [point.step for point in restore_points(str(tmp_path))] == [2, 6]


@pytest.mark.parametrize("text", ["action: STOP", "action: 2"])
@pytest.mark.parametrize("with_controller", [False, True])
def test_a_run_is_ended_and_saved(tmp_path: Path, text: str, with_controller: bool) -> None:
    model, ask = ClickModel(), Ask(tmp_path, text)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config=RunConfig(model_dir=str(tmp_path)))
    trainer.hooks = (ask, QueryActionHook(poll_seconds=0), *([ControllerHook(trainer)] if with_controller else []))
    trainer.fit([batch_of(number) for number in range(6)])
    assert (trainer.step, trainer.stop_reason, ask.answer) == (2, "an operator has ended the run", "OK")
    assert [point.step for point in restore_points(str(tmp_path))] == [2]


@pytest.mark.parametrize("text", ["", "action: RESTART", "STOP"])
def test_what_cannot_be_read_is_answered_and_changes_nothing(tmp_path: Path, text: str) -> None:
    trainer, ask = fit(tmp_path, text)
    assert (trainer.step, ask.left) == (6, False)
    assert ask.answer.startswith("InvalidArgumentError: monolith_action: expected 'action: TRIGGER_SAVE'")


def test_a_save_that_fails_is_answered_and_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(trainer: Trainer) -> str:
        raise StorageError("no space left on device")

    monkeypatch.setattr(Trainer, "save", refuse)
    trainer, ask = fit(tmp_path, "action: TRIGGER_SAVE")
    assert (trainer.step, ask.answer) == (6, "StorageError: no space left on device")


def test_it_looks_once_in_a_while(tmp_path: Path) -> None:
    now = [0.0]

    class Clock(Hook):
        def before_step(self, trainer: Trainer) -> None:
            now[0] += 25.0

    model, ask = ClickModel(), Ask(tmp_path, "action: STOP", at=1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config=RunConfig(model_dir=str(tmp_path)))
    ask.look = lambda: None  # type: ignore[method-assign]
    trainer.hooks = (Clock(), ask, QueryActionHook(clock=lambda: now[0]))
    trainer.fit([batch_of(number) for number in range(9)])
    # At 25 s before step 1, when there is no request, and at 100 s.
    assert trainer.step == 3


def test_the_other_workers_end_with_the_chief() -> None:
    barrier = LocalBarrier(2)
    helper = StopHelper(barrier)
    model = ClickModel()
    worker = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), hooks=[helper.create_stop_hook(1)])
    thread = threading.Thread(target=worker.fit, args=[(batch_of(n) for n in iter(int, 1))], daemon=True)
    thread.start()
    chief = Trainer(torch.nn.Identity())
    helper.trigger_stop(chief)
    thread.join(60)
    assert not thread.is_alive()
    assert (chief.stop_reason, worker.stop_reason) == ("the run was asked to stop", "the chief has ended the run")
