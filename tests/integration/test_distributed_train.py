"""Danger: a run over servers that does not begin, does not end, trains less than it was given, or gives up too early."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster_threads import BATCH, Cluster
from monolith.cluster import HostServiceDiscovery
from monolith.data.sources.source import Source, SourcePosition
from monolith.errors import ConfigError, DeadlineExceededError, StalePushError
from monolith.features import Batch
from monolith.ps import ParameterServer, ServerOptimizer, ServerStore
from monolith.train import RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook

SECONDS = 120


class Shares(list[Batch]):
    """Data that knows its parts."""

    def shard(self, index: int, count: int) -> list[Batch]:
        return self[index::count]


class Three(Source):
    """Three batches, which begin anew when they have ended."""

    def _start(self) -> SourcePosition:
        return {"next": 0}

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        for number in range(int(position["next"]), 3):
            yield BATCH, {"next": number + 1}


class Watch(Hook):
    """Counts steps, and looks at the servers while they are still there."""

    made = rows = 0
    servers: tuple[str, ...] = ()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.made += 1

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        (store,) = trainer.stores
        assert isinstance(store, ServerStore)
        self.servers, self.rows = store.addresses, store.stats()["feature"].rows


class Fail(Hook):
    """Raises `error` before step `at`, once."""

    def __init__(self, error: Exception, *, at: int = 0) -> None:
        self._error: Exception | None = error
        self._at = at

    def before_step(self, trainer: Trainer) -> None:
        if self._error is not None and trainer.step >= self._at:
            error, self._error = self._error, None
            raise error


class Tell(Hook):
    """Sets an event with the first step."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._event.set()


class Compare(Hook):
    """Whether the model has, at the end, what is on the servers."""

    is_same = False

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        assert isinstance(trainer.optimizer, ServerOptimizer)
        values = trainer.optimizer._cached.origin.read()
        self.is_same = all(torch.equal(values[name], here) for name, here in trainer.model.named_parameters())


class FailAtEnd(Hook):
    """Fails once after the last step."""

    failed = False

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        if not self.failed:
            self.failed = True
            raise DeadlineExceededError("too slow")


def test_all_processes_of_a_run_end_and_every_step_counts(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=4, num_workers=3)
    servers = cluster.servers()
    watches = [Watch() for _ in range(3)]
    workers = [cluster.start("worker", index, [BATCH] * 5, [watches[index]]) for index in range(3)]
    ended = [worker.result(SECONDS) for worker in workers]
    assert [server.result(SECONDS) for server in servers] == [0] * 4
    assert [watch.made for watch in watches] == [5, 5, 5]
    assert [watch.rows for watch in watches] == [2, 2, 2]
    # The chief waits for the others; they may end before the last step of someone else.
    assert ended[0] == 15
    assert HostServiceDiscovery(tmp_path / "discovery").query("ps") == {}


def test_several_workers_train_one_set_of_dense_parameters(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=2, num_workers=2)
    cluster.servers()
    compare = Compare()
    for worker in [cluster.start("worker", 0, [BATCH] * 20, [compare]), cluster.start("worker", 1, [BATCH] * 20)]:
        worker.result(SECONDS)
    assert compare.is_same
    assert all(isinstance(trainer.optimizer, ServerOptimizer) for trainer in cluster.trainers.values())
    # 40 steps of a positive label, and not 20: the bias of one worker alone reaches half as far.
    first = cluster.trainers[0].model.dense.bias.item()
    alone = Trainer(model := type(cluster.trainers[0].model)(), torch.optim.SGD(model.parameters(), lr=0.1))
    alone.fit([BATCH] * 20)
    assert first > 1.2 * model.dense.bias.item() > 0


def test_one_worker_keeps_its_dense_parameters_and_needs_nobody(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=1)
    cluster.servers()
    watch = Watch()
    assert cluster.start("worker", 0, [BATCH] * 3, [watch]).result(SECONDS) == 3
    assert watch.rows == 2
    assert isinstance(cluster.trainers[0].optimizer, torch.optim.SGD)


