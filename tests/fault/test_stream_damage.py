"""Danger: a flipped bit or hostile length that crashes the reader of a stream, gives wrong records, or goes unnoticed."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from jobs.stream_writer import number_of, value_of

import monolith.streams.folder.reader
from monolith import _core
from monolith.errors import CorruptFileError, StreamGapError
from monolith.streams import FolderStream, create_folder_stream
from monolith.streams.folder.format import (
    BATCH_HEADER,
    SEGMENT_HEADER,
    BatchHeader,
    Columns,
    decode_batch,
    encode_batch,
)
from monolith.streams.folder.segments import SegmentFile
from monolith.testing import bit_flips, scrambles, truncations


@pytest.fixture
def stream(tmp_path: Path) -> FolderStream:
    """Sixty records in several segments, closed."""
    create_folder_stream(tmp_path / "events", 1, {"segment_bytes": "4096"})
    found = FolderStream(tmp_path / "events")
    with found.writer() as writer:
        for number in range(60):
            writer.append(value_of(number), key=b"k" if number % 3 else None, headers=(("n", b"%d" % number),))
            if number % 4 == 0:
                writer.flush()
    return found


def segments(stream: FolderStream) -> list[Path]:
    return sorted((Path(stream.url) / "0").glob("*.segment"))


def numbers_before_the_damage(stream: FolderStream) -> list[int]:
    found = list[int]()
    read_into(found, stream)
    return found


def read_into(found: list[int], stream: FolderStream) -> None:
    """Read until the damage is named, or until the end."""
    with stream.reader() as reader:
        reader.assign({"events/0": "start"})
        # A second look, as damage may be a batch that is just being written.
        for _ in range(4):
            while got := reader.poll(7, 0):
                found += [number_of(value) for records in got for value in records.values]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monolith.streams.folder.reader, "_PATIENCE_SECS", -1.0)


def test_every_flipped_bit_is_named_with_file_and_place(stream: FolderStream) -> None:
    paths = segments(stream)
    assert len(paths) > 2
    for path in (paths[1], paths[-1]):
        sound = path.read_bytes()
        for what, data in bit_flips(sound, count=120, seed=1):
            path.write_bytes(data)
            with pytest.raises(CorruptFileError, match=rf"{path.name}: .*") as raised:
                numbers_before_the_damage(stream)
            assert (
                "damaged" in str(raised.value) or "version" in str(raised.value) or "not a segment" in str(raised.value)
            ), what
        path.write_bytes(sound)
    assert numbers_before_the_damage(stream) == list(range(60))


def test_larger_accidents_never_give_wrong_records(stream: FolderStream) -> None:
    path = segments(stream)[1]
    sound = path.read_bytes()
    for what, data in [*scrambles(sound, count=100, seed=2), *truncations(sound, count=50, seed=3)]:
        path.write_bytes(data)
        found = list[int]()
        with pytest.raises((CorruptFileError, StreamGapError)):
            read_into(found, stream)
        assert found == list(range(len(found))), what


def test_a_writer_does_not_cut_off_what_had_been_on_disk(tmp_path: Path) -> None:
    create_folder_stream(tmp_path / "large", 1)
    stream = FolderStream(tmp_path / "large")
    with stream.writer() as writer:
        for number in range(5):
            writer.append(value_of(number))
            writer.flush()
    (path,) = segments(stream)
    segment = SegmentFile(path.parent, int(path.stem))
    places = [at for at, header in segment.walk() if header.count]
    segment.close()
    assert len(places) > 1
    data = bytearray(path.read_bytes())
    data[places[0] + BATCH_HEADER] ^= 1
    # Without the mark of a writer that closed it.
    path.write_bytes(data[:-BATCH_HEADER])
    with pytest.raises(
        CorruptFileError, match=rf"{path.name}: the batch at byte {places[0]} .*had been on disk before"
    ):
        stream.writer()
    assert path.read_bytes() == data[:-BATCH_HEADER]


def resealed(header: bytes, body: bytes, **fields: int) -> bytes:
    """A batch with these values in its header, and the right checksums."""
    names = (
        "magic",
        "crc",
        "body_crc",
        "size",
        "count",
        "flags",
        "first",
        "oldest",
        "newest",
        "durable",
        "values",
        "keys",
    )
    layout = struct.Struct("<4sIIIIIqqqQII")
    given = dict(zip(names, layout.unpack(header), strict=True)) | {"body_crc": _core.crc32c(body)} | fields
    packed = layout.pack(*given.values())
    return packed[:4] + struct.pack("<I", _core.crc32c(packed[8:])) + packed[8:] + body


def decoded(header: BatchHeader, data: bytes) -> Columns | None:
    """The records, or None if they are refused in the way that is promised."""
    try:
        return decode_batch(header, data, 0, "test")
    except CorruptFileError:
        return None


def test_hostile_lengths_with_right_checksums_are_refused() -> None:
    records = [(value_of(n), b"k" if n % 3 else None, n, (("n", b"%d" % n),) if n % 2 else ()) for n in range(20)]
    batch = encode_batch(records, 5, SEGMENT_HEADER)
    head, body = batch[:BATCH_HEADER], batch[BATCH_HEADER:]
    chance = random.Random(4)
    refused = 0
    for _ in range(3000):
        changed = bytearray(body)
        fields: dict[str, int] = {}
        if chance.random() < 0.5:
            # A length becomes another number.
            at = 4 * chance.randrange(20 * 20 // 4)
            changed[at : at + 4] = struct.pack(
                "<I", chance.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, chance.randrange(2**32)])
            )
        else:
            name = chance.choice(["count", "flags", "values", "keys", "size"])
            fields[name] = chance.choice([0, 1, 3, 7, 19, 21, len(batch), len(batch) - 1, 2**31, 2**32 - 1])
        hostile = resealed(head, bytes(changed), **fields)
        header = BatchHeader.unpack(hostile)
        if header is None or not header.body_is_sound(hostile):
            refused += 1
            continue
        columns = decoded(header, hostile)
        if columns is None:
            refused += 1
        else:
            assert len(columns.values) == len(columns.keys) == len(columns.timestamps) == header.count
            assert sum(map(len, columns.values)) <= len(hostile)
    assert refused > 1000


def test_segments_of_another_stream_are_refused(stream: FolderStream, tmp_path: Path) -> None:
    create_folder_stream(tmp_path / "other", 1)
    path = segments(stream)[0]
    (tmp_path / "other" / "0" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CorruptFileError, match="belongs to another stream"):
        FolderStream(tmp_path / "other").writer()
    path.rename(path.with_name("00000000000000000001.segment"))
    with pytest.raises(CorruptFileError, match="it was renamed"):
        numbers_before_the_damage(stream)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"format": "monolith-stream"}',
        b"\xff",
        b'{"format":"monolith-stream","version":2,"id":"00","settings":{}}',
    ],
)
def test_a_damaged_description_is_named(stream: FolderStream, content: bytes) -> None:
    (Path(stream.url) / "stream.json").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"stream\.json"):
        FolderStream(stream.url)
