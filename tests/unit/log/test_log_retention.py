"""Danger: a segment that is removed while a kept checkpoint needs it, by intent or because the removal was cut short."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from monolith import CorruptFileError, LogGapError, StorageError
from monolith.log import ChangeLog, LogReader, prune
from monolith.log.segment_format import segment_name


def write(folder: Path, count: int) -> None:
    with ChangeLog(folder, []) as log:
        for step in range(count):
            log.commit(step=step)


def left(folder: Path) -> list[int]:
    return LogReader(folder).sequences()


def test_only_what_a_chain_needs_and_what_is_newer_stays(tmp_path: Path) -> None:
    write(tmp_path, 10)
    assert prune(tmp_path, [(5, 7)]) == [1, 2, 3, 4, 5]
    assert left(tmp_path) == [6, 7, 8, 9, 10]
    assert prune(tmp_path, [(5, 7)]) == []


def test_without_chains_nothing_is_removed(tmp_path: Path) -> None:
    write(tmp_path, 3)
    assert prune(tmp_path, []) == []
    assert prune(tmp_path / "none", []) == []
    assert left(tmp_path) == [1, 2, 3]


def test_the_newest_stays_even_if_a_snapshot_has_it_all(tmp_path: Path) -> None:
    # Its number tells the next writer where to go on.
    write(tmp_path, 3)
    assert prune(tmp_path, [(3, 3)]) == [1, 2]
    with ChangeLog(tmp_path, [], parent=3) as log:
        assert log.commit(step=9) == 4


def test_abandoned_segments_go_when_a_newer_checkpoint_is_kept(tmp_path: Path) -> None:
    write(tmp_path, 4)
    with ChangeLog(tmp_path, [], parent=2) as log:
        log.commit(step=9)
    assert prune(tmp_path, [(0, 2)]) == []
    assert prune(tmp_path, [(0, 5)]) == [3, 4]
    assert [info.sequence for info in LogReader(tmp_path).chain(5)] == [1, 2, 5]


def test_young_segments_stay(tmp_path: Path) -> None:
    write(tmp_path, 5)
    for sequence in range(1, 6):
        os.utime(tmp_path / segment_name(sequence), (1000 + sequence, 1000 + sequence))
    assert prune(tmp_path, [(5, 5)], min_age=10, clock=lambda: 1013.0) == [1, 2, 3]
    assert left(tmp_path) == [4, 5]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_chain_that_cannot_be_walked_stops_everything(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 6)
    path = tmp_path / segment_name(4)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"")
    before = left(tmp_path)
    with pytest.raises((LogGapError, CorruptFileError), match=segment_name(4)):
        prune(tmp_path, [(2, 6)])
    assert left(tmp_path) == before


def test_a_run_that_went_back_keeps_what_it_stands_on(tmp_path: Path) -> None:
    # The run goes on from 3, for which there is no checkpoint, after one at 5 was written.
    write(tmp_path, 5)
    with ChangeLog(tmp_path, [], parent=3) as log:
        log.commit(step=9)
    assert prune(tmp_path, [(1, 2), (4, 5)]) == [1, 4]
    assert [info.sequence for info in LogReader(tmp_path).chain(6, 1)] == [2, 3, 6]
    assert prune(tmp_path, [(4, 5)]) == []
    assert prune(tmp_path, [(3, 6)]) == [2, 3, 5]


def test_a_chain_of_an_abandoned_line_is_kept_like_any_other(tmp_path: Path) -> None:
    write(tmp_path, 4)
    with ChangeLog(tmp_path, [], parent=1) as log:
        log.commit(step=9)
        log.commit(step=10)
    assert prune(tmp_path, [(1, 3), (5, 6)]) == [1, 4, 5]


def test_being_stopped_midway_breaks_no_kept_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, unlink = random.Random(7), Path.unlink
    for trial in range(40):
        folder = tmp_path / str(trial)
        write(folder, 4)
        for _ in range(rng.randrange(6)):
            with ChangeLog(folder, [], parent=rng.choice(left(folder))) as log:
                log.commit(step=0)
        tips = rng.sample(left(folder), 2)
        chains = [(rng.choice([0, *(i.sequence for i in LogReader(folder).chain(to))]), to) for to in tips]
        kept = [[info.checksum for info in LogReader(folder).chain(to, since)] for since, to in chains]
        for _ in range(20):
            budget = rng.randrange(3)

            def stopped(path: Path, *, missing_ok: bool = False) -> None:
                nonlocal budget
                if budget == 0:
                    raise OSError(5, "stopped")
                budget -= 1
                unlink(path, missing_ok=missing_ok)

            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", stopped)
                try:
                    prune(folder, chains)
                except StorageError:
                    pass
                else:
                    break
            assert [[i.checksum for i in LogReader(folder).chain(to, since)] for since, to in chains] == kept
        needed = {i.sequence for since, to in chains for i in LogReader(folder).chain(to, since)}
        newest = {info.sequence for info in LogReader(folder).line()}
        assert {s for s in left(folder) if s < max(tips)} <= needed | newest
