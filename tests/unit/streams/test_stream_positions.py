"""Danger: a run that continues at another record than the one after the last it trained, or skips removed ones silently."""

from __future__ import annotations

import time

import pytest

from monolith.errors import InvalidArgumentError, StreamGapError
from monolith.streams import Stream
from stream_kinds import StreamKind, offsets, read, values


def filled(kind: StreamKind, count: int, *, partitions: int = 1) -> Stream:
    """A stream with `count` records in each partition, in several segments of a folder."""
    stream = kind.new(partitions)
    with stream.writer() as writer:
        for number in range(count):
            for partition in range(partitions):
                writer.append(b"%d" % number, partition=partition)
            if number % 5 == 4:
                writer.flush()
    return stream


def rest(stream: Stream, name: str, offset: int, count: int) -> list[bytes]:
    with stream.reader() as reader:
        reader.assign({name: offset})
        return values(read(reader, count)[name])


def test_reading_continues_at_every_offset_and_next_offset(kind: StreamKind) -> None:
    stream = filled(kind, 12)
    (name,) = stream.partitions()
    with stream.reader() as reader:
        reader.assign({name: "start"})
        parts = read(reader, 12, max_records=1)[name]
    for number, (records, offset) in enumerate(zip(parts, offsets(parts), strict=True)):
        assert rest(stream, name, offset, 12 - number) == [b"%d" % n for n in range(number, 12)]
        if number < 11:
            assert rest(stream, name, records.next_offset, 11 - number) == [b"%d" % n for n in range(number + 1, 12)]


def test_the_end_is_before_the_next_record_and_survives_as_a_position(kind: StreamKind) -> None:
    stream = filled(kind, 10)
    (name,) = stream.partitions()
    with stream.reader() as reader, stream.writer() as writer:
        reader.assign({name: "end"})
        end = reader.ends()[name]
        assert reader.poll(10, 0) == []
        writer.append(b"new")
        writer.flush()
        (records,) = read(reader, 1)[name]
        assert list(records.values) == [b"new"]
        assert records.offsets[0] >= end
        assert reader.ends()[name] >= records.next_offset
    assert rest(stream, name, end, 1) == [b"new"]


def test_ends_say_how_much_is_left(kind: StreamKind) -> None:
    stream = filled(kind, 20, partitions=2)
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        parts = read(reader, 2, max_records=1)
        assert set(reader.ends()) == set(stream.partitions())
        for name, records in parts.items():
            assert reader.ends()[name] > records[-1].next_offset
        parts = read(reader, 38)
        assert reader.ends() == {name: records[-1].next_offset for name, records in parts.items()}


def test_assign_again_moves_and_leaves_the_other_partitions(kind: StreamKind) -> None:
    stream = filled(kind, 10, partitions=2)
    first, second = stream.partitions()
    with stream.reader() as reader:
        reader.assign({first: "start", second: "start"})
        read(reader, 20)
        reader.assign({second: "start"})
        assert set(reader.ends()) == {second}
        assert set(read(reader, 10)) == {second}
        assert reader.poll(10, 0) == []


def test_a_position_beyond_the_end_is_an_error(kind: StreamKind) -> None:
    stream = filled(kind, 3)
    (name,) = stream.partitions()
    with stream.reader() as reader:
        reader.assign({name: "end"})
        end = reader.ends()[name]
        with pytest.raises(StreamGapError, match=f"{name}: has never had a record"):
            reader.assign({name: end + 1})


def test_a_partition_that_does_not_exist_is_named(kind: StreamKind) -> None:
    stream = filled(kind, 1)
    with stream.reader() as reader, pytest.raises(InvalidArgumentError, match="expected"):
        reader.assign({"nothing/7": "start"})
    with pytest.raises(InvalidArgumentError, match="expected"):
        stream.last("nothing/7")


