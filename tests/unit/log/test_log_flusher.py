"""Danger: a log that silently falls behind, or a commit at every step that slows training down."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from log_tables import new_table, train
from monolith import InvalidArgumentError, StorageError
from monolith.log import ChangeLog, Flusher, LogReader


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def flushed(flusher: Flusher, step: int) -> bool:
    future = flusher.poll(step=step)
    if future is not None:
        future.result()
    return future is not None


def test_by_time(tmp_path: Path) -> None:
    table, clock = new_table(), Clock()
    with ChangeLog(tmp_path, [table]) as log:
        flusher = Flusher(log, every_secs=2.0, clock=clock)
        train(table, range(1000))
        clock.now += 1.9
        assert not flushed(flusher, 1)
        clock.now += 0.1
        assert flushed(flusher, 2)
        clock.now += 1.9
        train(table, [1])
        assert not flushed(flusher, 3)
        clock.now += 0.2
        assert flushed(flusher, 4)
    assert [info.step for info in LogReader(tmp_path).segments()] == [2, 4]


def test_nothing_changed_is_nothing_to_write(tmp_path: Path) -> None:
    table, clock = new_table(), Clock()
    with ChangeLog(tmp_path, [table]) as log:
        flusher = Flusher(log, every_secs=1.0, every_rows=1, clock=clock)
        clock.now += 100
        assert not flushed(flusher, 1)
        train(table, [1])
        assert flushed(flusher, 2)


def test_by_changed_rows_of_all_tables(tmp_path: Path) -> None:
    user, item = new_table("user"), new_table("item")
    with ChangeLog(tmp_path, [user, item]) as log:
        flusher = Flusher(log, every_secs=None, every_rows=10)
        train(user, range(5))
        train(user, range(5))
        train(item, range(4))
        assert not flushed(flusher, 1)
        train(item, [4])
        assert flushed(flusher, 2)
        assert log.changed == 0


def test_state_is_asked_for_only_when_it_is_written(tmp_path: Path) -> None:
    table, asked = new_table(), []

    def dense() -> dict[str, object]:
        asked.append("dense")
        return {"step": len(asked)}

    with ChangeLog(tmp_path, [table]) as log:
        flusher = Flusher(log, every_secs=None, every_rows=2)
        train(table, [1])
        assert flusher.poll(step=1, source=lambda: {"offset": 1}, dense=dense) is None
        assert asked == []
        train(table, [2])
        future = flusher.poll(step=2, event_time=9, source=lambda: {"offset": 2}, dense=dense)
        assert future is not None
        segment = LogReader(tmp_path).read(future.result())
    assert (segment.dense(), segment.source()) == ({"step": 1}, {"offset": 2})
    assert (segment.info.step, segment.info.event_time) == (2, 9)


def test_a_failed_commit_is_reported_and_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = new_table()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with ChangeLog(tmp_path, [table]) as log:
        flusher = Flusher(log, every_secs=None, every_rows=1)
        train(table, [1])
        with monkeypatch.context() as patch:
            patch.setattr("os.writev", full)
            future = flusher.poll(step=1)
            assert future is not None
            with pytest.raises(StorageError, match="No space"):
                future.result()
        with caplog.at_level(logging.WARNING):
            future = flusher.poll(step=2)
        assert flusher.failures == 1
        assert "No space left on device" in caplog.text
        assert future is not None
        assert LogReader(tmp_path).info(future.result()).rows == 1


def test_a_commit_under_way_is_not_waited_for(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path, [table]) as log:
        flusher = Flusher(log, every_secs=None, every_rows=1)
        train(table, [1])
        log._one_commit.acquire()
        assert flusher.poll(step=1) is None
        log._one_commit.release()
        assert flushed(flusher, 2)


@pytest.mark.parametrize("wrong", [{"every_secs": 0.0}, {"every_secs": -1.0}, {"every_rows": 0}])
def test_intervals_are_above_zero(tmp_path: Path, wrong: dict) -> None:
    with ChangeLog(tmp_path, []) as log, pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        Flusher(log, **wrong)
