"""Danger: a worker that trains before the chief has restored, or a chief that ends, and its servers, before the workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from monolith.errors import DeadlineExceededError, InvalidArgumentError, WorkerLostError
from monolith.ps import ParameterServer
from monolith.ps.client.coordination_client import CoordinationClient
from monolith.train.distributed.sync import (
    ChiefSyncHook,
    RemoteStates,
    SyncHelper,
    TrainingHooksHelper,
    WorkerStates,
    WorkerSyncHook,
)
from monolith.train.hooks import Hook
from monolith.train.hooks.hook import hooks_running
from monolith.train.trainer import Trainer
from real_servers import until

NOBODY: Any = SimpleNamespace(interrupted=None, save=lambda: None)
States = Callable[[], AbstractContextManager[tuple[WorkerStates, WorkerStates]]]


class Count(Hook):
    """Counts what the hook before it lets through."""

    started = ended = 0

    def after_start(self, trainer: Trainer) -> None:
        self.started += 1

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        self.ended += 1


class Side:
    """The chief or a worker in a thread, with the hook that `make` gives a way to sleep; `polled` when it has to wait."""

    def __init__(self, make: Callable[[Callable[[float], None]], Hook]) -> None:
        self.count, self.polled = Count(), threading.Semaphore(0)
        self.work_begun, self._go_on, self._work = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, args=([make(self._sleep), self.count],), daemon=True)

    def _sleep(self, seconds: float) -> None:
        self.polled.release()
        assert self._go_on.wait(60)

    def _run(self, hooks: list[Hook]) -> None:
        with hooks_running(hooks, NOBODY, start=lambda: None):
            self.work_begun.set()
            assert self._work.wait(60)

    def start(self) -> None:
        self._thread.start()

    def go_on(self) -> None:
        self._go_on.set()

    def finish(self) -> None:
        self._work.set()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def local() -> Iterator[tuple[WorkerStates, WorkerStates]]:
    states = SyncHelper(2)
    yield states, states


@contextmanager
def remote() -> Iterator[tuple[WorkerStates, WorkerStates]]:
    with (
        ParameterServer() as server,
        CoordinationClient([server.address], index=0, epoch=1) as chief,
        CoordinationClient([server.address], index=1, epoch=1) as worker,
    ):
        yield RemoteStates(chief, num_workers=2), RemoteStates(worker, num_workers=2)


@pytest.mark.parametrize("states", [local, remote])
def test_workers_wait_for_the_chief_and_the_chief_for_workers(states: States) -> None:
    with states() as (of_chief, of_worker):
        chief = Side(lambda sleep: ChiefSyncHook(of_chief, sleep=sleep))
        worker = Side(lambda sleep: WorkerSyncHook(of_worker, index=1, sleep=sleep))
        worker.start()
        assert worker.polled.acquire(timeout=60)
        assert (chief.count.started, worker.count.started) == (0, 0)
        assert of_chief.get_unfinished_workers() == {1: True}

        chief.start()
        assert chief.work_begun.wait(60)
        worker.go_on()
        assert worker.work_begun.wait(60)
        assert (chief.count.started, worker.count.started) == (1, 1)

        chief.finish()
        assert chief.polled.acquire(timeout=60)
        assert (chief.count.ended, worker.count.ended) == (0, 0)
        worker.finish()
        worker.join()
        assert (chief.count.ended, worker.count.ended) == (0, 1)
        chief.go_on()
        chief.join()
        assert chief.count.ended == 1


class Scripted:
    """States that the test writes: what `looks` says with every look, the last of them from then on."""

    def __init__(self, *looks: dict[int, bool], progress: Callable[[], int] = lambda: 0) -> None:
        self._looks, self.get_progress, self.now = list(looks), progress, 0.0

    def get_unfinished_workers(self) -> dict[int, bool]:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def chief(self, **limits: float) -> ChiefSyncHook:
        states = cast(WorkerStates, self)
        return ChiefSyncHook(states, monotonic=self.clock, sleep=self.sleep, **limits)


def test_the_chief_does_not_end_well_while_a_worker_has_not() -> None:
    states = Scripted({2: True})
    with pytest.raises(WorkerLostError, match=r"worker 2 of the run is alive, but made no step for 1800 s"):
        states.chief(replacement_seconds=60.0).end(NOBODY, None)
    assert states.now == 1800.0


def test_workers_that_make_steps_are_waited_for_without_a_limit() -> None:
    states = Scripted({1: True}, progress=lambda: int(states.now // 1000))
    many = [{1: True}] * 20_000
    states._looks = [*many, {}]
    states.chief(timeout_seconds=1800.0).end(NOBODY, None)
    assert states.now == 20_000.0


def test_a_worker_that_is_dead_is_waited_for_until_it_must_have_been_replaced() -> None:
    states = Scripted({1: True, 2: False})
    with pytest.raises(WorkerLostError, match=r"worker 2 of the run is dead, and not replaced within 200 s"):
        states.chief(replacement_seconds=200.0).end(NOBODY, None)
    assert states.now == 200.0


def test_a_worker_that_is_replaced_is_waited_for() -> None:
    back = [{1: False}] * 199 + [{1: True}] * 500 + [{1: False}] * 199 + [{1: True}, {}]
    states = Scripted(*back)
    states.chief(replacement_seconds=200.0).end(NOBODY, None)


def test_the_chief_saves_before_it_waits_for_the_dead() -> None:
    saved: list[float] = []
    states = Scripted(*[{1: True, 2: True}] * 10, *[{1: True, 2: False}] * 5, {})
    trainer: Any = SimpleNamespace(interrupted=None, save=lambda: saved.append(states.now))
    states.chief(replacement_seconds=60.0).end(trainer, None)
    assert saved == [10.0], "once, as soon as one is dead"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_chief_that_is_asked_to_stop_waits_for_nobody(when: str) -> None:
    states = Scripted({1: True})
    trainer: Any = SimpleNamespace(interrupted="SIGTERM" if when == "before" else None)

    def sleep(seconds: float) -> None:
        assert when == "meanwhile"
        trainer.interrupted = "SIGTERM"

    ChiefSyncHook(cast(WorkerStates, states), monotonic=states.clock, sleep=sleep).end(trainer, None)


def test_whom_the_chief_waits_for_is_said_in_words_and_not_every_second(caplog: pytest.LogCaptureFixture) -> None:
    states = Scripted(*[{1: True, 2: True, 3: False}] * 40, *[{2: True}] * 2, {})
    with caplog.at_level(logging.INFO, "monolith.train.distributed.sync"):
        states.chief(replacement_seconds=200.0).end(NOBODY, None)
    assert [record.message for record in caplog.records] == [
        "the chief: waiting for workers 1 and 2, still training, and for worker 3, dead and to be replaced, at most 200 s more",
        "the chief: still waiting after 30 s for workers 1 and 2, still training, and for worker 3, dead and to be replaced, "
        "at most 170 s more",
        "the chief: still waiting after 39 s for worker 2, still training, at most 1761 s more",
    ]


def test_after_an_error_the_chief_waits_for_nobody() -> None:
    states = SyncHelper(2)
    states.start_worker(1)
    ChiefSyncHook(states, sleep=lambda seconds: pytest.fail("it waits")).end(NOBODY, RuntimeError())


def test_the_chief_waits_for_a_worker_until_it_has_ended_without_an_error() -> None:
    states = SyncHelper(2)
    states.mark_restore_done()
    hook = WorkerSyncHook(states, index=1)
    hook.after_start(NOBODY)
    hook.end(NOBODY, RuntimeError("bad data"))
    assert states.get_alive_workers() == [1]
    hook.end(NOBODY, None)
    assert states.get_alive_workers() == []


def test_a_worker_does_not_wait_for_ever_for_a_chief() -> None:
    now = [0.0]
    hook = WorkerSyncHook(
        SyncHelper(2),
        index=1,
        timeout_seconds=7200,
        monotonic=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
    )
    with pytest.raises(DeadlineExceededError, match="within 7200 s"):
        hook.after_start(NOBODY)
    assert now == [7200.0]


def test_processes_are_unfinished_until_they_say_so_however_they_are() -> None:
    with (
        ParameterServer() as server,
        CoordinationClient([server.address], index=0, epoch=1) as chief,
        CoordinationClient([server.address], index=1, epoch=1) as worker,
    ):
        with CoordinationClient([server.address], index=2, epoch=1, lease=0.05) as dead:
            RemoteStates(dead, num_workers=4).start_worker(2)
        states = RemoteStates(chief, num_workers=4)
        until(lambda: not states.get_unfinished_workers()[2])
        assert states.get_unfinished_workers() == {1: True, 2: False, 3: False}, (
            "one has joined, one died, one never came"
        )
        RemoteStates(worker, num_workers=4).finish_worker(1)
        assert states.get_unfinished_workers() == {2: False, 3: False}


def test_who_has_nobody_to_wait_for_gets_no_hooks() -> None:
    states = SyncHelper(2)
    off = TrainingHooksHelper(states, num_workers=2, index=1, enable_sync=False)
    alone = TrainingHooksHelper(SyncHelper(1), num_workers=1, index=0)
    for helper in (off, alone):
        assert (helper.training_hooks, helper.training_chief_hooks) == ((), ())
    chief = TrainingHooksHelper(states, num_workers=2, index=0, chief_timeout_seconds=20)
    assert [type(hook) for hook in chief.training_chief_hooks] == [ChiefSyncHook]
    worker = TrainingHooksHelper(states, num_workers=2, index=1)
    assert [type(hook) for hook in worker.training_hooks] == [WorkerSyncHook]


@pytest.mark.parametrize("index", [0, 2, -1])
def test_only_workers_start_and_finish(index: int) -> None:
    with pytest.raises(InvalidArgumentError, match="from 1 to 1"):
        SyncHelper(2).start_worker(index)