def segmented(kind: StreamKind) -> tuple[Stream, str, list[int]]:
    """A stream whose oldest records can be removed, its partition and the offsets of its records."""
    stream = kind.new()
    (name,) = stream.partitions()
    with stream.writer() as writer:
        for number in range(10):
            # A folder has a segment for each.
            writer.append(b"%d" % number * 5000)
            writer.flush()
    with stream.reader() as reader:
        reader.assign({name: "start"})
        found = list[int]()
        while len(found) < 10:
            found += offsets(reader.poll(1, 30))
    return stream, name, found


def test_a_removed_record_is_a_gap_when_it_is_asked_for(kind: StreamKind) -> None:
    stream, name, at = segmented(kind)
    kind.remove_before(stream, 0, at[8])
    with stream.reader() as reader:
        with pytest.raises(StreamGapError, match=f"{name}: .*removed"):
            reader.assign({name: at[2]})
        reader.assign({name: at[9]})
        assert list(reader.poll(1, 30)[0].offsets) == [at[9]]
        reader.assign({name: "start"})
        assert at[0] < reader.poll(1, 30)[0].offsets[0] <= at[8]


def test_a_reader_that_fell_behind_learns_of_the_gap(kind: StreamKind) -> None:
    if kind.name == "kafka":
        pytest.skip("librdkafka fetches ahead: what it has fetched is not lost; see test_kafka_stream.py")
    stream, name, at = segmented(kind)
    with stream.reader() as reader:
        reader.assign({name: "start"})
        assert list(reader.poll(1, 30)[0].offsets) == [at[0]]
        kind.remove_before(stream, 0, at[9])
        # What it had fetched before is still given.
        with pytest.raises(StreamGapError, match=f"{name}: .*removed"):
            all(iter(lambda: reader.poll(1, 0), []))


def test_the_last_record_is_found(kind: StreamKind) -> None:
    stream = kind.new(partitions=2)
    first, second = stream.partitions()
    assert stream.last(first) is None
    with stream.writer() as writer:
        for number in range(50):
            writer.append(b"%d" % number, partition=0, key=b"k", headers=(("origin", b"%d" % number),))
    found = stream.last(first)
    assert found is not None
    assert (list(found.values), list(found.keys), found.headers) == ([b"49"], [b"k"], [(("origin", b"49"),)])
    assert stream.last(second) is None
    with stream.reader() as reader:
        reader.assign({first: "end"})
        assert reader.ends()[first] == found.next_offset


def test_the_first_record_at_a_time_is_found(kind: StreamKind) -> None:
    stream = kind.new(partitions=2)
    first, second = stream.partitions()
    with stream.writer() as writer:
        for number in range(200):
            writer.append(b"%d" % number, partition=0, timestamp=1_000_000 + 10 * (number ^ 1))
            if number % 7 == 0:
                writer.flush()
    with stream.reader() as reader:
        reader.assign({first: "start", second: "start"})
        ends = reader.ends()
        at = offsets(read(reader, 200)[first])
    assert stream.first_offset_at(2**42) == ends
    if kind.name == "kafka":
        pytest.skip("the mock cluster does not look up offsets by time; see test_kafka_stream.py")
    if kind.name == "redis":
        # By the server's own time.
        assert stream.first_offset_at(0)[first] == at[0]
        assert stream.first_offset_at(at[120] >> 20)[first] <= at[120]
        assert stream.first_offset_at((at[199] >> 20) + 1)[first] == ends[first]
        return
    for wanted in (0, 1_000_000, 1_000_001, 1_000_011, 1_000_990, 1_001_990, 1_001_991):
        # The first in the order of offsets, also where timestamps are not in order.
        expected = next((n for n in range(200) if 1_000_000 + 10 * (n ^ 1) >= wanted), None)
        assert stream.first_offset_at(wanted)[first] == (ends[first] if expected is None else at[expected])
    assert stream.first_offset_at(int(1000 * time.time()))[second] == 0
