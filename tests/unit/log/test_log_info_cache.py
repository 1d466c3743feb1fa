"""Danger: a header that is remembered although its file became another one, or one that is parsed again for every walk over a
chain of thousands, in a thread that runs while the model trains.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from log_tables import new_table, train
from monolith import CorruptFileError, LogGapError
from monolith.log import ChangeLog, LogReader, LogSegment
from monolith.log import reader as module
from monolith.log.segment_format import segment_name


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Two segments that were written long ago."""
    table = new_table()
    with ChangeLog(tmp_path, [table]) as log:
        for step in (1, 2):
            train(table, [step])
            log.commit(step=step)
            os.utime(tmp_path / segment_name(step), (1000, 1000))
    return tmp_path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def counting(path: Path) -> LogSegment:
        names.append(path.name)
        return LogSegment(path)

    monkeypatch.setattr(module, "LogSegment", counting)
    return names


def test_a_reader_opens_a_segment_once(old: Path, opened: list[str]) -> None:
    reader = LogReader(old)
    first = reader.chain(2)
    assert reader.chain(2) == first
    assert sorted(opened) == [segment_name(1), segment_name(2)]
    assert first == [LogSegment(info.path).info for info in first]
    assert first[0].tables[0].meta.config is first[1].tables[0].meta.config


def test_a_reader_trusts_no_other_reader(old: Path, opened: list[str]) -> None:
    for _ in range(3):
        LogReader(old).info(1)
    assert len(opened) == 3


def test_what_a_writer_has_written_is_not_read_back(tmp_path: Path, opened: list[str]) -> None:
    reader, table = LogReader(tmp_path), new_table()
    with ChangeLog(tmp_path, [table], reader=reader) as log:
        for step in (1, 2):
            train(table, [step])
            log.commit(step=step)
        written = reader.chain(2)
    assert not opened
    assert written == LogReader(tmp_path).chain(2)


def test_headers_of_pruned_segments_are_forgotten(old: Path) -> None:
    reader = LogReader(old)
    reader.chain(2)
    (old / segment_name(1)).unlink()
    reader.sequences()
    assert list(reader._infos) == [2]


@pytest.mark.parametrize("change", ["time", "size", "file"])
def test_a_file_that_became_another_is_read_again(old: Path, change: str) -> None:
    reader, path = LogReader(old), old / segment_name(1)
    reader.info(1)
    data = path.read_bytes()
    if change == "file":
        path.rename(old / "kept")  # so that its inode is not used again
    path.write_bytes(data[: -1 if change == "size" else -2] + (b"" if change == "size" else b"xx"))
    os.utime(path, (1000, 1000 if change != "time" else 1001))
    with pytest.raises(CorruptFileError):
        reader.info(1)


def test_a_removed_file_is_gone(old: Path) -> None:
    reader = LogReader(old)
    reader.info(1)
    (old / segment_name(1)).unlink()
    with pytest.raises(LogGapError):
        reader.info(1)
