"""Danger: an index that leads to the wrong record, or a stream that has to be read from its beginning to find one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from monolith.streams import FolderStream, create_folder_stream
from monolith.streams.folder.segments import SegmentFile

COUNT = 3000


@pytest.fixture
def stream(tmp_path: Path) -> FolderStream:
    """Three segments of about 20 index entries, with timestamps that go back now and then."""
    create_folder_stream(tmp_path / "events", 1, {"segment_bytes": str(1300 << 10)})
    found = FolderStream(tmp_path / "events")
    for begin in range(0, COUNT, 1000):
        # Several writers continue the same index.
        with found.writer() as writer:
            for number in range(begin, begin + 1000):
                writer.append(b"%d" % number * 250, timestamp=time_of(number))
                if number % 10 == 0:
                    writer.flush()
    assert len(list((tmp_path / "events" / "0").glob("*.segment"))) == 3
    return found


def time_of(number: int) -> int:
    return 10_000_000 + 100 * (number - 150 * (number % 50 == 0))


def indexes(stream: FolderStream) -> list[Path]:
    return sorted((Path(stream.url) / "0").glob("*.index"))


def check(stream: FolderStream) -> None:
    """Offsets and times are found, by an oracle that knows all records."""
    times = [time_of(number) for number in range(COUNT)]
    chance = random.Random(1)
    with stream.reader() as reader:
        for offset in [0, 1, COUNT - 1, *(chance.randrange(COUNT) for _ in range(40))]:
            reader.assign({"events/0": offset})
            (records,) = reader.poll(1, 60)
            assert (list(records.offsets), records.values[0]) == ([offset], b"%d" % offset * 250)
            wanted = times[offset] + chance.randrange(-60, 60)
            expected = next((n for n, when in enumerate(times) if when >= wanted), COUNT)
            assert stream.first_offset_at(wanted) == {"events/0": expected}
    assert stream.bounds() == {"events/0": (0, COUNT)}
    last = stream.last("events/0")
    assert last is not None
    assert list(last.offsets) == [COUNT - 1]


def test_records_are_found_without_looking_at_all(stream: FolderStream, monkeypatch: pytest.MonkeyPatch) -> None:
    check(stream)
    looked: list[int] = []
    batch_at = SegmentFile.batch_at
    monkeypatch.setattr(SegmentFile, "batch_at", lambda self, at: looked.append(at) or batch_at(self, at))
    with stream.reader() as reader:
        reader.assign({"events/0": COUNT - 20})
    assert len(looked) < 25
    looked.clear()
    stream.first_offset_at(time_of(COUNT - 20))
    assert len(looked) < 60


@pytest.mark.parametrize("damage", ["removed", "empty", "cut", "zeros", "scrambled", "of another segment"])
def test_a_damaged_index_changes_nothing(stream: FolderStream, damage: str) -> None:
    paths = indexes(stream)
    assert len(paths) == 3
    contents = [path.read_bytes() for path in paths]
    for path, content, other in zip(paths, contents, contents[1:] + contents[:1], strict=True):
        chance = random.Random(2)
        if damage == "removed":
            path.unlink()
            continue
        scrambled = bytearray(content)
        for _ in range(20):
            scrambled[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(
            {
                "empty": b"",
                "cut": content[:-7],
                "zeros": bytes(len(content)),
                "scrambled": bytes(scrambled),
                "of another segment": other,
            }[damage]
        )
    check(stream)


def test_a_writer_continues_an_index_that_was_cut(stream: FolderStream) -> None:
    path = indexes(stream)[-1]
    size = path.stat().st_size
    os.truncate(path, size - 7)
    with stream.writer() as writer:
        for _ in range(100):
            writer.append(b"x" * 2000, timestamp=time_of(COUNT + 1))
    assert path.stat().st_size % 32 == 0
    assert stream.first_offset_at(time_of(COUNT + 1)) == {"events/0": COUNT}


def test_an_entry_of_a_batch_that_is_being_written_hides_no_record(tmp_path: Path) -> None:
    create_folder_stream(tmp_path / "events", 1, {"segment_bytes": str(1 << 20)})
    stream = FolderStream(tmp_path / "events")
    with stream.writer() as writer:
        for number in range(5):  # each batch is long enough for an entry of its own
            writer.append(b"%d" % number * 70_000)
            writer.flush()
    (segment,) = (tmp_path / "events" / "0").glob("*.segment")
    *_, (last, _), _ = SegmentFile(segment.parent, 0).walk()  # behind it is the mark of the writer that closed it
    os.truncate(segment, last + 100)
    assert stream.bounds() == {"events/0": (0, 4)}
    found = stream.last("events/0")
    assert found is not None
    assert list(found.offsets) == [3]
    with stream.reader() as reader:
        reader.assign({"events/0": 4})
        assert reader.poll(1, 0) == []
        assert reader.ends() == {"events/0": 4}


def test_the_last_record_is_found_before_a_batch_that_is_not_whole(tmp_path: Path) -> None:
    create_folder_stream(tmp_path / "events", 1)
    stream = FolderStream(tmp_path / "events")
    with stream.writer() as writer:
        for number in range(3):
            writer.append(b"%d" % number * 70_000)
            writer.flush()
    (segment,) = (tmp_path / "events" / "0").glob("*.segment")
    *_, (last, header), _ = SegmentFile(segment.parent, 0).walk()
    with segment.open("r+b") as file:  # as long as it will be, but for the system still on its way
        file.seek(last + header.size - 10_000)
        file.write(bytes(10_000))
        file.truncate()
    found = stream.last("events/0")
    assert found is not None
    assert list(found.offsets) == [1]
