"""Danger: an abandoned future that mixes into the line that is alive, a hole that goes unnoticed, a number used twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from log_tables import new_table, rebuilt, train
from monolith import CorruptFileError, InvalidArgumentError, LogGapError
from monolith.log import ChangeLog, LogReader
from monolith.log.segment_format import segment_name


def commit(folder: Path, *steps: int, parent: int | None = None, dense: bool = False) -> list[int]:
    with ChangeLog(folder, [], parent=parent) as log:
        return [log.commit(step=step, dense={"step": step} if dense else None) for step in steps]


def chain(folder: Path, to: int, since: int = 0) -> list[int]:
    return [info.sequence for info in LogReader(folder).chain(to, since)]


def remove(folder: Path, *sequences: int) -> None:
    for sequence in sequences:
        (folder / segment_name(sequence)).unlink()


def test_numbers_go_up_across_runs(tmp_path: Path) -> None:
    assert commit(tmp_path, 10, 20) == [1, 2]
    assert commit(tmp_path, 30) == [3]
    assert [(info.sequence, info.parent, info.step) for info in LogReader(tmp_path).segments()] == [
        (1, 0, 10),
        (2, 1, 20),
        (3, 2, 30),
    ]
    assert chain(tmp_path, 3) == [1, 2, 3]
    assert chain(tmp_path, 3, 1) == [2, 3]
    assert chain(tmp_path, 3, 3) == chain(tmp_path, 0) == []


def test_an_abandoned_future_stays_out(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path, [table]) as log:
        train(table, [1])
        log.commit(step=1)
        train(table, [2])
        log.commit(step=2)
    restored = rebuilt(tmp_path, 1)
    with ChangeLog(tmp_path, [restored], parent=1) as log:
        assert log.sequence == 1
        train(restored, [3])
        assert log.commit(step=2) == 3
    assert chain(tmp_path, 3) == [1, 3]
    assert chain(tmp_path, 2) == [1, 2]
    assert sorted(rebuilt(tmp_path, 3)) == [1, 3]
    assert sorted(rebuilt(tmp_path, 2)) == [1, 2]
    with pytest.raises(LogGapError, match="sequence 3 does not continue 2"):
        chain(tmp_path, 3, 2)


def test_a_line_can_begin_anew_beside_another(tmp_path: Path) -> None:
    commit(tmp_path, 10, 20)
    assert commit(tmp_path, 1, parent=0) == [3]
    assert chain(tmp_path, 3) == [3]


def test_a_log_may_continue_a_snapshot_whose_segments_are_gone(tmp_path: Path) -> None:
    assert commit(tmp_path, 10, parent=41) == [42]
    assert chain(tmp_path, 42, 41) == [42]
    assert [info.sequence for info in LogReader(tmp_path).line()] == [42]
    with pytest.raises(LogGapError, match=segment_name(41)):
        chain(tmp_path, 42)


def test_a_missing_segment_is_a_gap(tmp_path: Path) -> None:
    commit(tmp_path, *range(5))
    remove(tmp_path, 3)
    assert chain(tmp_path, 5, 3) == [4, 5]
    with pytest.raises(LogGapError, match=segment_name(3)):
        chain(tmp_path, 5, 2)
    with pytest.raises(LogGapError):
        chain(tmp_path, 6)
    with pytest.raises(LogGapError, match=segment_name(3)):
        LogReader(tmp_path).line()
    assert [info.sequence for info in LogReader(tmp_path).line(2)] == [1, 2]
    with pytest.raises(LogGapError):
        LogReader(tmp_path).line(3)


def test_a_number_is_not_used_again_after_the_newest_was_abandoned(tmp_path: Path) -> None:
    commit(tmp_path, 1, 2, 3)
    assert commit(tmp_path, 2, parent=1) == [4]
    assert commit(tmp_path, 2, parent=1) == [5]
    assert chain(tmp_path, 5) == [1, 5]


def test_segments_of_another_run_are_noticed(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    commit(ours, 1, 2, 3)
    commit(theirs, 10, 20, 30)
    shutil.copy(theirs / segment_name(2), ours / segment_name(2))
    with pytest.raises(CorruptFileError, match="files of two runs were mixed"):
        chain(ours, 3)
    assert [verdict.error is not None for verdict in LogReader(ours).verify()] == [False, True, True]


def test_restore_points_are_those_with_dense_state_on_the_line(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    commit(tmp_path, 2, dense=True)
    commit(tmp_path, 3)
    commit(tmp_path, 4, dense=True)
    commit(tmp_path, 3, parent=2, dense=True)
    reader = LogReader(tmp_path)
    assert [info.sequence for info in reader.restore_points()] == [2, 5]
    assert [info.sequence for info in reader.restore_points(4)] == [2, 4]
    assert reader.restore_points(1) == []


def test_a_folder_without_a_log_is_an_empty_one(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        reader = LogReader(folder)
        assert (reader.newest, reader.segments(), reader.line(), list(reader.verify())) == (0, [], [], [])


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    for name in ("1.segment", "0000000000000000000a.segment", f"{segment_name(7)}~", ".00000000000000000009.segment"):
        (tmp_path / name).write_text("x")
    (tmp_path / segment_name(0)).write_text("x")
    assert LogReader(tmp_path).sequences() == [1]


@pytest.mark.parametrize(("to", "since"), [(1, 2), (1, -1), (-1, 0)])
def test_a_chain_that_goes_backwards_is_refused(tmp_path: Path, to: int, since: int) -> None:
    with pytest.raises(InvalidArgumentError, match="since"):
        LogReader(tmp_path).chain(to, since)


@pytest.mark.parametrize("parent", [-1, 1.0, True, 2**63])
def test_a_parent_that_is_no_sequence_number_is_refused(tmp_path: Path, parent: int) -> None:
    with pytest.raises(InvalidArgumentError, match="parent"):
        ChangeLog(tmp_path, [], parent=parent)
    ChangeLog(tmp_path, []).close()  # the lock was let go


def test_a_damaged_parent_is_not_continued(tmp_path: Path) -> None:
    commit(tmp_path, 1, 2)
    (tmp_path / segment_name(2)).write_bytes(b"")
    with pytest.raises(CorruptFileError):
        ChangeLog(tmp_path, [])
    assert commit(tmp_path, 2, parent=1) == [3]


def test_a_log_does_not_go_on_with_tables_that_were_restored_under_it(tmp_path: Path) -> None:
    table, other = new_table(), new_table()
    with ChangeLog(tmp_path, [table]) as log:
        train(table, [1])
        log.commit(step=1)
        table.take_over(other)
        train(table, [2])
        for commit in (log.commit, log.commit_in_background):
            with pytest.raises(InvalidArgumentError, match="'user' was restored after"):
                commit(step=2)
    with ChangeLog(tmp_path, [table], parent=0) as log:
        assert sorted(rebuilt(tmp_path, log.commit(step=2))) == [2]


def test_whether_a_line_alone_leads_to_the_tables(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path, [table]) as log:
        assert log.complete
        train(table, [1])
        log.commit(step=1)
    for parent, complete in ((1, True), (0, False), (3, False), (2, True), (99, True)):
        with ChangeLog(tmp_path, [table], parent=parent) as log:
            assert log.complete == complete
            assert LogReader(tmp_path).info(log.commit(step=2)).complete == complete
