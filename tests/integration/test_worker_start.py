"""Danger: workers that start at the wrong moment: a chief that trains alone, or all workers on a model that is still random."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from cluster_threads import BATCH, Cluster, phases
from monolith.cluster import HostServiceDiscovery
from monolith.ps import ClientConfig, ServerStore
from monolith.ps.client.benchmark import Measured, measure_servers
from monolith.train import Trainer
from monolith.train.distributed import run as distributed
from monolith.train.hooks import CustomGlobalStepWaiterHook, Hook

SECONDS = 120


class ChiefAtFirstStep(Hook):
    """The step of the chief when a worker makes its first one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self.step = cluster, -1

    def before_step(self, trainer: Trainer) -> None:
        if self.step < 0:
            self.step = self._cluster.trainers[0].step


class Joined(Hook):
    """The workers that have joined the run when this one begins."""

    def __init__(self) -> None:
        self.workers: set[int] = set()

    def begin(self, trainer: Trainer) -> None:
        (store,) = trainer.stores
        assert isinstance(store, ServerStore)
        self.workers = set(phases(store.addresses[0]))


def test_worker_i_begins_at_the_slow_start_steps_times_the_logarithm_of_1_plus_i(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=3, slow_start_steps=10, max_slow_start_wait_minute=7.0)
    cluster.servers()
    chief = [ChiefAtFirstStep(cluster) for _ in range(3)]
    counts = [12, 1, 1]
    for worker in [cluster.start("worker", i, [BATCH] * counts[i], [chief[i]]) for i in range(3)]:
        worker.result(SECONDS)
    waiters = [
        [hook for hook in cluster.trainers[index].hooks if isinstance(hook, CustomGlobalStepWaiterHook)]
        for index in range(3)
    ]
    # 10 ln 2 = 6.9 and 10 ln 3 = 10.99; the chief does not wait.
    assert [[hook.wait_until_step for hook in hooks] for hooks in waiters] == [[], [6], [10]]
    assert [hook.max_wait_seconds for hook in (*waiters[1], *waiters[2])] == [420.0, 420.0]
    # Servers count a push that the chief has not heard the answer to yet.
    assert chief[1].step >= 5
    assert chief[2].step >= 8  # the step of worker 1 counts too


def test_without_slow_start_nobody_waits_for_steps(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    for worker in [cluster.start("worker", index, [BATCH]) for index in range(2)]:
        worker.result(SECONDS)
    assert not any(isinstance(hook, CustomGlobalStepWaiterHook) for hook in cluster.trainers[1].hooks)


def test_the_chief_begins_when_all_workers_have_joined(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    discovery = HostServiceDiscovery(cluster.folder / "discovery")
    while not discovery.query("ps"):
        time.sleep(0.01)
    late: list[Future[int]] = []

    def sleep(seconds: float) -> None:
        """The other worker comes only when the chief has something to wait for."""
        if not late:
            late.append(cluster.start("worker", 1, [BATCH]))
        time.sleep(min(seconds, 0.02))

    joined = Joined()
    cluster.start("worker", 0, [BATCH], [joined], sleep=sleep).result(SECONDS)
    assert joined.workers == {0, 1}
    late[0].result(SECONDS)


def test_servers_are_measured_for_as_long_as_the_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def measure(addresses: Sequence[str], *, seconds: float, config: ClientConfig) -> list[Measured]:
        measured.append(seconds)
        return measure_servers(addresses, seconds=0.01, config=config)

    monkeypatch.setattr(distributed, "measure_servers", measure)
    cluster = Cluster(tmp_path, num_ps=1, num_extra_ps=1, num_workers=1, benchmark_secs=17.0)
    cluster.servers()
    cluster.start("worker", 0, [BATCH]).result(SECONDS)
    assert measured == [17.0]
