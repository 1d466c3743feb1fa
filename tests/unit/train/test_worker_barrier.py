"""Danger: a save while a worker is halfway through a step, or a worker that is never let go."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from monolith import Trainer
from monolith.errors import InvalidArgumentError, SaveInterruptedError, UnavailableError
from monolith.train.distributed.barrier import (
    HOLD,
    STOP,
    BarrierAlreadyPlacedError,
    BarrierHook,
    BarrierSaverListener,
    LocalBarrier,
    WorkerBarrier,
)
from monolith.train.hooks import NoFirstSaveCheckpointSaverHook

NOBODY: Any = SimpleNamespace(settle=lambda: None)


def test_workers_are_held_until_the_barrier_is_removed() -> None:
    barrier = LocalBarrier(3)
    assert isinstance(barrier, WorkerBarrier)
    barrier.place("Save")
    assert barrier.is_placed()
    assert barrier.unblocked() == [1, 2]
    seen: list[str] = []
    workers = [threading.Thread(target=barrier.wait, args=(index, [seen.append]), daemon=True) for index in (1, 2)]
    for worker in workers:
        worker.start()
    assert barrier.wait_all_blocked(60)
    assert seen == ["Save", "Save"]
    assert all(worker.is_alive() for worker in workers)
    barrier.remove()
    for worker in workers:
        worker.join(60)
    assert barrier.wait_none_blocked(60)
    assert barrier.unblocked() == [0, 1, 2]


def test_without_a_barrier_a_worker_passes() -> None:
    called: list[str] = []
    assert LocalBarrier(2).wait(1, [called.append]) is False
    assert called == []


def test_one_barrier_at_a_time() -> None:
    barrier = LocalBarrier(2)
    barrier.place("Save")
    with pytest.raises(BarrierAlreadyPlacedError, match="'Save'"):
        barrier.place("Stop")
    barrier.remove()
    barrier.remove()
    barrier.place("Stop")


def test_the_chief_calls_back_after_placing() -> None:
    placed: list[tuple[str, bool]] = []
    barrier = LocalBarrier(2, [lambda action: placed.append((action, barrier.is_placed()))])
    barrier.place("Save")
    assert placed == [("Save", True)]


@pytest.mark.parametrize("index", [0, 2, -1])
def test_only_workers_wait(index: int) -> None:
    with pytest.raises(InvalidArgumentError, match="from 1 to 1"):
        LocalBarrier(2).wait(index)


def test_a_save_waits_for_workers_and_lets_them_go() -> None:
    barrier = LocalBarrier(2)
    hook = BarrierHook(barrier, index=1)
    worker = threading.Thread(target=hook.after_step, args=(NOBODY, NOBODY), daemon=True)
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        worker.start()
        assert barrier.wait_all_blocked(60)

    listener = BarrierSaverListener(barrier, sleep=sleep)
    listener.before_cut(NOBODY, 3)
    assert (sleeps, barrier.unblocked()) == ([1.0], [])
    listener.after_cut(NOBODY, 3)
    worker.join(60)
    assert not worker.is_alive()


def test_a_save_goes_on_without_a_worker_that_does_not_come(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    listener = BarrierSaverListener(LocalBarrier(2), monotonic=lambda: now[0], sleep=sleep)
    with caplog.at_level(logging.WARNING):
        listener.before_cut(NOBODY, 3)
    assert now == [30.0]
    assert "workers [1]" in caplog.text


def test_a_save_that_failed_lets_them_go_too() -> None:
    barrier = LocalBarrier(1)
    listener = BarrierSaverListener(barrier)
    listener.before_cut(NOBODY, 3)
    assert barrier.is_placed()
    listener.after_save(NOBODY, 3)
    assert not barrier.is_placed()


def test_a_barrier_of_someone_else_is_left_alone() -> None:
    barrier = LocalBarrier(1)
    barrier.place("Stop")
    listener = BarrierSaverListener(barrier)
    listener.before_cut(NOBODY, 3)
    listener.after_cut(NOBODY, 3)
    listener.after_save(NOBODY, 3)
    assert barrier.is_placed()


def test_a_save_behind_the_barrier_of_someone_else_waits_for_the_workers_too() -> None:
    barrier = LocalBarrier(2)
    barrier.place(HOLD)
    worker = threading.Thread(target=barrier.wait, args=(1,), daemon=True)

    def sleep(seconds: float) -> None:
        worker.start()
        assert barrier.wait_all_blocked(60)

    BarrierSaverListener(barrier, sleep=sleep).before_cut(NOBODY, 3)
    assert barrier.held() == [0, 1]
    barrier.remove()
    assert barrier.held() == []
    worker.join(60)


def test_nobody_is_held_by_a_barrier_that_ends_the_run() -> None:
    barrier, seen = LocalBarrier(2), list[str]()
    barrier.place(STOP)
    assert barrier.wait(1, [seen.append])
    assert seen == [STOP]
    trainer = Trainer(nn.Identity())
    BarrierHook(barrier, index=1).after_step(trainer, NOBODY)
    assert trainer.stop_reason == "the chief has ended the run"


def test_a_save_that_is_tried_again_holds_the_workers_again() -> None:
    """A server was started again while it wrote: what is taken then must be of one moment too."""
    barrier, held, failures = LocalBarrier(1), [], [SaveInterruptedError("gone"), None]

    class Pending:
        def finish(self) -> str:
            if (failure := failures.pop(0)) is not None:
                raise failure
            return "model.ckpt-1"

        def hurry(self) -> None: ...

    class Saver:
        mode = "full"

        def is_saved(self, trainer: Trainer) -> bool:
            return not failures

        def begin(self, trainer: Trainer) -> Pending:
            held.append(barrier.is_placed())
            return Pending()

    saver: Any = Saver()
    hook = NoFirstSaveCheckpointSaverHook(saver, guard_listeners=[BarrierSaverListener(barrier)])
    Trainer(nn.Identity(), hooks=[hook]).fit([{"label": torch.ones(1)}], max_steps=0)
    assert held == [True, True]
    assert not barrier.is_placed()


def test_the_step_of_a_save_is_that_of_all_workers_while_they_are_held() -> None:
    trainer = Trainer(nn.Identity())
    trainer.step = 3
    BarrierSaverListener(LocalBarrier(1), step=lambda: 11).before_cut(trainer, 3)
    assert trainer.step == 11


def test_a_barrier_that_was_placed_though_the_call_failed_is_removed() -> None:
    class Lost(LocalBarrier):
        def place(self, action: str = "") -> None:
            super().place(action)
            raise UnavailableError("the answer was lost")

    barrier = Lost(1)
    listener = BarrierSaverListener(barrier)
    with pytest.raises(UnavailableError):
        listener.before_cut(NOBODY, 3)
    listener.after_cut(NOBODY, 3)
    assert not barrier.is_placed()
