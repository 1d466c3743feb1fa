"""Danger: a stream in a folder that loses flushed records, gives torn ones, or gives an offset to two records, when its writer is
killed, its disk fails or the power is cut.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_shim import Disk, DiskShim, Nursery, Op, read_journal, write_image
from jobs.stream_writer import SETTINGS, number_of

import monolith.streams.folder.partition
import monolith.streams.folder.segments
from monolith.streams import FolderStream, StreamReader, open_stream


@pytest.fixture(scope="module")
def writers(shim_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(shim_library, "jobs.stream_writer", tmp_path_factory.mktemp("nursery")) as made:
        yield made


def flushed(lines: list[str]) -> int:
    """The last number that was reported as stored, -1 if none was."""
    return max((int(line.split()[1]) for line in lines if line.startswith(("flushed", "closed"))), default=-1)


def new_records(reader: StreamReader) -> tuple[list[int], list[int]]:
    """Numbers and offsets of all records that have come."""
    numbers, offsets = list[int](), list[int]()
    while got := reader.poll(100, 0):
        for records in got:
            numbers += [number_of(value) for value in records.values]
            offsets += records.offsets
    return numbers, offsets


def all_records(stream: FolderStream) -> tuple[list[int], list[int]]:
    with stream.reader() as reader:
        reader.assign({stream.partitions()[0]: "start"})
        return new_records(reader)


class Campaign:
    """Writers in one folder after the other, while a reader follows them all."""

    def __init__(self, writers: Nursery, library: Path, folder: Path) -> None:
        self.writers, self.library, self.folder = writers, library, folder
        self.stream = open_stream(folder / "events", partitions=1, settings=SETTINGS)
        assert isinstance(self.stream, FolderStream)
        self.reader = self.stream.reader()
        self.reader.assign({"events/0": "start"})
        self.stored, self.faults, self.seen = -1, 0, 0

    def life(self, count: int, seed: int, **faults: int) -> None:
        shim = DiskShim(library=self.library, root=self.folder, seed=seed, **faults)
        ended = self.writers.run(shim, str(self.folder / "events"), str(count), str(seed))
        assert ended.returncode in (0, -9), ended.stderr
        self.faults += ended.faults
        self.stored = max(self.stored, flushed(ended.stdout))
        numbers, offsets = new_records(self.reader)
        # Each record once and in order, whoever has written it and however that ended.
        assert numbers == list(range(self.seen, self.seen + len(numbers)))
        assert offsets == sorted(set(offsets))
        self.seen += len(numbers)
        assert self.seen > self.stored
        found, at = all_records(self.stream)
        assert found == list(range(self.seen))
        assert at == sorted(set(at))


def test_a_writer_killed_at_any_change_of_the_disk(writers: Nursery, shim_library: Path, tmp_path: Path) -> None:
    campaign, chance = Campaign(writers, shim_library, tmp_path), random.Random(1)
    for seed in range(60):
        campaign.life(60, seed, kill_at=chance.randrange(1, 40))
    campaign.life(60, 99)
    assert campaign.stored == campaign.seen - 1 > 300


def test_a_disk_that_fails_now_and_then(writers: Nursery, shim_library: Path, tmp_path: Path) -> None:
    campaign = Campaign(writers, shim_library, tmp_path)
    for seed in range(50):
        campaign.life(60, seed, one_in=(12, 40)[seed % 2])
    campaign.life(60, 99)
    assert campaign.stored == campaign.seen - 1 > 300
    assert campaign.faults > 20


@pytest.fixture
def after_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs after another start of the system than the one in which the files were written."""
    for module in (monolith.streams.folder.segments, monolith.streams.folder.partition):
        monkeypatch.setattr(module, "boot_id", lambda: b"another start...")


def power_cuts(folder: Path, images: int, seed: int) -> Iterator[tuple[Disk, int, int]]:
    """The disk at some moments of the journal, with a seed for what is left of it and the last number that was flushed."""
    records = list(read_journal(folder.parent / "journal"))
    moments = [n for n, record in enumerate(records) if record.op not in (Op.CLOSE, Op.OPEN, Op.MARK)]
    chosen = set(random.Random(seed).sample(moments, min(images, len(moments))))
    disk = Disk()
    for number, record in enumerate(records):
        disk.apply(record)
        if number in chosen:
            yield disk, number, flushed(disk.marks())


def test_a_power_cut_loses_nothing_flushed_and_gives_no_offset_twice(
    writers: Nursery, shim_library: Path, tmp_path: Path, after_the_cut: None, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    shim = DiskShim(library=shim_library, root=root, journal=tmp_path / "journal")
    ended = writers.run(shim, str(root / "events"), "250", "5")
    assert ended.returncode == 0, ended.stderr
    cuts, lost, skipped = 0, 0, 0
    for disk, seed, stored in power_cuts(root, images=90, seed=3):
        here = tmp_path / str(seed)
        write_image(disk.contents(), here / "before")
        write_image(disk.image(seed), here / "after")
        if not (here / "after" / "events" / "stream.json").exists():
            assert stored == -1
            continue
        cuts += 1
        # What a reader may have seen, and trained, before the power was cut.
        seen, offsets = all_records(FolderStream(here / "before" / "events"))
        next_offset = offsets[-1] + 1 if offsets else 0
        stream = FolderStream(here / "after" / "events")
        left, _ = all_records(stream)
        assert left == list(range(len(left)))
        assert len(left) > stored
        lost += len(left) < len(seen)
        with stream.reader() as reader:
            # It may continue before anybody writes, and after.
            reader.assign({"events/0": next_offset})
            assert reader.poll(10, 0) == []
            with stream.writer() as writer:
                writer.append(b"first")
                writer.flush()
                (records,) = reader.poll(10, 60)
                assert list(records.values) == [b"first"]
                assert records.offsets[0] >= next_offset
                skipped += records.offsets[0] > next_offset
        with stream.reader() as reader:
            reader.assign({"events/0": next_offset})
            assert [list(records.values) for records in reader.poll(10, 60)] == [[b"first"]]
            reader.assign({"events/0": "start"})
            got = [value for records in reader.poll(1000, 60) for value in records.values]
            assert got == [*got[:-1], b"first"]
            assert [number_of(value) for value in got[:-1]] == left
    assert cuts > 60
    # The cuts were real ones.
    assert lost > 5
    assert skipped > 5
    assert "may be lost" in caplog.text.replace("\n", " ")
