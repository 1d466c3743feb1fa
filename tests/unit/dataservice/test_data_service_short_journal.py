"""Danger: a compacted journal loses assignments, or is overwritten by a dispatcher that was replaced."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from monolith.dataservice import journal as journal_module
from monolith.dataservice.dataset import DatasetConfig
from monolith.dataservice.dispatcher import DispatcherCalls, DispatcherConfig
from monolith.dataservice.jobs import Jobs
from monolith.dataservice.journal import Journal, Registered
from monolith.dataservice.protocol import JoinJob, NextSplit, RegisterDataset
from monolith.errors import CorruptFileError, FencedError, StorageError

JOB = "clicks"
EVENT = Registered(job=JOB, dataset=DatasetConfig(kind="click_stream"))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals are rewritten from a few lines on."""
    monkeypatch.setattr(journal_module, "LEAST_BYTES", 600)


def join(jobs: Jobs, trainer: int, session: int, *, epoch: int = 0, granted: int = 0) -> bool:
    asked = JoinJob(job=JOB, trainer=trainer, trainers=3, epoch=epoch, granted=granted, session=session, nonce=session)
    return jobs.join(asked).joined


def ask(jobs: Jobs, trainer: int, session: int, granted: int, *, epoch: int = 0) -> int | None:
    asked = NextSplit(job=JOB, trainer=trainer, session=session, epoch=epoch, granted=granted)
    return jobs.next_split(asked).split


@pytest.fixture
def files(tmp_path: Path) -> DatasetConfig:
    (tmp_path / "data").mkdir()
    for number in range(4):
        (tmp_path / "data" / f"{number}.csv").touch()
    return DatasetConfig(kind="csv", paths=(f"{tmp_path}/data/*.csv",), splits=3)


@pytest.mark.parametrize("sharding", ["dynamic", "static"])
@pytest.mark.parametrize("seed", range(4))
def test_a_shortened_journal_leads_to_the_same_answers(files: DatasetConfig, sharding: str, seed: int) -> None:
    rng, dataset = random.Random(seed), files.model_copy(update={"sharding": sharding})
    jobs = Jobs(record=lambda event: None)
    jobs.register(RegisterDataset(job=JOB, dataset=dataset))
    sessions, granted, epochs = [1] * 3, [0] * 3, [0] * 3
    for trainer in range(3):
        assert join(jobs, trainer, 1)
    for _ in range(150):
        # Another that has only what the first would write down, and then does the same.
        copy = Jobs(record=lambda event: None)
        for event in jobs.states():
            copy.apply(event)
        assert copy.states() == jobs.states()
        trainer = rng.randrange(3)
        if rng.random() < 0.1:
            sessions[trainer] += 1
            granted[trainer] = rng.randint(0, granted[trainer])
            for one in (jobs, copy):
                assert join(one, trainer, sessions[trainer], epoch=epochs[trainer], granted=granted[trainer])
        else:
            split, same = (
                ask(j, trainer, sessions[trainer], granted[trainer], epoch=epochs[trainer]) for j in (jobs, copy)
            )
            assert split == same
            granted[trainer] += split is not None
            if split is None:
                epochs[trainer], granted[trainer] = epochs[trainer] + 1, 0
        assert copy.states() == jobs.states()
        jobs = copy


def test_a_dispatchers_journal_stays_short_and_is_read_again(tmp_path: Path, files: DatasetConfig, short: None) -> None:
    config = DispatcherConfig(folder=tmp_path / "folder")
    calls = DispatcherCalls(config)
    calls.jobs.register(RegisterDataset(job=JOB, dataset=files))
    largest = 0
    for session in range(1, 120):
        assert join(calls.jobs, 0, session)
        assert ask(calls.jobs, 0, session, 0) == 0
        largest = max(largest, (tmp_path / "folder" / "journal").stat().st_size)
    # 240 events, of which every one took a hundred bytes.
    assert largest < 2000
    kept = calls.jobs.states()
    calls.close()
    again = DispatcherCalls(config)
    assert again.jobs.states() == kept
    assert ask(again.jobs, 0, 119, 1) == 1
    again.close()


def test_a_rewrite_that_fails_leaves_the_journal_and_the_event(
    tmp_path: Path, files: DatasetConfig, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    calls = DispatcherCalls(DispatcherConfig(folder=tmp_path))
    calls.jobs.register(RegisterDataset(job=JOB, dataset=files))
    with monkeypatch.context() as broken:
        broken.setattr(journal_module, "write_durably", fail)
        for session in range(1, 60):
            assert join(calls.jobs, 0, session)
    kept = calls.jobs.states()
    calls.close()
    again = DispatcherCalls(DispatcherConfig(folder=tmp_path))
    assert again.jobs.states() == kept
    again.close()


@pytest.mark.parametrize("late", [lambda j: j.append(EVENT), lambda j: j.rewrite([])], ids=["append", "rewrite"])
def test_who_was_replaced_writes_and_rewrites_nothing_that_counts(
    tmp_path: Path, late: Callable[[Journal], None]
) -> None:
    hung = Journal(tmp_path)
    hung.append(EVENT)
    with closing(Journal(tmp_path, take_over=True)) as successor:
        assert list(successor.read()) == [EVENT]
        successor.append(EVENT)
        with pytest.raises(FencedError):
            late(hung)
        successor.append(EVENT)
    hung.close()
    for _ in range(2):
        # Nobody has it: nothing is taken from anybody, whatever was asked for.
        with closing(Journal(tmp_path, take_over=True)) as last:
            assert list(last.read()) == [EVENT] * 3
    assert len(list(tmp_path.glob("journal*"))) == 1


def test_a_successor_that_hangs_too_is_followed_by_one_that_has_all_its_events(tmp_path: Path) -> None:
    hung: list[Journal] = []
    for number in range(4):
        hung.append(Journal(tmp_path, take_over=True))
        assert list(hung[-1].read()) == [EVENT] * number
        hung[-1].append(EVENT)
    for journal in hung:
        journal.close()
    with closing(Journal(tmp_path)) as last:
        assert list(last.read()) == [EVENT] * 4


def test_a_successor_that_dies_before_it_has_a_journal_of_its_own_has_changed_nothing(tmp_path: Path) -> None:
    hung = Journal(tmp_path)
    hung.append(EVENT)
    Journal(tmp_path, take_over=True).close()
    with closing(Journal(tmp_path)) as again:
        assert list(again.read()) == [EVENT]
    hung.close()


def test_what_a_rewrite_that_was_killed_has_left_is_removed(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.append(EVENT)
    (tmp_path / ".journal.0123.tmp").write_bytes(b"half of it")
    with closing(Journal(tmp_path)) as journal:
        assert list(journal.read()) == [EVENT]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "writer.lock"]


@pytest.mark.parametrize("note", ["", "journal.0123456789abcdef\n", "../journal.0123456789abcdef\n", "\0\n"])
def test_a_journal_is_not_begun_anew_because_the_note_is_gone(tmp_path: Path, note: str) -> None:
    hung = Journal(tmp_path)
    with closing(Journal(tmp_path, take_over=True)) as successor:
        successor.append(EVENT)
    hung.close()
    (tmp_path / "writer.lock").write_text(note)
    with pytest.raises(CorruptFileError, match=r"writer\.lock should name the current journal"):
        Journal(tmp_path)
    assert len(list(tmp_path.glob("journal.*"))) == 1


def test_a_journal_that_cannot_be_opened_lets_go_of_its_lock(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot open"):
            Journal(tmp_path)
