"""Danger: an operator's word that reaches the chief of a run over servers and not its workers, or that holds them for ever."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cluster_threads import BATCH, Cluster
from controlled_run import SECONDS
from monolith.errors import InvalidArgumentError
from monolith.features import Batch
from monolith.follow.run_service import ADDRESS_FILE
from monolith.state.model_dir import read_state
from monolith.state.restore_points import restore_points
from monolith.train import RunConfig, Trainer
from monolith.train.control_server import ControlClient
from monolith.train.hooks import Hook
from moving_buckets import wait_for


class Count(Hook):
    """Counts the steps of one worker."""

    made = 0

    def before_update(self, trainer: Trainer, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        # Not after the step: a worker is held before its other hooks have seen the step.
        self.made += 1


class Endless:
    """The share of a worker, without end."""

    def __iter__(self) -> Iterator[Batch]:
        return itertools.repeat(BATCH)


@contextmanager
def operated(
    folder: Path, *, num_ps: int, num_workers: int, short_chief: bool = False
) -> Iterator[tuple[ControlClient, list[Count], list[Future[int]]]]:
    """A run of which every worker has made a step."""
    config = RunConfig(model_dir=str(folder), save_checkpoints_secs=0.0, embedding_prefetch_capacity=0)
    cluster = Cluster(folder, num_ps=num_ps, num_workers=num_workers, config=config)
    servers, counts = cluster.servers(), [Count() for _ in range(num_workers)]
    data = [[BATCH] * 2 if short_chief and not index else Endless() for index in range(num_workers)]
    workers = [cluster.start("worker", index, data[index], [counts[index]]) for index in range(num_workers)]
    try:
        wait_for(lambda: all(count.made for count in counts))
        with ControlClient.of_run(str(folder), timeout=SECONDS) as client:
            yield client, counts, workers
    finally:
        for trainer in cluster.trainers.values():
            trainer.request_stop("the test is over")
        for process in (*workers, *servers):
            process.result(SECONDS)


def test_all_workers_are_held_and_go_on(tmp_path: Path) -> None:
    with operated(tmp_path, num_ps=1, num_workers=3) as (client, counts, _):
        client.stop()
        wait_for(lambda: client.block_status().unblocked == ())
        assert client.block_status().blocked == (0, 1, 2)
        made = [count.made for count in counts]
        path = client.save()
        assert [count.made for count in counts] == made
        # A checkpoint behind the barrier of an operator leaves it where it is.
        assert client.block_status().blocked == (0, 1, 2)
        (point,) = restore_points(str(tmp_path))
        assert (point.step, path) == (sum(made), f"{tmp_path}/model.ckpt-{sum(made)}")
        client.resume()
        wait_for(lambda: all(count.made > before for count, before in zip(counts, made, strict=True)))


def test_all_workers_end_with_one_checkpoint(tmp_path: Path) -> None:
    with operated(tmp_path, num_ps=1, num_workers=3) as (client, counts, workers):
        client.stop()
        client.end_run()
        steps = [worker.result(SECONDS) for worker in workers]
        assert max(steps) == steps[0] == sum(count.made for count in counts)
        assert restore_points(str(tmp_path))[-1].step == steps[0]
    assert not (tmp_path / ADDRESS_FILE).exists()


def test_a_chief_that_has_trained_its_data_still_answers(tmp_path: Path) -> None:
    with operated(tmp_path, num_ps=1, num_workers=2, short_chief=True) as (client, counts, workers):
        wait_for(lambda: client.status().stop_reason is not None)
        client.stop()
        wait_for(lambda: client.block_status().unblocked == ())
        made = counts[1].made
        assert int(client.variables(["global_step"])["global_step"]) >= 2
        assert counts[1].made == made
        client.resume()
        wait_for(lambda: counts[1].made > made)
        client.end_run()
        assert workers[0].result(SECONDS) == counts[0].made + counts[1].made


def test_the_debugging_server_of_the_original(tmp_path: Path) -> None:
    """Two servers, one worker: what the original's test of its debugging server asserts."""
    with operated(tmp_path, num_ps=2, num_workers=1) as (client, counts, _):
        client.stop()
        about = client.describe()
        assert (about.num_workers, len(about.servers), list(about.features)) == (1, 2, ["feature"])
        found = client.variables(["global_step", "unknown"])
        assert {name: value.tolist() for name, value in found.items()} == {"global_step": counts[0].made}
        rows = client.features(["feature", "unknown"], [0, 1, 2])
        assert list(rows) == ["feature"]
        assert rows["feature"].entries.found.tolist() == [True, True, False]
        assert rows["feature"].entries.values.shape == (3, 5)
        assert rows["feature"].entries.values[0].abs().sum() > 0


def test_dense_values_are_those_of_the_servers(tmp_path: Path) -> None:
    with operated(tmp_path, num_ps=1, num_workers=2) as (client, _, _):
        client.stop()
        wait_for(lambda: client.block_status().unblocked == ())
        found = client.variables(["dense.weight", "dense.bias"])
        saved = read_state(client.save())["model"]
        assert isinstance(saved, dict)
        assert torch.equal(saved["dense.bias"], found["dense.bias"])
        assert torch.equal(saved["dense.weight"], found["dense.weight"])
        with pytest.raises(InvalidArgumentError, match="stopped already"):
            client.stop()
