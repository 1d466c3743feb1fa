"""Danger: workers that coordinate through ZooKeeper wait forever for each other, or count a worker that has left.

The same behaviour is wanted of the parameter servers, so most tests run over both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from kazoo.client import KazooClient

from cluster_threads import BATCH, FeatureModel, sleep, started
from monolith import Trainer
from monolith.cluster import Liveness, ZKServiceDiscovery
from monolith.cluster.coordination import Coordination
from monolith.cluster.zookeeper_coordination import ZKCoordination, ZKSession
from monolith.errors import StalePushError
from monolith.ps import ClientConfig, ParameterServer
from monolith.ps.client.coordination_client import CoordinationClient, HostLink, ServerSteps
from monolith.testing.servers import ZooKeeperServer
from monolith.train import RunnerConfig
from monolith.train.distributed.run import distributed_train
from real_servers import until

SHORT = Liveness(heartbeat_secs=0.2, lease_secs=4.0)
Join = Callable[..., Coordination]


class Five:
    """A global step that the servers would know."""

    def now(self) -> int:
        return 5

    def report(self) -> int:
        return 5

    def close(self) -> None: ...


class ZooKeeperRun:
    """Workers of one job, each with a session of its own as a process has."""

    def __init__(self, zookeeper: ZooKeeperServer, job: str, stack: ExitStack) -> None:
        self._zookeeper, self._job, self._stack = zookeeper, job, stack
        self.sessions: dict[tuple[int, int], ZKSession] = {}

    def __call__(self, index: int, epoch: int = 1) -> Coordination:
        session = ZKSession(self._job, self._zookeeper.address, liveness=SHORT)
        self._stack.callback(session.close)
        self.sessions[index, epoch] = session
        member = ZKCoordination(session, index=index, epoch=epoch, steps=Five())
        self._stack.callback(member.close)
        return member

    def kill(self, index: int, epoch: int = 1) -> None:
        """End the session of a worker from outside, as ZooKeeper does when it was silent for too long."""
        thief = KazooClient(self._zookeeper.address, client_id=self.sessions[index, epoch].client.client_id)
        thief.start()
        thief.stop()
        thief.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def run(zookeeper: ZooKeeperServer, job: str, stack: ExitStack) -> ZooKeeperRun:
    return ZooKeeperRun(zookeeper, job, stack)


@pytest.fixture(params=["zookeeper", "servers"])
def join(request: pytest.FixtureRequest, stack: ExitStack) -> Join:
    if request.param == "zookeeper":
        run: ZooKeeperRun = request.getfixturevalue("run")
        return run
    server = stack.enter_context(ParameterServer())

    def embedded(index: int, epoch: int = 1) -> Coordination:
        return stack.enter_context(CoordinationClient([server.address], index=index, epoch=epoch))

    return embedded


def seen(of: Coordination) -> list[tuple[int, str, bool, bool]]:
    return [(one.index, one.phase, one.alive, one.held) for one in of.members().members]


def test_workers_see_each_other(join: Join) -> None:
    chief, worker = join(0), join(1)
    chief.enter("running")
    assert seen(worker) == [(0, "running", True, False), (1, "joined", True, False)]
    worker.enter("finished")
    assert seen(chief) == [(0, "running", True, False), (1, "finished", True, False)]


def test_a_replaced_worker_is_refused(join: Join) -> None:
    old, new = join(1), join(1, 2)
    for call in (lambda: old.enter("running"), lambda: old.place_barrier("Save"), old.remove_barrier, old.end_run):
        with pytest.raises(StalePushError, match="1 of worker 1 is over, 2 has joined since"):
            call()
    with pytest.raises(StalePushError):
        join(1)
    assert [(one.epoch, one.phase) for one in new.members().members] == [(2, "joined")]


def test_a_barrier_holds_until_it_is_removed(join: Join) -> None:
    chief, worker = join(0), join(1)
    assert worker.newest().barrier is None
    placed, barrier = chief.place_barrier("Save")
    assert (placed, barrier.action) == (True, "Save")
    assert chief.place_barrier("Stop") == (False, barrier)
    assert worker.newest().barrier == barrier
    worker.report()
    assert worker.report().barrier == barrier
    assert worker.hold(barrier.number)
    assert [held for *_, held in seen(chief)] == [False, True]
    chief.remove_barrier()
    assert not worker.hold(barrier.number)
    assert [held for *_, held in seen(chief)] == [False, False]
    chief.remove_barrier()  # once more: harmless
    _, second = chief.place_barrier("Save")
    assert second.number > barrier.number
    assert not worker.hold(barrier.number)


def test_a_barrier_falls_with_a_chief_that_was_replaced(join: Join) -> None:
    chief, worker = join(0), join(1)
    _, barrier = chief.place_barrier("Save")
    successor = join(0, 2)
    assert not worker.hold(barrier.number)
    placed, second = successor.place_barrier("Save")
    assert placed
    assert worker.hold(second.number)


def test_a_run_that_has_ended_leaves_nobody_who_has_finished(join: Join) -> None:
    chief, worker = join(0), join(1)
    worker.enter("finished")
    chief.end_run()
    assert (1, "finished") not in [(index, phase) for index, phase, *_ in seen(chief)]


def test_who_has_ended_is_not_alive_and_stays_finished(run: ZooKeeperRun) -> None:
    chief, worker = run(0), run(1)
    worker.enter("finished")
    worker.close()
    assert seen(chief)[1] == (1, "finished", False, False)


def test_a_worker_that_retries_stays_alive(run: ZooKeeperRun) -> None:
    chief, worker = run(0), run(1)
    worker.stay(1.0)
    worker.close()
    assert seen(chief)[1] == (1, "joined", True, False)


def test_who_lost_its_session_is_not_alive_until_it_is_back(run: ZooKeeperRun) -> None:
    chief, worker = run(0), run(1)
    worker.enter("running")
    run.kill(1)
    until(lambda: seen(chief)[1] == (1, "running", True, False) and run.sessions[1, 1].number != 0)
    worker.enter("finished")
    assert seen(chief)[1][:3] == (1, "finished", True)


def test_a_barrier_falls_with_the_session_of_the_chief(run: ZooKeeperRun) -> None:
    chief, worker = run(0), run(1)
    _, barrier = chief.place_barrier("Save")
    assert worker.hold(barrier.number)
    run.kill(0)
    until(lambda: not worker.hold(barrier.number))


def test_a_successor_takes_the_place_of_one_whose_session_is_not_over(run: ZooKeeperRun) -> None:
    chief, old = run(0), run(1)
    run(1, 2).enter("running")
    old.close()  # late: what it withdraws is its own
    assert [(one.epoch, one.alive) for one in chief.members().members][1] == (2, True)


def test_the_global_step_is_that_of_the_servers(run: ZooKeeperRun, stack: ExitStack) -> None:
    assert (run(0).members().step, run(1).report().step) == (5, 5)
    server = stack.enter_context(ParameterServer())
    steps = ServerSteps(HostLink([server.address], config=ClientConfig()))
    stack.callback(steps.close)
    assert (steps.now(), steps.report(), steps.report()) == (0, 0, 0)


def test_a_run_over_zookeeper_counts_every_step_and_leaves_no_worker_behind(
    zk_connect: Callable[..., ZKServiceDiscovery], zk_client: KazooClient, job: str, tmp_path: Path
) -> None:
    def started_as(kind: str, index: int) -> Future[int]:
        model = FeatureModel()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        runner = RunnerConfig(server_type=kind, index=index, num_ps=1, num_workers=2, model_dir=str(tmp_path))
        discovery = zk_connect()
        return started(lambda: distributed_train(trainer, [BATCH] * 6, runner, discovery, sleep=sleep))

    server, chief, worker = started_as("ps", 0), started_as("worker", 0), started_as("worker", 1)
    assert chief.result(60) == 12
    worker.result(60)
    server.result(60)
    for folder in ("members", "alive"):
        assert zk_client.get_children(f"/monolith/{job}/coordination/{folder}") == []
