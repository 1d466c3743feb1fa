"""Danger: ranks are killed in the middle of training, and other ranks do not continue exactly where they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from forked import Forked
from torch import Tensor

from monolith import EmbeddingTable
from monolith.nn import dense_state_dict
from monolith.state.restore_points import find_restore_point
from monolith.train import RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.distributed.ranks import RankSession
from monolith.train.hooks import Hook
from rank_runs import Batches, rows_of_model
from training import ClickModel

BATCHES, PARTS = 60, 6
LAST = BATCHES // PARTS


class Steps(Hook):
    """Says which steps were made, and dies after one of them."""

    def __init__(self, pipe: Connection, die_after: int) -> None:
        self.pipe, self.die_after = pipe, die_after

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.pipe.send(result.step)
        if result.step == self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)


def new_trainer(**settings: Any) -> Trainer:  # noqa: ANN401 - of RunConfig
    model = ClickModel()
    return Trainer(model, torch.optim.Adam(model.parameters(), lr=0.01), config=RunConfig(seed=3, **settings))


def train(pipe: Connection, model_dir: str, rank: int, ranks: int, die_after: int) -> None:
    """One rank in a process of its own."""
    trainer = new_trainer(**({"model_dir": model_dir, "log_flush_secs": 1e-9} if rank == 0 else {}))
    config = RunnerConfig(num_workers=ranks, index=rank, model_dir=model_dir, micro_batches=PARTS)
    with RankSession(trainer, config) as session:
        session.train(Batches(BATCHES), hooks=[Steps(pipe, die_after)])
    pipe.send("ended")


def life(model_dir: Path, ranks: int, *, die_after: int = -1) -> list[int]:
    """Train until the data ends, or kill all ranks when the last one has died. Returns the steps that it has made."""
    processes = [
        Forked(train, str(model_dir), rank, ranks, die_after if rank == ranks - 1 else -1) for rank in range(ranks)
    ]
    made: list[int] = []
    try:
        while True:
            said = processes[-1].receive()
            if said == "ended":
                assert [process.join() for process in processes] == [0] * ranks
                return made
            made.append(said)
    except EOFError:
        assert made[-1] == die_after
        return made
    finally:
        for process in processes:
            process.close()


def undisturbed() -> tuple[dict[str, Tensor], Mapping[str, EmbeddingTable]]:
    """The dense parameters and the rows that one process makes of the same data."""
    trainer = new_trainer()
    with RankSession(trainer, RunnerConfig(micro_batches=PARTS)) as session:
        session.train(Batches(BATCHES))
        return dense_state_dict(trainer.model), session.store.local.tables


def test_killed_ranks_are_continued_by_others(tmp_path: Path) -> None:
    reached = 0
    for ranks, die_after in ((2, 4), (3, 7), (1, 8), (2, -1)):
        made = life(tmp_path, ranks, die_after=die_after)
        # No step is left out. Those after the last cut are made again.
        assert made == list(range(made[0], made[-1] + 1))
        assert made[0] <= reached + 1
        reached = made[-1]
    assert reached == LAST
    assert find_restore_point(tmp_path).step == LAST
    again = new_trainer(model_dir=str(tmp_path), resume_data=False)
    again.restore()
    dense, tables = undisturbed()
    for name, tensor in dense.items():
        assert torch.equal(dense_state_dict(again.model)[name], tensor), name
    for name, columns in rows_of_model(again.model).items():
        expected = tables[name].lookup_entry(columns["ids"])
        assert len(tables[name]) == len(columns["ids"])
        for column, values in {"values": expected.values, "times": expected.times, **expected.slots}.items():
            assert torch.equal(columns[column], values), (name, column)
