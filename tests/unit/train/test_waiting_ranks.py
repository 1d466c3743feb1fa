"""Danger: a rank whose partitions are empty holds up all others, or a stream is lost or trained twice with other ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.errors import ConfigError
from monolith.testing.rank_threads import run_ranks
from monolith.train import StepResult, Trainer
from monolith.train.hooks import Hook
from rank_runs import RankRun, Trained, rows_of
from waiting_run import IdCounts
from waiting_source import WaitingSource


def run_of(source: WaitingSource, *, hooks: list[Hook] | None = None, **settings: Any) -> RankRun:  # noqa: ANN401
    runner = settings.pop("runner", {})
    return RankRun(
        model=IdCounts,
        source=lambda: source,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        run={"clip_norm": None, "save_checkpoints_secs": 0, **settings},
        runner=runner,
        hooks=lambda rank: (hooks or []) if rank == 0 else [],
    )


def counts(trained: list[Trained]) -> dict[int, int]:
    rows = rows_of(trained)["id"]
    return {int(n): -round(value) for n, value in zip(rows["ids"].tolist(), rows["values"][:, 0].tolist(), strict=True)}


class Feeder(Hook):
    """Appends the next records when those before are trained, and interrupts the run after the last."""

    def __init__(self, source: WaitingSource, *, partition: int, batches: int) -> None:
        self.source, self.partition, self.left = source, partition, list(range(batches))
        self.ticks = 0

    def after_start(self, trainer: Trainer) -> None:
        self.feed(trainer)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.feed(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        self.ticks += 1

    def feed(self, trainer: Trainer) -> None:
        if not self.left:
            trainer.request_stop("all is trained")
            return
        number = 2 * self.left.pop(0)
        self.source.append(number, number + 1, partition=self.partition)


@pytest.mark.parametrize("partition", [0, 1])
@pytest.mark.parametrize("delayed", [False, True])
def test_ranks_without_records_take_part_in_the_steps_of_the_others(partition: int, delayed: bool) -> None:
    source = WaitingSource(2)
    feeder = Feeder(source, partition=partition, batches=4)
    trained = run_of(source, hooks=[feeder], enable_embedding_postpush=delayed).ranks(2)
    assert counts(trained) == dict.fromkeys(range(8), 1)
    assert [one.step for one in trained] == [4, 4]


def test_time_goes_on_while_no_rank_has_records(tmp_path: Path) -> None:
    source, seen = WaitingSource(2), list[int]()

    class Watch(Hook):
        def while_waiting(self, trainer: Trainer) -> None:
            seen.append(trainer.step)
            if trainer.step:
                trainer.save()
                trainer.request_stop("saved")
            elif len(seen) == 3:
                source.append(5, partition=1)

    trained = run_of(source, hooks=[Watch()], model_dir=str(tmp_path)).ranks(2)
    assert counts(trained) == {5: 1}
    assert seen[:3] == [0, 0, 0]
    assert (tmp_path / "model.ckpt-1").exists()


def test_a_bounded_stream_ends_when_all_ranks_have_read_their_part() -> None:
    source = WaitingSource(2, ends=True)
    source.append(*range(7), partition=0)
    source.append(7, partition=1)
    trained = run_of(source, runner={"end_of_data": "stop"}).ranks(2)
    assert counts(trained) == dict.fromkeys(range(8), 1)
    assert {one.trainer.stop_reason for one in trained} == {"the data ended"}


def test_other_numbers_of_ranks_continue_with_what_has_come_since(tmp_path: Path) -> None:
    source, expected = WaitingSource(3, ends=True), {}
    for number, ranks in enumerate([2, 3, 1, 2]):
        for partition in range(3):
            ids = [100 * number + 10 * partition + n for n in range(partition + 2)]
            source.append(*ids, partition=partition)
            expected |= dict.fromkeys(ids, 1)
        if number == 2:
            source.records.append([999])  # a partition that is added
            expected[999] = 1
        trained = run_of(source, model_dir=str(tmp_path)).ranks(ranks)
        assert counts(trained) == expected


def test_one_process_continues_the_run_of_ranks(tmp_path: Path) -> None:
    source = WaitingSource(2, ends=True)
    source.append(1, 2, 3)
    source.append(4, partition=1)
    run_of(source, model_dir=str(tmp_path)).ranks(2)
    source.append(5)
    trainer = run_of(source, model_dir=str(tmp_path)).trainer()
    trainer.fit(source)
    table = trainer.tables()["id"][0].entries()
    assert dict(zip(table.ids.tolist(), (-table.values[:, 0]).tolist(), strict=True)) == dict.fromkeys(range(1, 6), 1)


def test_micro_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batches: cannot be used with a WaitingSource"):
        run_of(WaitingSource(), runner={"micro_batches": 2}).ranks(1)


def test_an_interrupt_ends_all_ranks() -> None:
    source, begun = WaitingSource(2), threading.Event()
    run = run_of(source, hooks=[])
    trainers = [run.trainer(chief=not rank) for rank in range(2)]

    class Begun(Hook):
        def while_waiting(self, trainer: Trainer) -> None:
            begun.set()
            trainers[1].interrupt("received SIGTERM")

    run.hooks = lambda rank: [Begun()] if rank == 0 else []
    with pytest.raises(Exception, match="received SIGTERM"):
        run_ranks(2, lambda mesh: run.on(mesh, trainers[mesh.rank]))
    assert begun.is_set()
