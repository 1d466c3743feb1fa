"""Danger: a segment of a log is lost, and readers of the log continue from before the gap as if nothing were missing.

Every position is tried, the newest too, which no other segment points at: it is named by the file `head`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_tables import new_table, rows_of, train
from monolith import LogGapError, MonolithError
from monolith.cli import main
from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.log import ChangeLog, LogReader, prune
from monolith.log.bounds import HEAD, HeadWriter, LogHead, read_head
from monolith.log.segment_format import segment_name
from monolith.ps import ParameterServer, ServerConfig
from monolith.state import (
    find_restore_point,
    remove_unreachable,
    restore_tables,
    write_checkpoint,
    write_snapshot,
)
from monolith.train import RunConfig
from monolith.train.restoring import choose_restore_point

COMMITS = 6


def a_run(model_dir: Path, *, dense: Callable[[int], bool] = lambda step: True, snapshot: int = 0) -> None:
    """Commit the steps 1 to 6; before step `snapshot` a scan of all rows begins, which that commit completes."""
    table = new_table()
    with ChangeLog(model_dir / "log", [table]) as log:
        for step in range(1, COMMITS + 1):
            scan = write_snapshot(model_dir, [table], log) if step == snapshot else None
            train(table, range(step * 3), step=step)
            sequence = log.commit(step=step, dense={"step": step} if dense(step) else None)
            if scan is not None:
                scan.close(sequence)


def segment(model_dir: Path, sequence: int) -> Path:
    return model_dir / "log" / segment_name(sequence)


@pytest.mark.parametrize("lost", range(1, COMMITS + 1))
def test_a_run_does_not_go_back_before_a_lost_segment(tmp_path: Path, lost: int) -> None:
    a_run(tmp_path)
    assert find_restore_point(tmp_path).step == COMMITS
    segment(tmp_path, lost).unlink()
    with pytest.raises(LogGapError, match=segment_name(lost)) as caught:
        find_restore_point(tmp_path)
    with pytest.raises(LogGapError, match=segment_name(lost)):
        choose_restore_point(RunConfig(model_dir=str(tmp_path)), training=True)
    if lost == 1:
        assert "no older state is left" in str(caught.value)
        with pytest.raises(InvalidArgumentError, match="nothing from sequence"):
            find_restore_point(tmp_path, sequence=COMMITS)
    else:
        assert f"--restore-to sequence={lost - 1}" in str(caught.value)
        choice = choose_restore_point(
            RunConfig(model_dir=str(tmp_path), restore_to=f"sequence={lost - 1}"), training=True
        )
        assert choice is not None
        assert choice.point.step == lost - 1


@pytest.mark.parametrize("lost", range(1, COMMITS + 1))
def test_segments_without_dense_state_are_missed_too(tmp_path: Path, lost: int) -> None:
    a_run(tmp_path, dense=lambda step: step == 2)
    assert find_restore_point(tmp_path).step == 2
    segment(tmp_path, lost).unlink()
    with pytest.raises(LogGapError, match=segment_name(lost)):
        find_restore_point(tmp_path)


@pytest.mark.parametrize("lost", range(1, COMMITS + 1))
def test_only_what_a_snapshot_has_is_not_missed(tmp_path: Path, lost: int) -> None:
    a_run(tmp_path, snapshot=4)
    segment(tmp_path, lost).unlink()
    if lost < 4:
        assert find_restore_point(tmp_path).step == COMMITS
    else:
        with pytest.raises(LogGapError, match=segment_name(lost)):
            find_restore_point(tmp_path)


def test_several_lost_segments_and_a_lost_log(tmp_path: Path) -> None:
    a_run(tmp_path)
    for lost in (4, 5, 6):
        segment(tmp_path, lost).unlink()
    with pytest.raises(LogGapError, match=rf"segment 6 .* newest that is there is {segment_name(3)}"):
        find_restore_point(tmp_path)
    for lost in (1, 2, 3):
        segment(tmp_path, lost).unlink()
    with pytest.raises(LogGapError, match="there is no segment at all"):
        find_restore_point(tmp_path)


@pytest.mark.parametrize("lost", range(1, COMMITS + 1))
def test_a_server_does_not_come_back_without_what_it_acknowledged(
    tmp_path: Path, lost: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(COMMITS):
        with ParameterServer(ServerConfig(folder=tmp_path, log_flush_secs=0)) as server:
            server._dispatcher.commit()
    segment(tmp_path, lost).unlink()
    with pytest.raises(LogGapError, match=segment_name(lost)):
        ParameterServer(ServerConfig(folder=tmp_path))
    assert main(["ps", "--folder", str(tmp_path)]) == 2
    assert segment_name(lost) in capsys.readouterr().err


@pytest.mark.parametrize("lost", range(1, COMMITS + 1))
def test_a_follower_stops_at_a_gap(tmp_path: Path, lost: int) -> None:
    a_run(tmp_path)
    reader = LogReader(tmp_path / "log")
    segment(tmp_path, lost).unlink()
    for since in range(COMMITS):
        if lost <= since:  # what came before is not its business
            found = [s.info.sequence for s in reader.follow(since, wait=lambda _: True)]
            assert found == list(range(since + 1, COMMITS + 1))
        else:
            with pytest.raises(LogGapError, match=segment_name(lost)):
                next(reader.follow(since, wait=lambda _: True))


def test_a_follower_notices_that_what_it_followed_is_taken_away(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "log" / HEAD).unlink()  # of a copy, say, that has only segments
    segment(tmp_path, COMMITS).unlink()
    with pytest.raises(LogGapError, match=f"segment {COMMITS} .* the last one followed"):
        next(LogReader(tmp_path / "log").follow(COMMITS, wait=lambda _: True))


@pytest.mark.parametrize("lost", range(1, COMMITS + 1))
def test_commands_that_read_a_log_stop_at_a_gap(tmp_path: Path, lost: int, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path)
    segment(tmp_path, lost).unlink()
    run = str(tmp_path)
    for command in (["export-table", run, f"{run}/out.parquet"], ["log", "history", run, "1"]):
        assert main(command) == 2
        assert segment_name(lost) in capsys.readouterr().err
    assert main(["verify", run]) == 3
    assert segment_name(lost) in capsys.readouterr().out


def test_what_retention_removed_is_no_gap(tmp_path: Path) -> None:
    a_run(tmp_path)
    reader = LogReader(tmp_path / "log")
    assert prune(reader.folder, [(2, COMMITS)]) == [1, 2]
    assert [info.sequence for info in reader.line()] == [3, 4, 5, 6]
    assert prune(reader.folder, [(3, COMMITS)]) == [3]
    assert [verdict.error for verdict in reader.verify()] == [None] * 3
    segment(tmp_path, 4).unlink()
    with pytest.raises(LogGapError, match=segment_name(4)):
        reader.line()
    assert [verdict.error is None for verdict in reader.verify()] == [False, True]


@pytest.mark.parametrize("lost", range(1, COMMITS + 1))
def test_nothing_is_removed_from_a_log_with_a_gap(tmp_path: Path, lost: int) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in range(1, COMMITS + 1):
            train(table, range(step * 3), step=step)
            write_checkpoint(tmp_path / f"model.ckpt-{step}", state={}, step=step, tables=[table], log=log)
    segment(tmp_path, lost).unlink()
    left = sorted(path.name for path in (tmp_path / "log").iterdir())
    with pytest.raises(LogGapError, match=segment_name(lost)):
        remove_unreachable(tmp_path)
    with pytest.raises(LogGapError):
        prune(tmp_path / "log", [(0, COMMITS)])
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == left


def test_a_log_is_not_continued_without_its_last_segment(tmp_path: Path) -> None:
    a_run(tmp_path)
    segment(tmp_path, COMMITS).unlink()
    with pytest.raises(LogGapError, match=segment_name(COMMITS)):
        ChangeLog(tmp_path / "log", [])
    with ChangeLog(tmp_path / "log", [], parent=COMMITS - 1) as log:
        assert log.commit(step=9, dense={}) == COMMITS + 1, "the number of what was lost is not given again"
    assert find_restore_point(tmp_path).step == 9


def test_going_back_on_purpose_leaves_the_gap_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a_run(tmp_path)
    segment(tmp_path, 4).unlink()
    table = new_table()
    with caplog.at_level(logging.WARNING):
        report = restore_tables(find_restore_point(tmp_path, step=COMMITS), [table])
    assert report.step == 3
    assert "sequence 6 cannot be restored" in caplog.text
    assert segment_name(4) in caplog.text
    with ChangeLog(tmp_path / "log", [table], parent=report.parent) as log:
        log.commit(step=4, dense={})
    point, copy = find_restore_point(tmp_path), new_table()
    assert point.step == 4
    restore_tables(point, [copy])
    assert rows_of(copy) == rows_of(table)


def test_a_crash_before_the_head_was_written_is_no_gap(tmp_path: Path) -> None:
    a_run(tmp_path)
    head = tmp_path / "log" / HEAD
    before = head.read_bytes()
    with ChangeLog(tmp_path / "log", []) as log:
        log.commit(step=7, dense={})
    head.write_bytes(before)
    assert find_restore_point(tmp_path).step == 7
    head.write_bytes(bytes(1024))  # nothing of it had reached the disk
    assert find_restore_point(tmp_path).step == 7


@pytest.mark.parametrize("left", [None, b"", bytes(1024)])
def test_a_log_that_has_lost_its_head_cannot_say_what_was_the_newest(
    tmp_path: Path, left: bytes | None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path)
    head = tmp_path / "log" / HEAD
    head.unlink()
    if left is not None:
        head.write_bytes(left)
    said = "head is missing or empty: whether the newest segment is there cannot be verified"
    assert find_restore_point(tmp_path).step == COMMITS
    assert said in caplog.text
    assert main(["verify", str(tmp_path)]) == 3
    assert said in capsys.readouterr().out


def test_a_torn_head_still_names_the_segment_synced_last(tmp_path: Path) -> None:
    now = [0.0]
    writer = HeadWriter(tmp_path, clock=lambda: now[0])
    for sequence, seconds in ((1, 0.0), (2, 0.4), (3, 0.9), (4, 1.0), (5, 1.1), (6, 1.2)):
        now[0] = seconds
        writer.write(LogHead(sequence, 9))
        assert read_head(tmp_path) == LogHead(sequence, 9), "every write is seen at once"
    data = bytearray((tmp_path / HEAD).read_bytes())
    newer = max((0, 512), key=lambda slot: data[slot + 8])
    data[newer : newer + 512] = bytes(512)  # a power cut
    (tmp_path / HEAD).write_bytes(data)
    assert read_head(tmp_path) == LogHead(4, 9)
    with HeadWriter(tmp_path) as again:
        again.write(LogHead(7, 9))
    assert read_head(tmp_path) == LogHead(7, 9)


def test_the_head_is_synced_once_a_second_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    now = [0.0]
    with HeadWriter(tmp_path, clock=lambda: now[0]) as writer:
        for sequence in range(1, 26):
            writer.write(LogHead(sequence, 0))
            now[0] += 0.1
        assert len(synced) == 3
    assert len(synced) == 4


def test_an_altered_head_is_refused(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "log" / HEAD).write_bytes(b"x" * 1024)
    with pytest.raises(CorruptFileError, match=HEAD):
        find_restore_point(tmp_path)
    with pytest.raises(CorruptFileError, match=HEAD):
        ChangeLog(tmp_path / "log", [])


def test_another_segment_in_the_place_of_the_last_one_is_refused(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    a_run(ours)
    a_run(theirs)
    segment(ours, 1).unlink()
    segment(theirs, COMMITS).replace(segment(ours, COMMITS))
    with pytest.raises(MonolithError):
        find_restore_point(ours)


@pytest.mark.parametrize("lost", range(2, COMMITS + 1))
def test_a_server_goes_back_on_purpose_and_once(tmp_path: Path, lost: int, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(COMMITS):
        with ParameterServer(ServerConfig(folder=tmp_path, log_flush_secs=0)) as server:
            server._dispatcher.commit()
    segment(tmp_path, lost).unlink()
    config = ServerConfig(folder=tmp_path, log_flush_secs=0, restore_to=f"sequence={lost - 1}")
    with caplog.at_level(logging.WARNING), ParameterServer(config):
        assert f"went back to sequence={lost - 1}" in caplog.text
    assert LogReader(tmp_path / "log").newest == COMMITS + 1
    caplog.clear()
    with ParameterServer(config) as server:  # started again by a supervisor, with the same command line
        server._dispatcher.commit()
        assert "went back" not in caplog.text
    with ParameterServer(ServerConfig(folder=tmp_path)) as server:
        assert server._dispatcher._restored == COMMITS + 2
