"""Danger: a stream without a broker that loses, repeats or reorders records, or that two writers write into at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monolith.errors import ConfigError, ForkedProcessError, InvalidArgumentError, StorageError
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


def written(stream: FolderStream, count: int, size: int = 3000) -> None:
    with stream.writer() as writer:
        for number in range(count):
            writer.append(b"%d" % number * size, partition=0)
            writer.flush()


def test_retention_by_size_removes_the_oldest_files_and_keeps_the_newest(tmp_path: Path) -> None:
    stream = stream_at(tmp_path, segment_bytes="4096", retention_bytes="40000")
    written(stream, 60)
    start, end = stream.bounds()["events/0"]
    assert end == 60
    assert 60 - start < 16
    assert sum(stream.sizes().values()) < 60_000
    # It is a setting of the stream, and holds for writers that do not give it.
    written(FolderStream(tmp_path / "events"), 60)
    assert sum(stream.sizes().values()) < 60_000


def test_retention_by_age_removes_files_that_were_written_long_ago(tmp_path: Path) -> None:
    stream = stream_at(tmp_path, segment_bytes="4096", retention_secs="3600")
    written(stream, 20)
    assert stream.bounds()["events/0"] == (0, 20)
    segments = sorted((tmp_path / "events" / "0").glob("*.segment"))
    for path in segments[:3]:
        os.utime(path, (1_000_000, 1_000_000))
    written(stream, 4)
    assert stream.bounds()["events/0"][0] == int(segments[3].stem)


def test_many_small_appends_make_one_file(tmp_path: Path) -> None:
    stream = stream_at(tmp_path)
    for number in range(30):
        with stream.writer() as writer:
            writer.append(b"%d" % number)
            writer.flush()
    assert len(list((tmp_path / "events" / "0").iterdir())) == 2, "a segment and a lock"
    assert stream.bounds() == {"events/0": (0, 30)}


def test_partitions_that_are_added_are_seen_at_once(tmp_path: Path) -> None:
    stream = stream_at(tmp_path)
    with stream.reader() as reader:
        FolderStream(tmp_path / "events").add_partitions(2)
        assert stream.partitions() == ["events/0", "events/1", "events/2"]
        reader.assign({"events/2": "start"})
        with stream.writer(partitions=[2]) as writer:
            writer.append(b"x")
            assert [list(records.values) for records in reader.poll(1, 60)] == [[b"x"]]
    with pytest.raises(InvalidArgumentError, match="exists with 3, fewer than 4"):
        open_stream(tmp_path / "events", partitions=4)
    assert len(open_stream(tmp_path / "events", partitions=2).partitions()) == 3


def test_partitions_are_sorted_by_number(tmp_path: Path) -> None:
    assert stream_at(tmp_path, partitions=12).partitions() == [f"events/{number}" for number in range(12)]


def test_a_stream_without_fsync_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream_at(tmp_path, fsync="false").writer().close()
    assert "fsync is off" in caplog.text


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="retention_byte"):
        stream_at(tmp_path, retention_byte="5")
    assert not (tmp_path / "events").exists()


def test_a_folder_with_other_files_is_not_made_a_stream(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a").write_text("x")
    with pytest.raises(StorageError, match="cannot be made there"):
        stream_at(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["events"]


def test_urls_of_folders_and_what_is_none(tmp_path: Path) -> None:
    stream_at(tmp_path)
    for url in (f"{tmp_path}/events", f"stream:{tmp_path}/events", f"file://{tmp_path}/events", tmp_path / "events"):
        assert open_stream(url).partitions() == ["events/0"]
    with pytest.raises(InvalidArgumentError, match="on a local disk"):
        open_stream("s3://bucket/events")


def test_a_forked_child_neither_writes_nor_holds_the_partition(tmp_path: Path) -> None:
    stream = stream_at(tmp_path)
    writer = stream.writer()
    writer.append(b"parent")
    writer.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            writer.flush(5)
        except ForkedProcessError:
            code = 0
        finally:
            # Without ending the threads and files of the test.
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.append(b"still")
    writer.close()
    assert stream.bounds() == {"events/0": (0, 2)}


def test_a_record_above_the_limit_is_refused(tmp_path: Path) -> None:
    with stream_at(tmp_path).writer() as writer:
        with pytest.raises(InvalidArgumentError, match="at most 67,108,864 bytes"):
            writer.append(b"x" * (64 << 20), key=b"k")
        writer.append(b"small")
        writer.flush()


def test_a_closed_writer_refuses(tmp_path: Path) -> None:
    writer = stream_at(tmp_path).writer()
    writer.close()
    with pytest.raises(InvalidArgumentError, match="append: the writer is closed"):
        writer.append(b"x")
    with pytest.raises(InvalidArgumentError, match="flush: the writer is closed"):
        writer.flush()


def test_records_that_a_process_leaves_behind_are_counted(tmp_path: Path) -> None:
    stream_at(tmp_path, linger_ms="1000")
    script = (
        "import sys; from monolith.streams import open_stream\n"
        "writer = open_stream(sys.argv[1], settings={'linger_ms': '1000'}).writer()\n"
        "[writer.append(b'x') for _ in range(3)]"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "events")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0
    assert "3 records that were appended are not written" in ended.stderr
