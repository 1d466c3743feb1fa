"""Danger: a rank on a stream is killed, other ranks continue, and a record of some partition has been trained twice or never.

Each life of the run has another number of ranks, one of which is killed at random while records come. The last life must have
counted what was written.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from test_stream_runs_killed import COLUMNS, IDS, write

from monolith.cluster import HostServiceDiscovery
from monolith.data import StreamSource
from monolith.errors import RankLostError
from monolith.ranks import DiscoveryRendezvous, MeshConfig, form_mesh
from monolith.ranks.mesh import LoneMesh
from monolith.streams import open_stream
from monolith.train import RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.distributed.ranks import RankSession
from monolith.train.hooks import Hook
from waiting_run import IdCounts


class Told(Hook):
    """Says which step was made."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        with suppress(BrokenPipeError):
            self.pipe.send(result.step)

    def while_waiting(self, trainer: Trainer) -> None:
        if not trainer.steps_made:
            with suppress(BrokenPipeError):
                self.pipe.send("waits")


def trainer_of(folder: Path, *, chief: bool) -> Trainer:
    model = IdCounts()
    config = RunConfig(
        model_dir=str(folder / "run") if chief else None,
        clip_norm=None,
        threads=1,
        save_checkpoints_secs=0.1,
        log_flush_secs=0.01 if chief else None,
    )
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), config=config)


def source_of(folder: Path, **options: Any) -> StreamSource:  # noqa: ANN401 - any option
    return StreamSource(str(folder / "events"), COLUMNS, batch_size=7, max_wait_secs=0.005, **options)


def life(pipe: Connection, folder: Path, job: str, rank: int, ranks: int, start: str = "start") -> None:
    config = MeshConfig(formation_secs=60.0, rank_timeout_secs=20.0, exchange_timeout_secs=20.0)
    with suppress(RankLostError):
        mesh = form_mesh(rank, ranks, DiscoveryRendezvous(HostServiceDiscovery(folder / job)), config=config)
        runner = RunnerConfig(num_workers=ranks, index=rank)
        with RankSession(trainer_of(folder, chief=rank == 0), runner, mesh=mesh) as session:
            session.train(source_of(folder, start=start), hooks=[Told(pipe)])


@pytest.mark.parametrize(
    ("lives", "seed"), [pytest.param(5, 7, id="quick"), pytest.param(50, 8, id="long", marks=pytest.mark.slow)]
)
def test_each_record_counts_once_whichever_rank_is_killed(tmp_path: Path, lives: int, seed: int) -> None:
    chance, written, made = random.Random(seed), list[int](), 0
    stream = open_stream(tmp_path / "events", partitions=3)
    (tmp_path / "run").mkdir()
    for number in range(lives):
        ranks, job = chance.choice([2, 2, 3]), f"job{number}"
        (tmp_path / job).mkdir()
        with ExitStack() as stack:
            processes = [Forked(life, tmp_path, job, rank, ranks) for rank in range(ranks)]
            for process in processes:
                stack.callback(process.close)
            for _ in range(chance.randrange(1, 4)):
                burst = [chance.randrange(IDS) for _ in range(chance.choice([1, 9, 150]))]
                write(stream, burst)
                written += burst
                made = max(made, processes[0].receive())
            victim = chance.randrange(ranks)
            processes[victim].kill()
            for rank, process in enumerate(processes):
                if rank != victim:
                    with suppress(EOFError):
                        while True:
                            process.receive()
                    process.join()
    assert made
    assert counts_at_the_end(tmp_path) == {one: written.count(one) for one in sorted(set(written))}


def test_ranks_killed_before_their_first_batch_do_not_begin_at_a_later_end(tmp_path: Path) -> None:
    stream = open_stream(tmp_path / "events", partitions=3)
    write(stream, [1, 2, 3])
    for folder in ("run", "job"):
        (tmp_path / folder).mkdir()
    with ExitStack() as stack:
        processes = [Forked(life, tmp_path, "job", rank, 2, "end") for rank in range(2)]
        for process in processes:
            stack.callback(process.close)
        for process in processes:
            assert process.receive() == "waits"
        for process in processes:
            process.stop()
        write(stream, [7, 8, 8, 9])
        for process in processes:
            process.kill()
    assert counts_at_the_end(tmp_path, start="end") == {7: 1, 8: 2, 9: 1}


def counts_at_the_end(folder: Path, **options: Any) -> dict[int, float]:  # noqa: ANN401 - any option
    """Let one process train what is left. Returns how often each id was trained."""
    last = trainer_of(folder, chief=True)
    with RankSession(last, RunnerConfig(num_workers=1, micro_batches=None), mesh=LoneMesh()) as session:
        session.train(source_of(folder, stop_when_idle_secs=0.5, **options))
        entries = session.store.local.tables["id"].entries()
    return dict(zip(entries.ids.tolist(), (-entries.values[:, 0]).tolist(), strict=True))
