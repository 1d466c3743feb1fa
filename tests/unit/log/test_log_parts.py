"""Danger: a cut of a run names segments of other processes that were never written, or is forgotten by a reader."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from monolith.errors import StorageError
from monolith.log import ChangeLog, Flusher, LogReader
from monolith.log.change_log import Parts
from monolith.table.table_file import FileEntry

PARTS = tuple(FileEntry(name=f"ps/{n}/log/1.segment", size=n, checksum="crc32c:00000001") for n in (0, 1))


def test_a_segment_names_its_parts(tmp_path: Path) -> None:
    with ChangeLog(tmp_path, []) as log:
        log.commit_in_background(step=1, parts=lambda: PARTS).result()
        log.commit(step=2)
    assert [info.parts for info in LogReader(tmp_path).segments()] == [PARTS, ()]


def test_nothing_is_written_before_the_parts_are(tmp_path: Path) -> None:
    written = Event()

    def parts() -> tuple[FileEntry, ...]:
        assert written.wait(20)
        return PARTS

    with ChangeLog(tmp_path, []) as log:
        commit = log.commit_in_background(step=1, parts=parts)
        assert log.busy
        assert LogReader(tmp_path).sequences() == []
        written.set()
        assert commit.result() == 1


def test_without_a_part_there_is_no_segment(tmp_path: Path) -> None:
    def parts() -> tuple[FileEntry, ...]:
        raise StorageError("rank 1: the disk is full")

    with ChangeLog(tmp_path, []) as log:
        with pytest.raises(StorageError, match="rank 1: the disk is full"):
            log.commit_in_background(step=1, parts=parts).result()
        log.commit(step=2)
    assert [info.step for info in LogReader(tmp_path).segments()] == [2]


def test_a_flusher_asks_for_parts_once_an_interval_and_only_after_a_step(tmp_path: Path) -> None:
    now, asked = [0.0], list[float]()

    def begin_parts() -> Parts | None:
        asked.append(now[0])
        return None if len(asked) < 2 else (lambda: PARTS)

    with ChangeLog(tmp_path, []) as log:
        flusher = Flusher(log, every_secs=1.0, clock=lambda: now[0])
        for time, step in [(0.5, 1), (1.0, 1), (1.5, 2), (2.0, 2), (3.0, 2), (3.5, 3), (4.0, 3)]:
            now[0] = time
            if (begun := flusher.poll(step=step, begin_parts=begin_parts)) is not None:
                begun.result()
    assert asked == [1.0, 2.0, 3.5]
    assert [info.step for info in LogReader(tmp_path).segments()] == [2, 3]
