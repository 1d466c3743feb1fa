"""Danger: a file is read by two workers or by none, above all when a queue resumes after a restart."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from monolith.data import FileQueue
from monolith.data.sources import files as module
from monolith.errors import InvalidArgumentError, StorageError


def made(folder: Path, *names: str) -> list[str]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return [str(path) for path in paths]


def all_of(queue: FileQueue) -> list[str]:
    return list(iter(queue.pop, None))


def test_patterns_come_in_order_and_the_files_of_each_sorted(tmp_path: Path) -> None:
    files = made(tmp_path, "b/2", "b/1", "a/9", "day_20260102", "day_20260104")
    queue = FileQueue(
        [f"{tmp_path}/b/*", f"{tmp_path}/day_{{DATE(20260101,20260105)}}", f"{tmp_path}/a", f"{tmp_path}/x"]
    )
    assert all_of(queue) == [files[1], files[0], files[3], files[4], files[2], f"{tmp_path}/x"]
    assert queue.pop() is None


def test_it_ends_when_nothing_matches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert FileQueue([f"{tmp_path}/*.csv"]).pop() is None
    assert "no file matches" in caplog.text
    assert FileQueue([]).pop() is None


def test_a_pattern_is_listed_only_when_the_names_before_it_are_gone(tmp_path: Path) -> None:
    made(tmp_path, "a/1")
    queue = FileQueue([f"{tmp_path}/a/*", f"{tmp_path}/b/*"])
    assert queue.pop() is not None
    (late,) = made(tmp_path, "b/late")
    assert all_of(queue) == [late]


@pytest.mark.parametrize("capacity", [1, 2, 3, 100])
def test_a_small_capacity_lists_again_and_loses_nothing(tmp_path: Path, capacity: int) -> None:
    files = made(tmp_path, *(f"{number:02}" for number in range(10)))
    queue = FileQueue([f"{tmp_path}/*"], capacity=capacity)
    assert all_of(queue) == files


@pytest.mark.parametrize("capacity", [1, 100])
def test_a_state_goes_on_behind_the_last_name_wherever_it_was_taken(tmp_path: Path, capacity: int) -> None:
    made(tmp_path, "a/1", "a/2", "b/1", "c/1", "c/2")
    patterns = [f"{tmp_path}/a/*", f"{tmp_path}/b/*", f"{tmp_path}/none/*", f"{tmp_path}/c/*"]
    expected = all_of(FileQueue(patterns))
    for popped in range(len(expected) + 1):
        queue = FileQueue(patterns, capacity=capacity)
        for _ in range(popped):
            queue.pop()
        other = FileQueue(patterns)
        other.load_state_dict(queue.state_dict())
        assert all_of(other) == expected[popped:]


def test_what_appeared_behind_the_place_meanwhile_is_found_and_what_went_is_not_missed(tmp_path: Path) -> None:
    files = made(tmp_path, "1", "3", "5")
    queue = FileQueue([f"{tmp_path}/*"])
    queue.pop()
    state = queue.state_dict()
    Path(files[0]).unlink()
    (new,) = made(tmp_path, "4")
    other = FileQueue([f"{tmp_path}/*"])
    other.load_state_dict(state)
    assert all_of(other) == [files[1], new, files[2]]


def test_looking_is_not_taking(tmp_path: Path) -> None:
    first, second = made(tmp_path, "1", "2")
    queue = FileQueue([f"{tmp_path}/*"])
    name, behind = queue.peek() or ("", {})
    assert (name, queue.pop()) == (first, first)
    assert queue.state_dict() == behind
    assert queue.pop() == second
    assert queue.peek() is None


def test_threads_share_out_every_name_once(tmp_path: Path) -> None:
    files = made(tmp_path, *(f"{number:03}" for number in range(200)))
    queue = FileQueue([f"{tmp_path}/*"], capacity=7)
    taken: list[list[str]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(iter(queue.pop, None))) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for mine in taken for name in mine) == files


def test_a_listing_that_fails_is_tried_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    failures, pauses = [3], []

    def listed(pattern: str, *, must_exist: bool) -> list[str]:
        if failures[0]:
            failures[0] -= 1
            raise StorageError("the store does not answer")
        return ["found"]

    monkeypatch.setattr(module, "files_of", listed)
    assert FileQueue(["*"], sleep=pauses.append).pop() == "found"
    assert pauses == [0.5, 1.0, 2.0]
    failures[0] = 6
    with pytest.raises(StorageError, match="does not answer"):
        FileQueue(["*"], sleep=pauses.append).pop()
    assert len(pauses) == 8


WRONG = [
    {},
    {"pattern": 2, "after": ""},
    {"pattern": -1, "after": ""},
    {"pattern": 0, "after": 3},
    {"pattern": True, "after": ""},
]


@pytest.mark.parametrize("state", WRONG)
def test_a_state_of_something_else_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"state: expected a pattern in 0\.\.1"):
        FileQueue(["a"]).load_state_dict(state)
