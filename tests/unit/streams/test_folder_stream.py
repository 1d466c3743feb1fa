"""Danger: a stream without a broker that loses, repeats or reorders records, or that two writers write into at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.errors import InvalidArgumentError, StorageError
from monolith.streams import FolderStream, open_stream


def stream_at(folder: Path, partitions: int = 1, **settings: str) -> FolderStream:
    stream = open_stream(folder / "events", partitions=partitions, settings=settings)
    assert isinstance(stream, FolderStream)
    return stream


def test_records_come_in_order_across_many_files(tmp_path: Path) -> None:
    stream = stream_at(tmp_path, segment_bytes="4096")
    values = [f"{n} {'x' * 50}".encode() for n in range(1000)]
    with stream.writer() as writer:
        for number, value in enumerate(values):
            writer.append(value)
            if number % 37 == 0:
                writer.flush()
    with stream.reader() as reader:
        reader.assign({"events/0": "start"})
        found, offsets = list[bytes](), list[int]()
        while got := reader.poll(64, 0):
            (records,) = got
            found += records.values
            offsets += records.offsets
    assert found == values
    assert offsets == list(range(1000))
    assert len(list((tmp_path / "events" / "0").glob("*.segment"))) > 5


def test_a_second_writer_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    stream = stream_at(tmp_path, partitions=2)
    with (
        stream.writer(partitions=[0]),
        pytest.raises(StorageError, match=r"another writer has this partition.*process"),
    ):
        stream.writer()
    stream.writer().close()


def test_a_missing_stream_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"monolith stream create .* --partitions 4"):
        open_stream(tmp_path / "events")
