"""Danger: a source that works on the stream in memory of its other tests, and not on folders, Kafka and Redis."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

from memory_stream import Clock
from monolith.data import Column, StreamSource
from monolith.errors import StreamGapError
from monolith.streams import Stream
from real_servers import until
from stream_kinds import KINDS, StreamKind, kind_of_streams

COLUMNS = [Column(name="id", shape=())]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamKind]:
    with kind_of_streams(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


def write(stream: Stream, numbers: range) -> None:
    partitions = len(stream.partitions())
    with stream.writer() as writer:
        for number in numbers:
            writer.append(b'{"id": %d, "text": "%s"}' % (number, b"x" * 60), partition=number % partitions)


def ids(source: StreamSource) -> list[int]:
    return [number for batch in source for number in batch["id"].tolist()]  # type: ignore[union-attr]


def test_every_record_is_in_one_batch_and_every_state_continues(kind: StreamKind) -> None:
    stream = kind.new(3)
    write(stream, range(100))
    source = StreamSource(stream, COLUMNS, batch_size=7, until_end=True)
    batches, states = [], [source.state_dict()]
    for batch in source:
        batches.append(batch["id"].tolist())  # type: ignore[union-attr]
        states.append(source.state_dict())
    assert sorted(itertools.chain(*batches)) == list(range(100))
    for done in (0, 5, len(batches)):
        other = StreamSource(stream, COLUMNS, batch_size=9, until_end=True)
        other.load_state_dict(states[done])
        assert sorted(ids(other)) == sorted(itertools.chain(*batches[done:]))
    write(stream, range(100, 110))
    again = StreamSource(stream, COLUMNS, batch_size=9)
    again.load_state_dict(states[2])
    replayed = [number for batch in again.replay(states[6]) for number in batch["id"].tolist()]  # type: ignore[union-attr]
    assert sorted(replayed) == sorted(itertools.chain(*batches[2:6]))


def test_shards_divide_the_partitions_and_others_continue(kind: StreamKind) -> None:
    stream = kind.new(5)
    write(stream, range(50))
    source = StreamSource(stream, COLUMNS, batch_size=4, stop_when_idle_secs=0.2)
    shards = [source.shard(index, 2) for index in range(2)]
    first = [ids(shard) for shard in shards]
    assert sorted(first[0]) == [number for number in range(50) if number % 5 % 2 == 0]
    assert sorted(itertools.chain(*first)) == list(range(50))
    write(stream, range(50, 80))
    joined = source.join_state_dicts([shard.state_dict() for shard in shards])
    second = []
    for index in range(3):
        shard = source.shard(index, 3)
        shard.load_state_dict(joined)
        second += ids(shard)
        assert shard.lag().records == 0
    assert sorted(second) == list(range(50, 80))


def test_reading_begins_at_the_end(kind: StreamKind) -> None:
    stream = kind.new(2)
    write(stream, range(10))
    source = StreamSource(stream, COLUMNS, batch_size=4, start="end", stop_when_idle_secs=0.2)
    assert ids(source) == []
    write(stream, range(10, 14))
    other = StreamSource(stream, COLUMNS, batch_size=4, start="end", stop_when_idle_secs=0.2)
    other.load_state_dict(source.state_dict())
    assert sorted(ids(other)) == [10, 11, 12, 13]


def test_lag_grows_while_the_trainer_takes_no_batch(kind: StreamKind) -> None:
    stream, clock = kind.new(2), Clock(1000.0)
    write(stream, range(10))
    source = StreamSource(stream, COLUMNS, batch_size=4, max_wait_secs=0.0, clock=clock, stop_when_idle_secs=1.0)
    batches = iter(source)
    taken = len(next(batches)["id"])  # type: ignore[arg-type]
    write(stream, range(10, 30))
    clock.seconds += 60.0  # that the step takes
    counted = 2 if kind.name == "redis" else 30 - taken
    # A slow machine may not have the answer in time for the first who asks.
    until(lambda: source.lag().records == counted)
    batches.close()  # type: ignore[attr-defined]


def test_a_gap_is_an_error_or_skipped(kind: StreamKind) -> None:
    stream = kind.new(1)
    with stream.writer() as writer:
        for number in range(10):
            # A folder has a file for each.
            writer.append(b'{"id": %d}' % number + b" " * 5000)
            writer.flush()
    source = StreamSource(stream, COLUMNS, batch_size=8, until_end=True)
    states = [source.state_dict()]
    for _ in source:
        states.append(source.state_dict())
    (removed,) = json.loads(str(states[1]["partitions"])).values()
    kind.remove_before(stream, 0, removed)
    state = {**states[1], "partitions": json.dumps(dict.fromkeys(stream.partitions(), 1))}
    behind = StreamSource(stream, COLUMNS, batch_size=4, stop_when_idle_secs=0.5)
    behind.load_state_dict(state)
    with pytest.raises(StreamGapError, match="on_gap='skip'"):
        ids(behind)
    skipping = StreamSource(stream, COLUMNS, batch_size=4, stop_when_idle_secs=0.5, on_gap="skip")
    skipping.load_state_dict(state)
    left = ids(skipping)
    assert left == list(range(left[0], 10))
    assert 1 < left[0] <= 8
    assert skipping.lag().lost == (1 if kind.name == "redis" else left[0] - 1)
