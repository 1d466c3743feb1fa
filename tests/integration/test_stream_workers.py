"""Danger: a worker whose partitions give nothing ends the job, holds up a save or the end, or keeps the job from ending."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cluster_threads import Cluster
from monolith.features import Ragged
from monolith.features.batch import Batch
from monolith.state.restore_points import restore_points
from monolith.train import RunConfig, Trainer
from monolith.train.hooks import Hook
from waiting_source import WaitingSource, until

SECONDS = 120.0


class Rows(WaitingSource):
    """Each record is a row with ids 0 and 1."""

    def _read(self, position: Any) -> Iterator[Any]:  # noqa: ANN401 - as its base
        for batch, behind in super()._read(position):
            rows = len(batch["id"])
            batch_of_rows: Batch = {"feature": Ragged.from_lists([[0, 1]] * rows), "label": torch.ones(rows)}
            yield batch_of_rows, behind


class Ticks(Hook):
    """Counts the moments at which nothing came."""

    ticks = 0

    def while_waiting(self, trainer: Trainer) -> None:
        self.ticks += 1


def test_a_worker_without_partitions_waits_until_the_others_have_made_the_steps(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=2, num_workers=2)
    servers, source = cluster.servers(), Rows(1)
    source.append(*range(6))
    ticks = [Ticks(), Ticks()]
    workers = [cluster.start("worker", index, source, [ticks[index]], max_steps=5) for index in range(2)]
    until(lambda: ticks[0].ticks and ticks[1].ticks, SECONDS)
    assert [cluster.trainers[index].steps_made for index in range(2)] == [3, 0]
    source.append(*range(4))
    assert [worker.result(SECONDS) for worker in workers] == [5, 5]
    assert [server.result(SECONDS) for server in servers] == [0, 0]
    assert [cluster.trainers[index].steps_made for index in range(2)] == [5, 0]


def test_a_bounded_stream_ends_the_job_and_a_later_one_continues(tmp_path: Path) -> None:
    config = RunConfig(model_dir=str(tmp_path), save_checkpoints_secs=0)
    source, made = Rows(2, ends=True), []
    for number in range(2):
        for partition in range(2):
            source.append(*range(4), partition=partition)
        cluster = Cluster(tmp_path, num_ps=1, num_workers=2, config=config)
        cluster.folder = tmp_path / f"job{number}"
        cluster.folder.mkdir()
        servers = cluster.servers()
        workers = [cluster.start("worker", index, source) for index in range(2)]
        ended = [worker.result(SECONDS) for worker in workers]
        assert ended[0] == 4 * (number + 1)  # the chief has waited for the other
        assert [server.result(SECONDS) for server in servers] == [0]
        made.append([cluster.trainers[index].steps_made for index in range(2)])
    assert made == [[2, 2], [2, 2]]


def test_a_worker_that_waits_does_not_hold_up_a_save(tmp_path: Path) -> None:
    config = RunConfig(model_dir=str(tmp_path), save_checkpoints_secs=0.2)
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2, config=config, max_pending_seconds_for_barrier=60)
    servers, source = cluster.servers(), Rows(1)
    source.append(*range(6))
    workers = [cluster.start("worker", index, source, max_steps=4) for index in range(2)]
    until(lambda: restore_points(str(tmp_path)), SECONDS)
    source.append(*range(2))
    assert [worker.result(SECONDS) for worker in workers] == [4, 4]
    assert [server.result(SECONDS) for server in servers] == [0]
