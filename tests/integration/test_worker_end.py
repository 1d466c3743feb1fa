"""Danger: servers that end while a worker still asks them; it would then wait for them without an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_threads import BATCH, Cluster, phases
from monolith.cluster import HostServiceDiscovery
from monolith.cluster.liveness import Liveness
from monolith.errors import DeadlineExceededError, RunInterruptedError, StalePushError, WorkerLostError
from monolith.ps import ServerStore
from monolith.train import RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook
from real_servers import until

SECONDS = 120


class Look(Hook):
    """What the first server says at the end; first raises `error`, once, if there is one."""

    address = ""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[dict[int, str]] = []
        self._error = error

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        (store,) = trainer.stores
        assert isinstance(store, ServerStore)
        self.address = store.addresses[0]
        self.seen.append(phases(self.address))
        raised, self._error = self._error, None
        if raised is not None:
            raise raised


def test_a_worker_has_finished_when_its_last_hook_has(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    looks = [Look(), Look()]
    for worker in [cluster.start("worker", index, [BATCH], [looks[index]]) for index in range(2)]:
        worker.result(SECONDS)
    assert [seen[1] for seen in looks[1].seen] == ["running"]
    assert [seen[1] for seen in looks[0].seen] == ["finished"]


def test_a_worker_that_comes_back_has_not_finished(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    look, between = Look(DeadlineExceededError("too slow")), []
    worker = cluster.start("worker", 1, [BATCH], [look])
    # Told between two attempts; the first cannot end before the chief has begun.
    cluster.trainers[1].on_save_metric = lambda name, value, tags: between.append(phases(look.address)[1])
    chief = cluster.start("worker", 0, [BATCH])
    assert worker.result(SECONDS) == chief.result(SECONDS) == 2
    assert between == ["running"]


QUICK = Liveness(
    heartbeat_secs=0.1,
    lease_secs=0.5,
    hang_secs=0.5,
    startup_secs=0.5,
    backoff_secs=0.0,
    max_backoff_secs=0.0,
    grace_secs=1.0,
    orphan_secs=600.0,
)


def test_without_a_worker_that_broke_the_run_has_failed_and_servers_stay_for_successors(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2, liveness=QUICK)
    (server,) = cluster.servers()
    worker = cluster.start("worker", 1, [BATCH], [Look(StalePushError("replaced"))])
    chief = cluster.start("worker", 0, [BATCH])
    with pytest.raises(StalePushError, match="replaced"):
        worker.result(SECONDS)
    with pytest.raises(WorkerLostError, match=r"worker 1 of the run is dead, and not replaced within 1.1 s"):
        chief.result(SECONDS)
    assert not server.done()
    # Both are started again.
    again = [cluster.start("worker", index, [BATCH]) for index in range(2)]
    assert [future.result(SECONDS) >= 2 for future in again] == [True, True]
    assert server.result(SECONDS) == 0


def test_a_worker_that_is_asked_to_stop_has_not_finished(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    (server,) = cluster.servers()

    class Interrupt(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            trainer.interrupt("received SIGTERM")

    chief, look = cluster.start("worker", 0, [BATCH]), Look()
    with pytest.raises(RunInterruptedError, match=r"worker 1 stopped at step .* its work was done: received SIGTERM"):
        cluster.start("worker", 1, [BATCH] * 2, [Interrupt(), look]).result(SECONDS)
    assert phases(look.address)[1] == "running"
    assert not chief.done()
    cluster.start("worker", 1, [BATCH]).result(SECONDS)
    chief.result(SECONDS)
    assert server.result(SECONDS) == 0


def test_a_chief_that_is_asked_to_stop_leaves_the_servers_to_its_successor(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=1)
    (server,) = cluster.servers()

    class Interrupt(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            trainer.interrupt("received SIGTERM")

    with pytest.raises(RunInterruptedError):
        cluster.start("worker", 0, [BATCH] * 2, [Interrupt()]).result(SECONDS)
    assert not server.done()
    cluster.start("worker", 0, [BATCH]).result(SECONDS)
    assert server.result(SECONDS) == 0


def test_a_chief_that_is_supervised_leaves_the_servers_to_its_launcher(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=1, supervised=True)
    (server,) = cluster.servers()
    cluster.start("worker", 0, [BATCH]).result(SECONDS)
    assert not server.done()
    Cluster(tmp_path, num_ps=1, num_workers=1).start("worker", 0, [BATCH]).result(SECONDS)
    assert server.result(SECONDS) == 0


def test_who_finished_the_launch_before_is_waited_for_again(tmp_path: Path) -> None:
    """Servers under a launcher are not told that a run has ended, and remember who has finished it."""
    first = Cluster(tmp_path, num_ps=1, num_workers=2, supervised=True, uuid="monday")
    (server,) = first.servers()
    for worker in [first.start("worker", index, [BATCH]) for index in range(2)]:
        worker.result(SECONDS)
    (address,) = HostServiceDiscovery(tmp_path / "discovery").query("ps").values()
    assert phases(address) == {0: "running", 1: "finished"}, (
        "a chief that is killed now and restarted does not wait again"
    )
    more = RunConfig(epochs=2)
    again = Cluster(tmp_path, num_ps=1, num_workers=2, uuid="tuesday", start_timeout_secs=0.0, config=more)
    known: list[dict[int, str]] = []

    class Known(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            (store,) = trainer.stores
            assert isinstance(store, ServerStore)
            known.append(phases(store.addresses[0]))

    chief = again.start("worker", 0, [BATCH], [Known()])
    until(lambda: known)
    assert known == [{0: "running"}]
    again.start("worker", 1, [BATCH]).result(SECONDS)
    chief.result(SECONDS)
    assert server.result(SECONDS) == 0
