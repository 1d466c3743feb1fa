"""Danger: a worker on a stream dies while only some servers have its batch: read again, the stream gives other batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from counting_model import COUNTED, Counts
from monolith import RunConfig, Trainer
from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch
from monolith.ps import ClientConfig, ParameterServer, ServerStore, tables_of
from monolith.ps.client import scatter_gather
from monolith.transport.link import Exchange
from waiting_source import WaitingSource

IDS = range(40)


class Users(WaitingSource):
    """The ids of a `WaitingSource` as users."""

    def _read(self, position):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for batch, behind in super()._read(position):
            yield users(batch), behind

    def replay(self, until):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        return map(users, super().replay(until))


def users(batch: Batch) -> Batch:
    return {"user_id": batch["id"], "label": batch["label"]}


class Killed(Exception):  # noqa: N818 - no error of anybody
    """The process ends here."""


@contextmanager
def dying(at: int) -> Iterator[None]:
    """The process dies when the first server has had push number `at`, and the second has not."""
    whole, pushes = scatter_gather.finish_each, [0]

    def finish(exchanges: Iterable[Exchange]) -> list[object]:
        started = list(exchanges)
        pushes[0] += 1
        if pushes[0] == at:
            started[0].finish()
            raise Killed
        return whole(started)  # type: ignore[return-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter_gather, "finish_each", finish)
        yield


class Job:
    """Two servers, and lives of one worker, each with batches of another size."""

    def __init__(self, stack: ExitStack) -> None:
        self.servers = [stack.enter_context(ParameterServer()) for _ in range(2)]
        self.epoch = 0
        self.records = [list(IDS)]

    def store(self, worker: str | None) -> ServerStore:
        self.epoch += 1
        config = ClientConfig(worker=worker, epoch=self.epoch, timeout=60.0)
        return ServerStore([server.address for server in self.servers], tables_of(COUNTED), config=config)

    def live(self, batch_size: int, *, dies_at: int | None = None, index: int = 0, workers: int = 1) -> Trainer:
        source = Users(len(self.records), batch_size=batch_size, ends=True)
        for partition, ids in enumerate(self.records):
            source.append(*ids, partition=partition)
        if workers > 1:
            source = source.shard(index, workers)
        with self.store(f"worker-{index}-of-{workers}") as store:
            model = Counts(store)
            model.batches.requires_grad_(False)
            model.batches.grad = None
            trainer = Trainer(model, config=RunConfig(clip_norm=None))
            if dies_at is None:
                trainer.fit(source)
            else:
                with dying(dies_at), pytest.raises(Killed):
                    trainer.fit(source)
            return trainer

    def counts(self) -> list[int]:
        with self.store(None) as store, torch.no_grad():
            model = Counts(store)
            model({"user_id": torch.tensor(list(IDS))})
            return [round(-value) for value in model.rows.flatten().tolist()]


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)


# First the worker tells where it begins. A step is a lookup and a push, so the fifth request is the push of the second batch.
@pytest.mark.parametrize("request_number", [1, 3, 5, 9])
def test_the_interrupted_batch_counts_once_on_every_server(job: Job, request_number: int) -> None:
    job.live(7, dies_at=request_number)
    job.live(3)
    assert job.counts() == [1] * len(IDS)


def test_a_batch_may_be_interrupted_again_and_again(job: Job) -> None:
    for batch_size in (9, 2, 5):
        job.live(batch_size, dies_at=5)
    job.live(4)
    assert job.counts() == [1] * len(IDS)


def test_records_that_cannot_be_read_again_are_said_and_nothing_is_trained_twice(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Users, until: object) -> Iterator[Batch]:
        raise InvalidArgumentError("the records are gone")

    job.live(7, dies_at=5)
    before = job.counts()
    monkeypatch.setattr(Users, "replay", refuse)
    with pytest.raises(InvalidArgumentError, match="the records are gone"):
        job.live(3)
    assert job.counts() == before


def grown(job: Job, since: int) -> list[int]:
    """Append ids to every partition. Returns how often each must have been trained."""
    for partition, ids in enumerate(job.records):
        ids.extend(range(since + partition, len(IDS), len(job.records)))
    every = [one for ids in job.records for one in ids]
    return [every.count(one) for one in IDS]


def test_another_number_of_workers_continues_from_the_joined_positions(job: Job) -> None:
    job.records = [[], [], []]
    for number, workers in enumerate((2, 4, 1, 3)):
        if number == 2:
            job.records.append([])  # a partition that is added
        expected = grown(job, 7 * number)
        for index in range(workers):
            job.live(3, index=index, workers=workers)
        assert job.counts() == expected


def test_a_worker_that_was_interrupted_must_end_in_order_first(job: Job) -> None:
    job.records = [list(IDS)[:20], list(IDS)[20:]]
    job.live(3, index=0, workers=2)
    job.live(3, index=1, workers=2, dies_at=5)
    with pytest.raises(
        InvalidArgumentError, match=r"worker 1 of 2 was interrupted within a batch.*Start the job with 2"
    ):
        job.live(3)
    for index in range(2):
        job.live(4, index=index, workers=2)
    job.live(3)
    assert job.counts() == [1] * len(IDS)


def test_a_number_of_workers_that_was_used_before_is_refused(job: Job) -> None:
    job.records = [list(IDS)[:20], list(IDS)[20:]]
    for index in range(2):
        job.live(3, index=index, workers=2)
    job.live(3)
    with pytest.raises(
        InvalidArgumentError, match="worker 0 of 2 has trained this stream before, and 1 workers have since"
    ):
        job.live(3, workers=2)
