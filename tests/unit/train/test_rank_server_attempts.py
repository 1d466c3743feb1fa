"""Danger: a rank whose rows are on servers tries again, and trains on rows, dense parameters or data of the attempt before.

The attempts are those of one process with a real server. That of several processes is tests/fault/test_rank_server_rows.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from monolith.errors import DeadlineExceededError, InvalidArgumentError
from monolith.features.batch import Batch
from monolith.nn import dense_state_dict
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.ranks.mesh import LoneMesh
from monolith.train import RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.distributed.formation import run_with_retries
from monolith.train.distributed.worker import SynchronousAttempt, WorkerAttempt, tables_of_model
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
            yield batch_of(self._next - 1)
        self._next = 0


class Steps(Hook):
    """Notes the steps made, saves after one of them, and fails before another for a reason that passes."""

    def __init__(self, *, fails: bool, saves: bool) -> None:
        self.made: list[int] = []
        self._fails, self._saves = fails, saves

    def before_step(self, trainer: Trainer) -> None:
        if self._fails and trainer.step + 1 == FAILS_AT:
            self._fails = False
            raise DeadlineExceededError("a server was slow")

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.made.append(trainer.step)
        if self._saves and trainer.step == SAVED:
            trainer.save()


def trainer_of(model_dir: Path | None) -> Trainer:
    torch.manual_seed(3)
    model = ClickModel()
    config = RunConfig(model_dir=None if model_dir is None else str(model_dir), seed=5)
    return Trainer(model, torch.optim.Adam(model.parameters(), lr=0.05), config=config)


def attempt_of(
    trainer: Trainer, source: object, server: ParameterServer, hook: Hook, **limits: int
) -> SynchronousAttempt:
    config = RunnerConfig(num_ps=1, num_workers=1, enable_partial_sync_training=True)
    found: Any = {"steps": None, "max_steps": None, **limits}
    return SynchronousAttempt(
        trainer, source, config, connect=lambda after: LoneMesh(), hooks=[hook], find=lambda: [server.address], **found
    )


def run(attempt: WorkerAttempt, server: ParameterServer) -> int:
    return run_with_retries(attempt, lambda: (server.address,), max_losses=0, wait_secs=0.0, sleep=lambda seconds: None)


@contextmanager
def serving(folder: Path) -> Iterator[ParameterServer]:
    with ParameterServer(ServerConfig(folder=folder / "ps" / "0")) as server:
        yield server


def state_of(trainer: Trainer, server: ParameterServer) -> dict[str, Tensor]:
    """All rows that a server has, with their slots, and the dense parameters."""
    found: dict[str, Tensor] = dict(dense_state_dict(trainer.model))
    with ServerStore([server.address], tables_of_model(trainer.model)) as store:
        for name in store.configs():
            ids = torch.cat([torch.empty(0, dtype=torch.int64), *(ids for ids, _ in store.iter_rows(name))]).sort()[0]
            entries = store.lookup_entry(name, ids)
            columns = {"ids": ids, "values": entries.values, "times": entries.times, **entries.slots}
            found |= {f"{name} {column}": values for column, values in columns.items()}
    return found


def trained(
    folder: Path, source: object, *, model_dir: bool, saves: bool, fails: bool
) -> tuple[dict[str, Tensor], list[int]]:
    steps = Steps(fails=fails, saves=saves)
    with serving(folder) as server:
        trainer = trainer_of(folder if model_dir else None)
        assert run(attempt_of(trainer, source, server, steps), server) == STEPS
        return state_of(trainer, server), steps.made


@pytest.mark.parametrize("source", [lambda: Batches(STEPS), Whole], ids=["divided", "whole"])
@pytest.mark.parametrize(("model_dir", "saves"), [(False, False), (True, False), (True, True)])
def test_an_attempt_that_failed_leaves_no_trace(
    tmp_path: Path, source: Callable[[], object], model_dir: bool, saves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found, made = trained(tmp_path / "disturbed", source(), model_dir=model_dir, saves=saves, fails=True)
    said = f"their rows go back to step {SAVED}" if saves else "there is no checkpoint: servers 127.0.0.1"
    assert said in caplog.text
    assert made == [*range(1, FAILS_AT), *range(SAVED + 1 if saves else 1, STEPS + 1)]
    quiet, all_steps = trained(tmp_path / "quiet", source(), model_dir=model_dir, saves=saves, fails=False)
    assert all_steps == list(range(1, STEPS + 1))
    assert found.keys() == quiet.keys()
    assert [name for name in found if not torch.equal(found[name], quiet[name])] == []


def test_a_run_that_is_continued_leaves_servers_alone_that_are_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as server:
        first = trainer_of(tmp_path)
        assert run(attempt_of(first, Batches(STEPS), server, Hook(), max_steps=6), server) == 6
        with caplog.at_level(logging.WARNING):
            second = trainer_of(tmp_path)
            assert run(attempt_of(second, Batches(STEPS), server, Hook(), max_steps=6), server) == 6
    assert "so that every batch counts once" not in caplog.text


def test_a_second_call_of_train_continues_without_going_back(tmp_path: Path) -> None:
    with serving(tmp_path / "twice") as server:
        trainer, steps = trainer_of(None), Steps(fails=False, saves=False)
        source = Batches(STEPS)
        run(attempt_of(trainer, source, server, steps, max_steps=5), server)
        assert run(attempt_of(trainer, source, server, steps, steps=3), server) == 8
        assert steps.made == list(range(1, 9))


def test_without_a_model_dir_a_later_call_of_train_cannot_go_back(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        trainer, source = trainer_of(None), Batches(STEPS)
        run(attempt_of(trainer, source, server, Hook(), max_steps=5), server)
        with pytest.raises(InvalidArgumentError, match="cannot go back to step 5, at which this call of train began"):
            run(attempt_of(trainer, source, server, Steps(fails=True, saves=False), max_steps=9), server)


def test_workers_that_do_not_wait_for_each_other_continue_with_the_rows_that_servers_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def worker(trainer: Trainer, server: ParameterServer, fails: bool) -> None:
        config, steps = RunnerConfig(num_ps=1, num_workers=1), Steps(fails=fails, saves=True)
        attempt = WorkerAttempt(
            trainer, Batches(STEPS), config, steps=None, max_steps=None, hooks=[steps], find=lambda: [server.address]
        )
        attempt((server.address,))

    with caplog.at_level(logging.WARNING), serving(tmp_path) as server:
        with pytest.raises(DeadlineExceededError):
            worker(trainer_of(tmp_path), server, True)
        worker(trainer_of(tmp_path), server, False)
    assert "so that every batch counts once" not in caplog.text
