"""Danger: a checkpoint taken while another process is halfway through a step, or a process that is never let go."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from monolith.errors import InvalidArgumentError, StalePushError
from monolith.ps import ParameterServer
from monolith.ps.client.coordination_client import CoordinationClient
from monolith.train.distributed.barrier import BarrierAlreadyPlacedError, RemoteBarrier, WorkerBarrier
from real_servers import until


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    with ParameterServer() as server:
        yield server


@pytest.fixture
def chief(server: ParameterServer) -> Iterator[CoordinationClient]:
    with CoordinationClient([server.address], index=0, epoch=1) as client:
        client.enter("running")
        yield client


@pytest.fixture
def worker(server: ParameterServer) -> Iterator[CoordinationClient]:
    with CoordinationClient([server.address], index=1, epoch=1) as client:
        client.enter("running")
        yield client


def test_a_worker_is_held_until_the_barrier_is_removed(chief: CoordinationClient, worker: CoordinationClient) -> None:
    polled, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        polled.set()
        assert go_on.wait(60)

    barrier, seen = RemoteBarrier(chief, capacity=2), list[str]()
    assert isinstance(barrier, WorkerBarrier)
    barrier.place("Save")
    assert barrier.unblocked() == [1]
    held = RemoteBarrier(worker, capacity=2, sleep=sleep)
    thread = threading.Thread(target=held.wait, args=(1, [seen.append]), daemon=True)
    thread.start()
    assert polled.wait(60)
    assert (seen, barrier.unblocked(), barrier.held()) == (["Save"], [], [0, 1])
    barrier.remove()
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert (barrier.unblocked(), barrier.held()) == ([0, 1], [])


def test_nobody_is_held_by_a_barrier_that_ends_the_run(chief: CoordinationClient, worker: CoordinationClient) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("it waits")

    seen = list[str]()
    RemoteBarrier(chief, capacity=2).place("Stop")
    assert RemoteBarrier(worker, capacity=2, sleep=sleep).wait(1, [seen.append])
    assert seen == ["Stop"]


def test_without_a_barrier_a_worker_passes(worker: CoordinationClient) -> None:
    assert RemoteBarrier(worker, capacity=2).wait(1, [pytest.fail]) is False


def test_one_barrier_at_a_time_whoever_asks(chief: CoordinationClient, worker: CoordinationClient) -> None:
    called: list[str] = []
    RemoteBarrier(chief, capacity=2, callbacks=[called.append]).place("Save")
    assert called == ["Save"]
    with pytest.raises(BarrierAlreadyPlacedError, match="'Save'"):
        RemoteBarrier(worker, capacity=2).place("Stop")


def test_after_a_report_nobody_is_asked_again(
    chief: CoordinationClient, worker: CoordinationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = RemoteBarrier(worker, capacity=2)
    answered = worker._link.answered
    worker.report()
    report = worker._report
    assert report is not None
    frame = answered(report)  # it has arrived
    RemoteBarrier(chief, capacity=2).place("Save")
    with monkeypatch.context() as patch:
        patch.setattr(worker._link, "answered", lambda exchange: frame)
        worker.report()  # has the answer of the one before: no barrier yet
    with monkeypatch.context() as patch:
        patch.setattr(worker._link, "call", lambda *given: pytest.fail("it asks"))
        assert barrier.wait(1) is False
    worker.report()
    seen: list[str] = []
    RemoteBarrier(chief, capacity=2).remove()
    assert barrier.wait(1, [seen.append]) is True
    assert seen == ["Save"]


def test_a_worker_that_ended_or_never_came_is_not_waited_for(
    chief: CoordinationClient, worker: CoordinationClient
) -> None:
    barrier = RemoteBarrier(chief, capacity=5)
    barrier.place("Save")
    assert barrier.unblocked() == [1]
    worker.enter("finished")
    assert barrier.unblocked() == []


def test_a_worker_that_died_is_not_waited_for(server: ParameterServer, chief: CoordinationClient) -> None:
    barrier = RemoteBarrier(chief, capacity=2)
    with CoordinationClient([server.address], index=1, epoch=1, lease=0.05) as worker:
        worker.enter("running")
        barrier.place("Save")
    until(lambda: barrier.unblocked() == [])


def test_a_new_chief_lets_go_of_those_its_predecessor_held(server: ParameterServer, chief: CoordinationClient) -> None:
    RemoteBarrier(chief, capacity=2).place("Save")
    with CoordinationClient([server.address], index=0, epoch=2) as successor:
        assert not RemoteBarrier(successor, capacity=2).is_placed()
        with pytest.raises(StalePushError, match="has been replaced"):
            RemoteBarrier(chief, capacity=2).place("Save")


@pytest.mark.parametrize("index", [0, 2, -1])
def test_only_workers_wait(worker: CoordinationClient, index: int) -> None:
    with pytest.raises(InvalidArgumentError, match="from 1 to 1"):
        RemoteBarrier(worker, capacity=2).wait(index)
