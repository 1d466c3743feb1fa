"""Danger: a record that is lost, repeated or out of order on its way through a stream, or whose parts are changed."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest

from monolith.errors import InvalidArgumentError
from monolith.streams import Headers
from stream_kinds import StreamKind, offsets, read, values


def test_each_partition_gives_its_records_once_and_in_order(kind: StreamKind) -> None:
    stream = kind.new(partitions=3)
    with stream.writer() as writer, stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        for number in range(3000):
            writer.append(b"%d" % number, partition=number % 3)
        writer.flush()
        found = read(reader, 3000, max_records=170)
    assert {name: values(parts) for name, parts in found.items()} == {
        name: [b"%d" % number for number in range(part, 3000, 3)] for part, name in enumerate(stream.partitions())
    }
    for parts in found.values():
        at = offsets(parts)
        assert at == sorted(set(at))
        for records, following in pairwise(parts):
            assert records.offsets[-1] < records.next_offset <= following.offsets[0]


def test_key_timestamp_and_headers_travel_with_the_value(kind: StreamKind) -> None:
    written: list[tuple[bytes, bytes | None, int, Headers]] = [
        (b"plain", None, 1_700_000_000_001, ()),
        (b"", b"", 1_700_000_000_000, ()),
        (b"\x00\xff" * 9, b"\x00key", 1_800_000_000_000, (("origin", b"\x00\x01"), ("origin", b""), ("\u00fc", b"x"))),
        (b"end", b"k", 5, (("a", b"b"),)),
    ]
    stream = kind.new()
    with stream.writer() as writer, stream.reader() as reader:
        (name,) = stream.partitions()
        reader.assign({name: "start"})
        for value, key, timestamp, headers in written:
            writer.append(value, key=key, timestamp=timestamp, headers=headers)
        writer.flush()
        found = [
            (value, key, timestamp, headers)
            for records in read(reader, len(written))[name]
            for value, key, timestamp, headers in zip(
                records.values,
                records.keys,
                records.timestamps,
                records.headers or [()] * len(records),
                strict=True,
            )
        ]
    assert found == written


def test_records_without_a_timestamp_have_the_time_of_writing(kind: StreamKind) -> None:
    stream = kind.new()
    with stream.writer() as writer, stream.reader() as reader:
        (name,) = stream.partitions()
        reader.assign({name: "start"})
        writer.append(b"a")
        writer.append(b"b")
        writer.flush()
        (first, second) = [when for records in read(reader, 2)[name] for when in records.timestamps]
    assert 1_700_000_000_000 < first <= second


def test_records_of_a_key_are_in_one_partition_and_the_others_are_divided(kind: StreamKind) -> None:
    stream = kind.new(partitions=4)
    keys = [b"user %d" % number for number in range(40)]
    with stream.writer() as writer, stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        for key in keys * 3:
            writer.append(key, key=key)
        for _ in range(40):
            writer.append(b"none")
        writer.flush()
        found = {name: values(parts) for name, parts in read(reader, 160).items()}
    # The same partition in every kind, so a stream can be moved from one to another.
    topic = stream.partitions()[0].rpartition("/")[0]
    for key in keys:
        assert found[f"{topic}/{zlib.crc32(key) % 4}"].count(key) == 3
    assert {name: got.count(b"none") for name, got in found.items()} == dict.fromkeys(stream.partitions(), 10)


def test_a_writer_of_some_partitions_writes_into_no_others(kind: StreamKind) -> None:
    stream = kind.new(partitions=3)
    names = stream.partitions()
    with stream.writer(partitions=[2, 0]) as writer:
        for number in range(20):
            writer.append(b"x", key=b"%d" % number)
        writer.append(b"y")
    assert stream.last(names[1]) is None
    assert stream.last(names[0]) is not None
    with pytest.raises(InvalidArgumentError, match="partitions: expected some of 0 to 2"):
        stream.writer(partitions=[3])


def test_a_large_record_is_read_whole(kind: StreamKind) -> None:
    stream = kind.new()
    large = bytes(range(256)) * (4000 if kind.name == "kafka" else 20_000)
    if kind.name == "kafka":
        large = large[:900_000]
    with stream.writer() as writer, stream.reader() as reader:
        (name,) = stream.partitions()
        reader.assign({name: "start"})
        for value in (b"before", large, b"after"):
            writer.append(value)
        writer.flush()
        assert values(read(reader, 3)[name]) == [b"before", large, b"after"]
