"""Danger: a change that is lost because the disk was full while it was written, or a half-written segment that passes for one.
Every write, fsync and rename of a commit fails in turn.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from comparison import int64, snapshot
from log_tables import new_table, rebuilt, train
from monolith import ConfigError, InvalidArgumentError, StorageError
from monolith.log import ChangeLog, LogReader
from monolith.log.commit import UnwrittenChanges, write_segment
from monolith.log.segment_format import SegmentMeta, TableMeta, TableStateMeta, segment_name

CALLS = ["open", "writev", "fsync", "close", "rename"]


class FailingDisk:
    """Lets the nth call of `name` on a segment or its folder fail with `code`, and counts calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int = errno.ENOSPC) -> None:
        self.calls, self._nth, self._code = 0, nth, code
        self._monkeypatch = monkeypatch
        home, attribute = (Path, "rename") if name == "rename" else (os, name)
        original = getattr(home, attribute)

        def failing(*arguments: object, **others: object) -> object:
            self.calls += 1
            if self.calls == self._nth:
                if name == "close":
                    original(*arguments, **others)
                raise OSError(self._code, os.strerror(self._code))
            return original(*arguments, **others)

        monkeypatch.setattr(home, attribute, failing)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("writer.lock", "head"))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_lost_when_a_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, background: bool
) -> None:
    table, failed, nth = new_table(), 0, 0
    log = ChangeLog(tmp_path, [table])
    train(table, range(20))
    table.erase(int64([3]))
    last = log.commit(step=0)
    while failed == nth:
        nth += 1
        train(table, range(nth, nth + 5), step=nth)
        table.erase(int64([nth]))
        before = leftovers(tmp_path)
        with monkeypatch.context() as patch:
            FailingDisk(patch, call, nth, code)
            try:
                last = log.commit_in_background(step=nth).result() if background else log.commit(step=nth)
                continue
            except StorageError as error:
                message = str(error)
        failed += 1
        assert os.strerror(code) in message
        assert leftovers(tmp_path) == before
        assert log.sequence == last
    assert failed >= 1
    log.close()
    assert snapshot(rebuilt(tmp_path, last)) == snapshot(table)
    reader = LogReader(tmp_path)
    assert [verdict.error for verdict in reader.verify()] == [None] * len(reader.sequences())
    # A number whose file may have been seen is not given to another one.
    assert last == 1 + failed + 1


def test_a_segment_is_durable_before_it_appears_and_its_name_before_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, done, fsync, rename = ChangeLog(tmp_path, []), [], os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        what = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        done.append((f"fsync {what}", os.fstat(descriptor).st_size if what == "file" else len(leftovers(tmp_path))))

    def renamed(path: Path, target: Path) -> Path:
        done.append(("rename", 0))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    log.commit(step=1)
    size = (tmp_path / segment_name(1)).stat().st_size
    assert done == [("fsync file", size), ("rename", 0), ("fsync folder", 1)]
    log.close()


