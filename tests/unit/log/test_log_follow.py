"""Danger: a follower that misses a segment, sees one twice, or continues on an abandoned chain without an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from log_tables import new_table, train
from monolith import LogGapError
from monolith.log import ChangeLog, LogReader, prune
from monolith.log.bounds import HEAD
from monolith.log.segment_format import segment_name


def script(*acts: Callable[[], object]) -> Callable[[float], bool]:
    """A wait that does the next act instead of sleeping, and ends the following when there is none left."""
    waiting: Iterator[Callable[[], object]] = iter(acts)

    def wait(seconds: float) -> bool:
        assert seconds == 0.25
        act = next(waiting, None)
        if act is not None:
            act()
        return act is None

    return wait


def followed(folder: Path, since: int, *acts: Callable[[], object]) -> list[int]:
    reader = LogReader(folder)
    return [segment.info.sequence for segment in reader.follow(since, poll=0.25, wait=script(*acts))]


def test_what_is_there_and_what_comes_is_seen_once(tmp_path: Path) -> None:
    with ChangeLog(tmp_path, []) as log:
        log.commit(step=1)
        log.commit(step=2)

        def two() -> None:
            log.commit(step=3)
            log.commit(step=4)

        nothing: Callable[[], None] = lambda: None  # noqa: E731
        assert followed(tmp_path, 0, nothing, two, nothing, lambda: log.commit(step=5)) == [1, 2, 3, 4, 5]
        assert followed(tmp_path, 3) == [4, 5]
        assert followed(tmp_path, 5, lambda: log.commit(step=6)) == [6]


def test_a_follower_may_wait_for_the_first_segment(tmp_path: Path) -> None:
    def begin() -> None:
        with ChangeLog(tmp_path / "log", []) as log:
            log.commit(step=1)

    assert followed(tmp_path / "log", 0, begin) == [1]


def test_a_line_that_does_not_concern_the_follower_is_followed_from_its_fork(tmp_path: Path) -> None:
    with ChangeLog(tmp_path, []) as log:
        log.commit(step=1)
        log.commit(step=2)

    def restored_to_first() -> None:
        with ChangeLog(tmp_path, [], parent=1) as log:
            log.commit(step=2)

    assert followed(tmp_path, 2) == []
    with pytest.raises(LogGapError, match="abandoned for 1"):
        followed(tmp_path, 2, restored_to_first)
    assert followed(tmp_path, 1) == [3]


def test_a_number_that_comes_again_with_other_content_is_noticed(tmp_path: Path) -> None:
    with ChangeLog(tmp_path, []) as log:
        log.commit(step=1)
        head = (tmp_path / HEAD).read_bytes()
        log.commit(step=2)

    def power_cut() -> None:
        (tmp_path / segment_name(2)).unlink()
        (tmp_path / HEAD).write_bytes(head)
        with ChangeLog(tmp_path, []) as log:
            assert log.commit(step=22) == 2

    def go_on() -> None:
        with ChangeLog(tmp_path, []) as log:
            log.commit(step=3)

    with pytest.raises(LogGapError, match="another segment 2 than the one followed"):
        followed(tmp_path, 0, power_cut, go_on)


def test_a_follower_that_fell_behind_retention_is_told(tmp_path: Path) -> None:
    with ChangeLog(tmp_path, []) as log:
        for step in range(5):
            log.commit(step=step)
        prune(tmp_path, [(3, 4)])
        assert followed(tmp_path, 3) == [4, 5]
        with pytest.raises(LogGapError):
            followed(tmp_path, 1)


def test_an_event_ends_the_following(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert list(LogReader(tmp_path).follow(poll=60, wait=stop.wait)) == []


def test_a_follower_beside_a_writer_sees_every_segment_whole(tmp_path: Path) -> None:
    table, stop = new_table(), threading.Event()
    seen: list[tuple[int, int]] = []

    def read() -> None:
        for segment in LogReader(tmp_path).follow(poll=0.001, wait=lambda _: stop.is_set()):
            segment.check()
            seen.append((segment.info.sequence, sum(len(piece.ids) for piece in segment)))

    follower = threading.Thread(target=read)
    follower.start()
    with ChangeLog(tmp_path, [table]) as log:
        for step in range(50):
            train(table, range(step + 1))
            log.commit(step=step)
    stop.set()
    follower.join()
    # The last look may have been before the last commits; what was seen is without gaps.
    assert seen == [(n + 1, n + 1) for n in range(len(seen))]
    assert [s.info.sequence for s in LogReader(tmp_path).follow(len(seen), wait=lambda _: True)] == list(
        range(len(seen) + 1, 51)
    )