def test_workers_share_the_data_and_the_steps(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    stream = Shares([BATCH] * 11)
    watches = [Watch(), Watch()]
    for worker in [cluster.start("worker", index, stream, [watches[index]]) for index in range(2)]:
        worker.result(SECONDS)
    assert [watch.made for watch in watches] == [6, 5]


def test_a_limit_is_one_of_the_global_step(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    watches = [Watch(), Watch()]
    for worker in [cluster.start("worker", i, [BATCH] * 1000, [watches[i]], max_steps=40) for i in range(2)]:
        worker.result(SECONDS)
    # Each learns of the other's steps one step late.
    assert 40 <= sum(watch.made for watch in watches) <= 46


def test_the_fastest_of_more_servers_than_needed_are_taken(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=2, num_extra_ps=2, num_workers=2, benchmark_secs=0.1)
    servers = cluster.servers()
    watches = [Watch(), Watch()]
    for worker in [cluster.start("worker", index, [BATCH], [watches[index]]) for index in range(2)]:
        worker.result(SECONDS)
    assert len(watches[0].servers) == 2
    assert watches[0].servers == watches[1].servers
    assert [server.result(SECONDS) for server in servers] == [0] * 4


def test_servers_in_reserve_end_too(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=4, num_redundant_ps=2, num_workers=2, uuid="job")
    servers = cluster.servers()
    watches = [Watch(), Watch()]
    for worker in [cluster.start("worker", index, [BATCH], [watches[index]]) for index in range(2)]:
        worker.result(SECONDS)
    assert watches[0].servers == watches[1].servers
    assert (tmp_path / "ps_cluster_dir" / "job").read_text() == ",".join(watches[0].servers)
    assert [server.result(SECONDS) for server in servers] == [0] * 6


@pytest.mark.parametrize("at", [0, 2])
def test_a_temporary_error_is_retried_without_a_batch_twice(tmp_path: Path, at: int) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=1, config=RunConfig(enable_embedding_postpush=True))
    cluster.servers()
    watch = Watch()
    worker = cluster.start("worker", 0, [BATCH] * 4, [Fail(DeadlineExceededError("too slow"), at=at), watch])
    assert worker.result(SECONDS) == 4
    assert watch.made == 4


@pytest.mark.parametrize("resumable", [False, True])
def test_an_error_at_the_very_end_does_not_train_again(tmp_path: Path, resumable: bool) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=1)
    cluster.servers()
    watch = Watch()
    worker = cluster.start("worker", 0, Three() if resumable else [BATCH] * 3, [FailAtEnd(), watch])
    assert worker.result(SECONDS) == 3
    assert watch.made == 3


def test_any_other_error_ends_the_chief_and_servers_stay_for_its_successor(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=2, num_workers=1)
    servers = cluster.servers()
    with pytest.raises(StalePushError, match="replaced"):
        cluster.start("worker", 0, [BATCH], [Fail(StalePushError("replaced"))]).result(SECONDS)
    assert [server.done() for server in servers] == [False, False]
    cluster.start("worker", 0, [BATCH]).result(SECONDS)
    assert [server.result(SECONDS) for server in servers] == [0, 0]


def test_servers_of_a_run_without_end_stay(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=1, enable_realtime_training=True)
    (server,) = cluster.servers()
    cluster.start("worker", 0, [BATCH]).result(SECONDS)
    assert not server.done()
    forced = Cluster(tmp_path, num_ps=1, num_workers=1, enable_realtime_training=True, force_shutdown_ps=True)
    forced.start("worker", 0, [BATCH]).result(SECONDS)
    assert server.result(SECONDS) == 0


def test_a_worker_that_comes_late_joins(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2, start_timeout_secs=0.0)
    cluster.servers()

    class StartOther(Hook):
        """Starts worker 1 after the first step, and goes on when that has made one."""

        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            if result.step == 1:
                begun = threading.Event()
                cluster.start("worker", 1, [BATCH] * 3, [Tell(begun)])
                assert begun.wait(SECONDS)

    assert cluster.start("worker", 0, [BATCH] * 3, [StartOther()]).result(SECONDS) == 6


def test_servers_without_a_folder_cannot_be_saved(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=1, config=RunConfig(model_dir=str(tmp_path)))
    with ParameterServer() as server:
        HostServiceDiscovery(tmp_path / "discovery").register("ps", 0, server.address)
        with pytest.raises(ConfigError, match=f"{server.address} have no folder"):
            cluster.start("worker", 0, [BATCH]).result(SECONDS)


def test_what_a_run_needs_is_said_before_anything_starts(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=0, num_workers=1)
    with pytest.raises(ConfigError, match="num_ps: expected at least one server"):
        cluster.start("worker", 0, [BATCH]).result(SECONDS)
