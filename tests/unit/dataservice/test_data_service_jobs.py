"""Danger: a split that two trainers get, or none, when they come, go, ask twice and begin again in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from monolith.dataservice.dataset import DatasetConfig
from monolith.dataservice.jobs import Jobs
from monolith.dataservice.journal import EVENTS, JobEvent
from monolith.dataservice.protocol import DescribeSplit, Granted, JoinedJob, JoinJob, NextSplit, RegisterDataset
from monolith.errors import InvalidArgumentError, StalePushError, StorageError

JOB = "clicks"


class Service:
    """Jobs, their journal, and trainers that ask."""

    def __init__(self, dataset: DatasetConfig | None = None, journal: list[JobEvent] | None = None) -> None:
        self.journal: list[JobEvent] = [] if journal is None else journal
        self.fail = False
        self.nonce = 0
        self.joins: list[JoinJob] = []
        """All that began a session."""
        self.jobs = Jobs(record=self._record)
        for event in self.journal:
            # Through JSON, as the file has it.
            self.jobs.apply(EVENTS.validate_json(event.model_dump_json(), strict=True))
        if dataset is not None:
            self.jobs.register(RegisterDataset(job=JOB, dataset=dataset))

    def _record(self, event: JobEvent) -> None:
        if self.fail:
            raise StorageError("the disk is full")
        self.journal.append(event)

    def join(self, trainer: int, *, trainers: int = 4, epoch: int = 0, granted: int = 0) -> int:
        """The session that a new process of the trainer begins."""
        self.nonce += 1
        asked = JoinJob(
            job=JOB, trainer=trainer, trainers=trainers, epoch=epoch, granted=granted, session=1, nonce=self.nonce
        )
        answer = self.jobs.join(asked)
        if not answer.joined:
            asked = asked.model_copy(update={"session": answer.session + 1})
            answer = self.jobs.join(asked)
        assert answer == JoinedJob(joined=True, session=asked.session)
        self.joins.append(asked)
        return answer.session

    def next(self, trainer: int, session: int, granted: int, *, epoch: int = 0) -> Granted:
        request = NextSplit(job=JOB, trainer=trainer, session=session, epoch=epoch, granted=granted)
        return self.jobs.next_split(request)

    def all_of(self, trainer: int, session: int, *, epoch: int = 0) -> list[int]:
        got: list[int] = []
        while (split := self.next(trainer, session, len(got), epoch=epoch).split) is not None:
            got.append(split)
        return got

    def file_of(self, trainer: int, session: int, split: int) -> tuple[str | None, int, int]:
        part = self.jobs.describe(DescribeSplit(job=JOB, trainer=trainer, session=session, epoch=0, split=split)).split
        return part.file, part.part, part.parts


@pytest.fixture
def files(tmp_path: Path) -> DatasetConfig:
    for number in range(5):
        (tmp_path / f"{number}.csv").touch()
    return DatasetConfig(kind="csv", paths=(f"{tmp_path}/*.csv",))


def test_whoever_asks_gets_the_next_split_and_the_same_question_the_same_answer(files: DatasetConfig) -> None:
    service = Service(files)
    a, b = service.join(0), service.join(1)
    assert [service.next(0, a, 0).split, service.next(1, b, 0).split, service.next(0, a, 1).split] == [0, 1, 2]
    assert [service.next(0, a, 0).split, service.next(1, b, 0).split, service.next(0, a, 1).split] == [0, 1, 2]
    assert [service.next(1, b, 1).split, service.next(1, b, 2).split] == [3, 4]
    assert service.next(0, a, 2) == service.next(1, b, 3) == Granted(split=None, splits=5)


def test_files_are_cut_into_parts_and_sources_without_files_too(files: DatasetConfig) -> None:
    service = Service(files.model_copy(update={"splits": 3}))
    session = service.join(0)
    found = [service.file_of(0, session, split) for split in service.all_of(0, session)]
    assert [(Path(file or "").name, part, parts) for file, part, parts in found] == [
        (f"{number}.csv", part, 3) for number in range(5) for part in range(3)
    ]
    service = Service(DatasetConfig(kind="click_stream", splits=4))
    session = service.join(0)
    found = [service.file_of(0, session, split) for split in service.all_of(0, session)]
    assert found == [(None, part, 4) for part in range(4)]


def test_static_sharding_gives_every_trainer_its_own_whoever_comes_first(files: DatasetConfig) -> None:
    service = Service(files.model_copy(update={"sharding": "static"}))
    late, early = service.join(1, trainers=2), service.join(0, trainers=2)
    assert service.all_of(1, late) == [1, 3]
    assert service.all_of(0, early) == [0, 2, 4]
    with pytest.raises(InvalidArgumentError, match="has static sharding over 2, got 3"):
        service.join(2, trainers=3)


def test_what_a_trainer_got_after_its_checkpoint_is_handed_out_again(files: DatasetConfig) -> None:
    service = Service(files)
    a, b = service.join(0), service.join(1)
    assert [service.next(0, a, granted).split for granted in range(3)] == [0, 1, 2]
    again = service.join(0, granted=1)
    assert service.next(1, b, 0).split == 1
    assert [service.next(0, again, granted).split for granted in range(1, 4)] == [2, 3, 4]


def test_a_trainer_that_was_replaced_gets_nothing_any_more(files: DatasetConfig) -> None:
    service = Service(files)
    old = service.join(0)
    service.next(0, old, 0)
    new = service.join(0, granted=1)
    for ask in (lambda: service.next(0, old, 1), lambda: service.file_of(0, old, 0)):
        with pytest.raises(StalePushError, match="started again elsewhere"):
            ask()
    assert service.file_of(0, new, 0)[0] is not None
    with pytest.raises(StalePushError, match="split 1 of epoch 0 is not trainer 0's"):
        service.file_of(0, new, 1)


def test_a_request_to_begin_that_comes_again_or_late_changes_nothing(files: DatasetConfig) -> None:
    service = Service(files)
    session = service.join(0)
    assert [service.next(0, session, granted).split for granted in range(2)] == [0, 1]
    assert service.jobs.join(service.joins[0]) == JoinedJob(joined=True, session=session)
    assert service.next(0, session, 2).split == 2
    newer = service.join(0, granted=3)
    assert service.jobs.join(service.joins[0]) == JoinedJob(joined=False, session=newer)
    other = service.joins[1].model_copy(update={"nonce": 99, "granted": 0})
    assert service.jobs.join(other) == JoinedJob(joined=False, session=newer)
    assert service.next(0, newer, 3).split == 3


def test_a_trainer_that_was_told_the_end_gets_no_split_that_comes_back_later(files: DatasetConfig) -> None:
    service = Service(files)
    a, b = service.join(0), service.join(1)
    assert service.next(1, b, 0).split == 0
    assert service.all_of(0, a) == [1, 2, 3, 4]
    again = service.join(1)
    late = NextSplit(job=JOB, trainer=0, session=a, epoch=0, granted=4)
    assert service.jobs.next_split(late).split is None
    assert Service(journal=service.journal).jobs.next_split(late).split is None
    assert service.all_of(1, again) == [0]


def test_every_epoch_hands_out_everything_and_going_back_an_epoch_gives_back_the_later_one(
    files: DatasetConfig,
) -> None:
    service = Service(files)
    session = service.join(0)
    assert service.all_of(0, session) == [0, 1, 2, 3, 4]
    session = service.join(0, epoch=1)
    assert service.all_of(0, session, epoch=1) == [0, 1, 2, 3, 4]
    session = service.join(0, epoch=0, granted=4)
    assert service.next(0, session, 4).split == 4
    other = service.join(1, epoch=1)
    assert service.all_of(1, other, epoch=1) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (lambda s: s.join(0, granted=1), "it had 1 splits, the dispatcher knows of 0"),
        (lambda s: s.next(0, s.join(0), 7), "it had 7 splits, the dispatcher knows of 0"),
        (lambda s: s.join(0, epoch=10**9), "epoch: expected at most 0, got 1000000000"),
        (lambda s: s.next(0, s.join(0), 0, epoch=5), "epoch: expected at most 0, got 5"),
        (lambda s: s.join(4), "trainer: expected less than 4, got 4"),
        (
            lambda s: s.jobs.join(JoinJob(job="x", trainer=0, trainers=1, epoch=0, granted=0, session=1, nonce=1)),
            "'x' is not registered",
        ),
        (
            lambda s: s.jobs.register(RegisterDataset(job=JOB, dataset=DatasetConfig(kind="csv"))),
            "job 'clicks' reads DatasetConfig",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(ask: Callable[[Service], object], complaint: str) -> None:
    service = Service(DatasetConfig(kind="click_stream", splits=2))
    with pytest.raises(InvalidArgumentError, match=complaint):
        ask(service)
    assert service.all_of(0, service.join(0)) == [0, 1]


def test_a_change_that_cannot_be_written_down_does_not_happen(files: DatasetConfig) -> None:
    service = Service(files)
    session = service.join(0)
    service.next(0, session, 0)
    written = len(service.journal)
    service.fail = True
    for ask in (lambda: service.next(0, session, 1), lambda: service.join(0)):
        with pytest.raises(StorageError):
            ask()
    service.fail = False
    assert len(service.journal) == written
    assert service.next(0, session, 1).split == 1


@pytest.mark.parametrize("sharding", ["dynamic", "static"])
@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_of_questions_restarts_and_relapses_every_split_ends_up_with_one_trainer(
    files: DatasetConfig, sharding: str, seed: int
) -> None:
    rng = random.Random(seed)
    service = Service(files.model_copy(update={"sharding": sharding, "splits": 4}))
    kept: list[list[int]] = [[] for _ in range(3)]
    sessions = [service.join(trainer, trainers=3) for trainer in range(3)]
    for _ in range(120):
        trainer = rng.randrange(3)
        match rng.randrange(8):
            case 0:  # the dispatcher is started again
                service = Service(journal=service.journal)
            case 1:  # the trainer goes back to an older checkpoint
                kept[trainer] = kept[trainer][: rng.randint(0, len(kept[trainer]))]
                sessions[trainer] = service.join(trainer, trainers=3, granted=len(kept[trainer]))
            case 2:  # an answer got lost
                service.next(trainer, sessions[trainer], len(kept[trainer]))
            case _:
                split = service.next(trainer, sessions[trainer], len(kept[trainer])).split
                kept[trainer] += [] if split is None else [split]
        assert len({split for mine in kept for split in mine}) == sum(map(len, kept))
    for trainer in range(3):
        while (split := service.next(trainer, sessions[trainer], len(kept[trainer])).split) is not None:
            kept[trainer].append(split)
    assert sorted(split for mine in kept for split in mine) == list(range(20))
    assert sharding == "dynamic" or all(split % 3 == trainer for trainer in range(3) for split in kept[trainer])