def test_the_folder_is_durable_with_all_that_lead_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    ChangeLog(tmp_path / "a" / "b" / "log", []).close()
    assert set(synced) == {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")}
    # Whoever made the folder may have been killed before it was durable.
    synced.clear()
    ChangeLog(tmp_path / "a" / "b" / "log", []).close()
    assert set(synced) == {str(tmp_path / "a"), str(tmp_path / "a" / "b")}
    monkeypatch.chdir(tmp_path / "a")
    synced.clear()
    ChangeLog("log", []).close()
    assert set(synced) == {str(tmp_path), str(tmp_path / "a")}


def test_a_clock_gone_wrong_changes_nothing(tmp_path: Path) -> None:
    table, times = new_table(), iter([float("nan"), 1.0])
    with ChangeLog(tmp_path, [table], clock=lambda: next(times)) as log:
        train(table, [1])
        with pytest.raises(ConfigError, match="time"):
            log.commit(step=1)
        assert table.changed == 1
        assert log.commit(step=1) == 1


@pytest.mark.parametrize(
    ("rows", "times", "erased"), [((3, 4), 3, (0,)), ((2, 5), 3, (0,)), ((3, 5), 2, (0,)), ((3, 5), 3, (1, 1))]
)
def test_arrays_that_do_not_belong_together_are_not_written(
    tmp_path: Path, rows: tuple[int, int], times: int, erased: tuple[int, ...]
) -> None:
    state = TableStateMeta(max_event_time=0, updates=0, hashnet_scales=())
    table = TableMeta(name="t", config={}, layout="five bytes", row_bytes=5, state=state)
    meta = SegmentMeta(
        sequence=1,
        parent=0,
        parent_checksum=None,
        step=0,
        time=0.0,
        event_time=0,
        kind="rows",
        complete=True,
        has_dense=False,
        has_source=False,
        tables=(table,),
    )
    changes = UnwrittenChanges(
        0, np.arange(3), np.zeros(times, np.uint32), np.zeros(rows, np.uint8), np.zeros(erased, np.int64)
    )
    with pytest.raises(InvalidArgumentError, match=r"expected \[3, 5\]"):
        write_segment(tmp_path, meta, [changes])
    assert leftovers(tmp_path) == []


def test_an_error_beside_the_disk_rolls_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, boom = new_table(), MemoryError("no room")

    def broken(*_: object) -> None:
        raise boom

    with ChangeLog(tmp_path, [table]) as log:
        train(table, [1])
        with monkeypatch.context() as patch:
            patch.setattr("monolith.log.commit._write_piece", broken)
            with pytest.raises(StorageError, match="no room"):
                log.commit(step=1)
        assert table.changed == 1
        assert sorted(rebuilt(tmp_path, log.commit(step=1))) == [1]


def test_an_interrupt_rolls_back_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with ChangeLog(tmp_path, [table]) as log:
        train(table, [1])
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                log.commit(step=1)
        assert leftovers(tmp_path) == []
        assert sorted(rebuilt(tmp_path, log.commit(step=1))) == [1]


def test_when_one_table_cannot_be_cut_the_others_are_not(tmp_path: Path) -> None:
    first, second = new_table("a"), new_table("b")
    with ChangeLog(tmp_path, [first, second]) as log:
        train(first, [1])
        foreign = second.cut_changes()
        with pytest.raises(InvalidArgumentError):
            log.commit(step=1)
        foreign.commit()
        assert LogReader(tmp_path).info(log.commit(step=1)).rows == 1


@pytest.mark.parametrize(
    "arguments", [{"step": -1}, {"step": 1.5}, {"step": 1, "event_time": -1}, {"step": 1, "dense": {"f": print}}]
)
def test_wrong_arguments_change_nothing(tmp_path: Path, arguments: dict) -> None:
    table = new_table()
    with ChangeLog(tmp_path, [table]) as log:
        train(table, [1])
        for commit in (log.commit, log.commit_in_background):
            with pytest.raises(InvalidArgumentError):
                commit(**arguments)
        assert not log.busy
        assert log.commit(step=1) == 1
        assert sorted(rebuilt(tmp_path, 1)) == [1]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    with ChangeLog(tmp_path, []) as log:
        log.commit(step=1)
    stale = tmp_path / f".{segment_name(2)}.0123456789abcdef.unfinished"
    stale.write_bytes(b"half")
    assert LogReader(tmp_path).sequences() == [1]
    ChangeLog(tmp_path, []).close()
    assert leftovers(tmp_path) == [segment_name(1)]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, writev = new_table(), os.writev
    short: Callable[..., int] = lambda descriptor, parts: writev(descriptor, [bytes(parts[0][:5])])  # noqa: E731
    monkeypatch.setattr("os.writev", short)
    with ChangeLog(tmp_path, [table]) as log:
        train(table, range(20))
        sequence = log.commit(step=1, dense={"a": 1})
    assert snapshot(rebuilt(tmp_path, sequence)) == snapshot(table)
    assert LogReader(tmp_path).read(sequence).dense() == {"a": 1}


def test_a_folder_that_cannot_be_made_is_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        ChangeLog(tmp_path / "file", [])


def test_a_closed_log_takes_no_commit(tmp_path: Path) -> None:
    table = new_table()
    log = ChangeLog(tmp_path, [table])
    log.close()
    log.close()
    train(table, [1])
    with pytest.raises(InvalidArgumentError, match="closed"):
        log.commit(step=1)
    assert table.changed == 1
