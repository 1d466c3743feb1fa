"""Danger: a data worker that keeps every file it ever read open, or continues to serve a trainer that was replaced."""

from __future__ import annotations

import json

import pytest

from monolith.dataservice.protocol import ReadBatch
from monolith.dataservice.worker import SPLIT_END, OpenSplits
from monolith.errors import StalePushError, StorageError
from monolith.transport.calls import Answer


class Stream:
    """Answers with its place, one question long; then it is at the next place."""

    def __init__(self, request: ReadBatch) -> None:
        self.at = int(request.position or 0)
        self.closed = False
        self.error: Exception | None = None

    def answer(self, position: str, *, wait: float) -> Answer | None:
        if self.error is not None:
            raise self.error
        if int(position or 0) != self.at:
            return None
        if self.at == 9:
            return SPLIT_END
        self.at += 1
        return Answer(text=str(self.at))

    def close(self) -> None:
        self.closed = True


class Worker:
    def __init__(self, **options: float) -> None:
        self.now = 0.0
        self.opened: list[Stream] = []
        self.splits = OpenSplits(self._open, clock=lambda: self.now, **options)  # type: ignore[arg-type]

    def _open(self, request: ReadBatch) -> Stream:
        self.opened.append(Stream(request))
        return self.opened[-1]

    def read(self, split: int, position: int, *, session: int = 1) -> int:
        request = ReadBatch(job="j", trainer=0, session=session, epoch=0, split=split, position=str(position))
        return int(json.loads(self.splits.answer(request, wait=0).text))

    def closed(self) -> list[bool]:
        return [stream.closed for stream in self.opened]


def test_a_stream_goes_on_and_one_that_is_elsewhere_is_opened_anew_at_the_place_asked_for() -> None:
    worker = Worker()
    assert [worker.read(0, place) for place in (0, 1, 2)] == [1, 2, 3]
    assert len(worker.opened) == 1
    assert worker.read(0, 1) == 2
    assert worker.closed() == [True, False]
    assert (worker.read(0, 2), len(worker.splits)) == (3, 1)


def test_those_that_nobody_asks_for_are_closed_when_another_one_is_opened() -> None:
    worker = Worker(idle_secs=60.0)
    worker.read(0, 0)
    worker.now = 50.0
    worker.read(1, 0)
    worker.now = 70.0
    worker.read(2, 0)
    assert worker.closed() == [True, False, False]


def test_no_more_than_the_limit_are_open_and_the_longest_idle_goes_first() -> None:
    worker = Worker(max_splits=2)
    for now, split in enumerate((0, 1)):
        worker.now = now
        worker.read(split, 0)
    worker.now = 2.0
    worker.read(0, 1)
    worker.read(2, 0)
    assert worker.closed() == [False, True, False]
    assert len(worker.splits) == 2


def test_one_that_has_ended_is_closed() -> None:
    worker = Worker()
    worker.read(0, 8)
    request = ReadBatch(job="j", trainer=0, session=1, epoch=0, split=0, position="9")
    assert worker.splits.answer(request, wait=0) == SPLIT_END
    assert (worker.closed(), len(worker.splits)) == ([True], 0)


def test_one_that_failed_is_opened_again_by_whoever_asks_again() -> None:
    worker = Worker()
    worker.read(0, 0)
    worker.opened[0].error = StorageError("the disk is gone")
    with pytest.raises(StorageError):
        worker.read(0, 1)
    assert worker.read(0, 1) == 2
    assert worker.closed() == [True, False]


def test_a_session_that_was_replaced_is_turned_away_and_its_streams_are_closed() -> None:
    worker = Worker()
    worker.read(0, 0, session=1)
    worker.read(0, 1, session=2)
    worker.splits.know_sessions({"j": {0: 2}})
    with pytest.raises(StalePushError, match="started again elsewhere"):
        worker.read(0, 1, session=1)
    assert worker.closed() == [True, False]
    assert worker.read(0, 2, session=2) == 3
    worker.splits.close()
    assert worker.closed() == [True, True]
