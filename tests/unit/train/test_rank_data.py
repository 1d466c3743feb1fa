"""Danger: batches of ranks are lost or trained twice, at the end of uneven data, between epochs, or with other ranks."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import InvalidArgumentError, RunInterruptedError
from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.ranks.data_shards import join_positions
from monolith.ranks.mesh import Mesh
from monolith.table import SGD, Zeros
from monolith.testing.rank_threads import run_ranks
from monolith.train import Head, RunnerConfig, Trainer
from monolith.train.distributed.ranks import RankSession
from monolith.train.hooks import Hook
from rank_runs import Batches, RankRun, Trained, rows_of, rows_of_model


class Counts(nn.Module):
    """Its row of id n counts how often batch n was trained."""

    heads = (Head(name="seen", label="y", kind="regression", reduction="sum"),)

    def __init__(self) -> None:
        super().__init__()
        sgd = SGD(learning_rate=1.0)
        self.embeddings = EmbeddingBagCollection([Feature(name="n", dim=1, initializer=Zeros(), optimizer=sgd)])

    def forward(self, batch: Batch) -> Tensor:
        return self.embeddings(batch)["n"]  # type: ignore[return-value]

    def extra_loss(self, batch: Batch, logits: dict[str, Tensor]) -> Tensor:
        rows = self.embeddings(batch)["n"]
        assert isinstance(rows, Tensor)
        # The gradient of each row is -1, whatever it is: the square takes that of the head away.
        return -rows.sum() - (logits["seen"] ** 2).sum()


def numbered(number: int) -> dict[str, Any]:
    return {"n": torch.tensor([number]), "y": torch.zeros(1)}


def run_of(
    count: int, *, runner: dict[str, Any] | None = None, train: dict[str, int] | None = None, **settings: object
) -> RankRun:
    return RankRun(
        model=Counts,
        source=lambda: Batches(count, numbered),
        run={"clip_norm": None, "save_checkpoints_secs": 0, **settings},
        runner=runner or {},
        train=train or {},
    )


def counts(trained: list[Trained]) -> dict[int, int]:
    rows = rows_of(trained)["n"]
    return {int(n): round(value) for n, value in zip(rows["ids"].tolist(), rows["values"][:, 0].tolist(), strict=True)}


@pytest.mark.parametrize(("ranks", "steps"), [(1, 7), (2, 4), (3, 3), (4, 2)])
def test_uneven_data_is_drained(ranks: int, steps: int) -> None:
    trained = run_of(7).ranks(ranks)
    assert counts(trained) == dict.fromkeys(range(7), 1)
    assert [one.step for one in trained] == [steps] * ranks
    assert {one.trainer.stop_reason for one in trained} == {"the data ended"}


def test_a_rank_may_have_no_data_at_all(caplog: pytest.LogCaptureFixture) -> None:
    trained = run_of(2, runner={"data_shards": 2}).ranks(4)
    assert counts(trained) == {0: 1, 1: 1}
    assert "rank 3 of 4 has no data: there are 2 data shards for life" in caplog.text


def test_a_rank_with_an_empty_shard_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert counts(run_of(1).ranks(2)) == {0: 1}
    assert "rank 1 of 2 has no data in this pass" in caplog.text


def test_a_rank_whose_data_ends_earlier_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    assert counts(run_of(3).ranks(2)) == {0: 1, 1: 1, 2: 1}
    assert "has no data" not in caplog.text


@pytest.mark.parametrize(("ranks", "steps", "trained_batches"), [(1, 7, 7), (2, 3, 6), (3, 2, 6)])
def test_all_stop_with_the_first_rank_that_has_had_its_last_batch(
    ranks: int, steps: int, trained_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trained = run_of(7, runner={"end_of_data": "stop"}).ranks(ranks)
    assert counts(trained) == dict.fromkeys(range(trained_batches), 1)
    assert [one.step for one in trained] == [steps] * ranks
    assert ("all ranks stop with it" in caplog.text) == (ranks > 1)


@pytest.mark.parametrize("end_of_data", ["drain", "stop"])
@pytest.mark.parametrize("capacity", [0, 2])
def test_every_epoch_begins_with_the_first_batch(end_of_data: str, capacity: int) -> None:
    run = run_of(5, epochs=3, embedding_prefetch_capacity=capacity, runner={"end_of_data": end_of_data})
    trained = run.ranks(2)
    whole = dict.fromkeys(range(5), 3)
    assert counts(trained) == (whole if end_of_data == "drain" else dict.fromkeys(range(4), 3))
    assert {one.trainer.epochs for one in trained} == {3}


class Stop(Hook):
    """Asks for an end after a step."""

    def __init__(self, step: int, *, interrupt: bool = False) -> None:
        self._step, self._interrupt = step, interrupt

    def after_step(self, trainer: Trainer, result: object) -> None:
        if trainer.step == self._step:
            (trainer.interrupt if self._interrupt else trainer.request_stop)("enough")


@pytest.mark.parametrize("asking", [0, 1])
def test_all_ranks_stop_when_one_wants_to(asking: int) -> None:
    run = run_of(20)
    run.hooks = lambda rank: [Stop(3)] if rank == asking else []
    trained = run.ranks(2)
    assert [one.step for one in trained] == [3, 3]
    assert trained[asking].trainer.stop_reason == "enough"
    assert trained[1 - asking].trainer.stop_reason == f"rank {asking}: enough"
    assert counts(trained) == dict.fromkeys(range(6), 1)


@pytest.mark.parametrize("asking", [0, 1])
def test_all_ranks_are_interrupted_when_one_is(asking: int) -> None:
    run = run_of(20)
    run.hooks = lambda rank: [Stop(3, interrupt=True)] if rank == asking else []
    seen: list[BaseException] = []

    def rank(mesh: Mesh) -> None:
        with pytest.raises(
            RunInterruptedError, match=r"stopped at step 3 before its work was done: .*enough"
        ) as raised:
            run.on(mesh, trainers[mesh.rank])
        seen.append(raised.value)

    trainers = [run.trainer() for _ in range(2)]
    run_ranks(2, rank)
    assert len(seen) == 2


@pytest.mark.parametrize("worlds", [(2, 4, 2), (4, 1, 3), (1, 2, 4)])
@pytest.mark.parametrize("capacity", [0, 2])
def test_a_run_continues_with_other_ranks_and_trains_every_batch_once(
    worlds: tuple[int, ...], capacity: int, tmp_path: Path
) -> None:
    for ranks, until in zip(worlds, (2, 4, None), strict=True):
        run = run_of(
            23,
            model_dir=str(tmp_path),
            embedding_prefetch_capacity=capacity,
            runner={"data_shards": 4},
            train={} if until is None else {"max_steps": until},
        )
        trained = run.ranks(ranks)
    assert counts(trained) == dict.fromkeys(range(23), 1)


def test_the_number_of_data_shards_is_that_of_the_first_start(tmp_path: Path) -> None:
    run_of(23, model_dir=str(tmp_path), train={"max_steps": 2}).ranks(3)
    trained = run_of(23, model_dir=str(tmp_path)).ranks(2)
    assert counts(trained) == dict.fromkeys(range(23), 1)


def test_one_process_continues_where_ranks_have_stopped_and_they_after_it(tmp_path: Path) -> None:
    run_of(23, model_dir=str(tmp_path), train={"max_steps": 3}).ranks(3)
    run = run_of(23, model_dir=str(tmp_path))
    alone = run.trainer()
    assert alone.fit(run.source(), max_steps=7) == 7
    seen = rows_of_model(alone.model)["n"]["values"].sum().item()
    assert seen == 3 * 3 + 4
    assert counts(run_of(23, model_dir=str(tmp_path)).ranks(2)) == dict.fromkeys(range(23), 1)


def test_another_number_of_data_shards_is_refused(tmp_path: Path) -> None:
    run_of(23, model_dir=str(tmp_path), runner={"data_shards": 4}, train={"max_steps": 2}).ranks(2)
    with pytest.raises(
        InvalidArgumentError, match=r"saved by a run with 4 data shards, there are 8 now; set data_shards=4"
    ):
        run_of(23, model_dir=str(tmp_path), runner={"data_shards": 8}).ranks(2)


@pytest.mark.parametrize("last", [2, 23])
def test_ranks_do_not_continue_in_data_that_was_not_divided(tmp_path: Path, last: int) -> None:
    run = run_of(23, model_dir=str(tmp_path), train={"max_steps": last})
    run.trainer().fit(run.source(), max_steps=2)
    # Also if nothing is left to do: what is saved at the end would have no position in it.
    with pytest.raises(InvalidArgumentError, match="saved by a run of 1 worker, and this is one of 2 ranks:"):
        run.ranks(2)
    again = run_of(23, model_dir=str(tmp_path), resume_data=False).ranks(2)
    assert Counter(counts(again).values()) == {2: 2, 1: 21}


def test_data_without_shards_is_read_by_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(0)
    run.source = lambda: [numbered(n) for n in range(3)]
    assert counts(run.ranks(2)) == dict.fromkeys(range(3), 2)
    assert "list cannot be divided among ranks, it has no shard(index, count): rank 1 of 2 trains on all" in caplog.text


def test_a_second_call_continues_after_the_first() -> None:
    run = run_of(9)
    trainers = [run.trainer() for _ in range(2)]

    def rank(mesh: Mesh) -> Trained:
        source = run.source()
        with RankSession(trainers[mesh.rank], RunnerConfig(num_workers=2, index=mesh.rank), mesh=mesh) as session:
            assert session.train(source, steps=2) == 2
            assert session.train(source) == 5
            return Trained(5, trainers[mesh.rank], [], dict(session.store.local.tables))

    assert counts(run_ranks(2, rank)) == dict.fromkeys(range(9), 1)


def test_a_run_that_has_finished_makes_no_step(tmp_path: Path) -> None:
    run = run_of(6, model_dir=str(tmp_path))
    assert [one.step for one in run.ranks(2)] == [3, 3]
    again = run.ranks(3)
    assert [one.step for one in again] == [3, 3, 3]
    assert counts(again) == dict.fromkeys(range(6), 1)


def test_workers_are_told_that_a_position_is_that_of_ranks(tmp_path: Path) -> None:
    run = run_of(5, model_dir=str(tmp_path), train={"max_steps": 2})
    run.ranks(2)
    worker = run.trainer()
    worker.num_workers = 2
    with pytest.raises(
        InvalidArgumentError, match="saved by a run of ranks, in 2 data shards, and this is one of 2 workers:"
    ):
        worker.fit(run.source())


def test_ranks_that_have_read_nothing_save_the_position_of_a_stream_as_it_was() -> None:
    assert join_positions([{"partitions": "{}"}, {"partitions": "{}"}]) == {"partitions": "{}"}
