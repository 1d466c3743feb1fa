"""Danger: a worker that trains before the chief has restored, or a chief that ends, and its servers, before the workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from monolith.errors import DeadlineExceededError, InvalidArgumentError
from monolith.ps import ParameterServer
from monolith.ps.client.coordination_client import CoordinationClient
from monolith.train.hooks import ChiefSyncHook, Hook, SyncHelper, TrainingHooksHelper, WorkerSyncHook
from monolith.train.hooks.run import hooks_running
from monolith.train.hooks.sync import WorkerStates
from monolith.train.remote_states import RemoteStates
from monolith.train.trainer import Trainer

NOBODY: Any = SimpleNamespace()
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
        yield RemoteStates(chief), RemoteStates(worker)


@pytest.mark.parametrize("states", [local, remote])
def test_workers_wait_for_the_chief_and_the_chief_for_workers(states: States) -> None:
    with states() as (of_chief, of_worker):
        chief = Side(lambda sleep: ChiefSyncHook(of_chief, sleep=sleep))
        worker = Side(lambda sleep: WorkerSyncHook(of_worker, index=1, sleep=sleep))
        worker.start()
        assert worker.polled.acquire(timeout=60)
        assert (chief.count.started, worker.count.started) == (0, 0)
        assert of_chief.get_alive_workers() == [1]

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


def test_the_chief_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    states = SyncHelper(3)
    states.start_worker(2)
    hook = ChiefSyncHook(states, monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    with caplog.at_level(logging.WARNING):
        hook.end(NOBODY, None)
    assert now == [1800.0]
    assert "workers [2] have not, after 1800 s" in caplog.text


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


def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as chief:
        with CoordinationClient([server.address], index=1, epoch=1, lease=0.05) as worker:
            RemoteStates(worker).start_worker(1)
            assert RemoteStates(chief).get_alive_workers() == [1]
        ChiefSyncHook(RemoteStates(chief), timeout_seconds=60, sleep=threading.Event().wait).end(NOBODY, None)
        assert RemoteStates(chief).get_alive_workers() == []


def test_a_worker_that_has_only_joined_is_waited_for() -> None:
    with (
        ParameterServer() as server,
        CoordinationClient([server.address], index=0, epoch=1) as chief,
        CoordinationClient([server.address], index=1, epoch=1) as worker,
    ):
        assert RemoteStates(chief).get_alive_workers() == [1]
        RemoteStates(worker).finish_worker(1)
        assert RemoteStates(chief).get_alive_workers() == []


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
