"""Danger: after a loss a process continues with dense parameters, optimizer state or data of the run before it.

Two ranks are threads of one process that connect through sockets. Rank 1 fails once, and a new session takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from monolith.cluster import HostServiceDiscovery
from monolith.features.batch import Batch
from monolith.nn import dense_state_dict
from monolith.train import RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.distributed.ranks import RankSession
from monolith.train.hooks import Hook
from rank_runs import Batches
from training import ClickModel, batch_of

STEPS, SAVED, FAILS_AT = 10, 4, 7


class Whole:
    """Data that has a position and cannot be divided."""

    def __init__(self) -> None:
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[Batch]:
        while self._next < STEPS:
            self._next += 1
            yield batch_of(self._next)
        self._next = 0


class FailsOnce(Hook):
    """Raises before a step, the first time."""

    def __init__(self) -> None:
        self.failed = False

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step + 1 == FAILS_AT and not self.failed:
            self.failed = True
            raise ValueError("once")


class Steps(Hook):
    """Collects the steps made, and saves after one of them."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.made.append(trainer.step)
        if trainer.step == SAVED:
            trainer.save()


def trainer_of(model_dir: Path | None, rank: int) -> Trainer:
    torch.manual_seed(3)
    model = ClickModel()
    # Only the chief has a model_dir, as with an Estimator.
    folder = None if model_dir is None or rank else str(model_dir)
    config = RunConfig(model_dir=folder, seed=5)
    return Trainer(model, torch.optim.Adam(model.parameters(), lr=0.05), config=config)


def train(folder: Path, source: type, *, model_dir: Path | None, fails: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Train on two ranks. Returns the dense parameters and the steps that rank 0 has made."""
    trainers = [trainer_of(model_dir, rank) for rank in (0, 1, 1)]
    steps, bomb, errors = Steps(), FailsOnce(), list[BaseException]()
    bomb.failed = not fails

    def life(trainer: Trainer, rank: int, hooks: list[Hook]) -> None:
        config = RunnerConfig(num_workers=2, index=rank, data_shards=2)
        data: Any = source()
        with HostServiceDiscovery(folder) as discovery, RankSession(trainer, config, discovery) as session:
            session.train(data, hooks=hooks)

    def rank(number: int) -> None:
        try:
            if number == 0:
                life(trainers[0], 0, [steps])
                return
            try:
                life(trainers[1], 1, [bomb])
            except ValueError:
                life(trainers[2], 1, [bomb])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    return dense_state_dict(trainers[0].model), steps.made


@pytest.mark.parametrize("source", [lambda: Batches(2 * STEPS), Whole], ids=["divided", "whole"])
@pytest.mark.parametrize("saved", [False, True], ids=["not saved", "saved"])
def test_what_was_trained_before_the_loss_leaves_no_trace(tmp_path: Path, source: type, saved: bool) -> None:
    folder = tmp_path / "model" if saved else None
    found, made = train(tmp_path / "disturbed", source, model_dir=folder, fails=True)
    quiet, all_steps = train(tmp_path / "quiet", source, model_dir=None, fails=False)
    # From the checkpoint, or from the beginning.
    assert made == [*range(1, FAILS_AT), *range(SAVED + 1 if saved else 1, STEPS + 1)]
    assert all_steps == list(range(1, STEPS + 1))
    for name, value in quiet.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
