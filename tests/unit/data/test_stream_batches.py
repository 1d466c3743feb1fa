"""Danger: a slow stream whose batches never become full, a read that does not end, or a position that is not behind its batch."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

import pytest

from memory_stream import Clock, MemoryStream
from monolith.data import Column, MessageEncoder, Prefetch, StreamSource
from monolith.data.messages import StreamFormat
from monolith.errors import ConfigError, InvalidArgumentError, StreamGapError, UnavailableError

COLUMNS = [Column(name="id", shape=())]


def record(number: int) -> bytes:
    return b'{"id": %d}' % number


def source_of(stream: MemoryStream, **options: Any) -> StreamSource:  # noqa: ANN401 - any option
    clock = stream.clock or Clock()
    return StreamSource(stream, COLUMNS, **{"batch_size": 4, "clock": clock, "now": clock, **options})


def ids(source: StreamSource) -> list[list[int]]:
    return [batch["id"].tolist() for batch in source]  # type: ignore[union-attr]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain(*batches))


def places(source: StreamSource) -> dict[str, Any]:
    return dict(json.loads(str(source.state_dict()["partitions"])))


def test_a_batch_is_cut_by_count_or_by_the_time_since_its_first_record() -> None:
    stream = MemoryStream(clock=Clock())
    stream.put(*map(record, range(6)))
    source = source_of(stream, max_wait_secs=0.5)
    batches = iter(source)
    assert next(batches)["id"].tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert stream.clock is not None
    assert stream.clock() == 0.0
    assert next(batches)["id"].tolist() == [4, 5]  # type: ignore[union-attr]
    assert stream.clock() == pytest.approx(0.5)
    assert places(source) == {"clicks/0": 6}


def test_a_bounded_read_ends_where_the_stream_ended_when_it_began() -> None:
    stream = MemoryStream(2)
    stream.put(*map(record, range(5)))
    stream.put(record(9), partition=1)
    source = source_of(stream, until_end=True, max_wait_secs=0)
    batches = []
    for batch in source:
        stream.put(record(100))
        batches += batch["id"].tolist()  # type: ignore[union-attr]
    assert sorted(batches) == [0, 1, 2, 3, 4, 9]
    assert not source.waits
    assert sum(map(len, ids(source))) > 6, "the next read begins again, and has what came"


def test_partitions_that_end_at_different_moments_are_read_once() -> None:
    for lengths in ((1, 30, 5), (30, 1, 9), (3, 0, 50), (8, 8, 8)):
        stream = MemoryStream(3, clock=Clock())
        expected = []
        for partition, length in enumerate(lengths):
            numbers = range(100 * partition, 100 * partition + length)
            stream.put(*map(record, numbers), partition=partition)
            expected += list(numbers)
        for ahead in (200, 2000, 100_000):
            source = source_of(stream, until_end=True, read_ahead_bytes=ahead)
            assert sorted(flat(ids(source))) == expected


def test_a_bounded_read_does_not_wait_for_what_a_broker_removed_from_the_end(caplog: pytest.LogCaptureFixture) -> None:
    stream = MemoryStream(clock=Clock())
    stream.put(*map(record, range(5)))
    stream.records[0].pop()
    assert ids(source_of(stream, until_end=True)) == [[0, 1, 2, 3]]
    assert "taken as removed" in caplog.text


def test_an_idle_stream_ends_a_read_that_says_so() -> None:
    stream = MemoryStream(clock=Clock())
    stream.put(record(1))
    source = source_of(stream, stop_when_idle_secs=7)
    assert ids(source) == [[1]]
    assert stream.clock is not None
    assert stream.clock() == pytest.approx(7)
    assert ids(source) == []
    stream.put(record(2))
    assert ids(source) == [[2]]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("start", [1, 2, 3, 4]),
        ("end", []),
        (200, [3, 4]),
        ("1970-01-01T00:00:00.150Z", [2, 3, 4]),
        ({"clicks/0": 2}, [3, 4]),
    ],
)
def test_reading_begins_where_it_is_told_to(start: Any, expected: list[int]) -> None:  # noqa: ANN401 - any form of start
    stream = MemoryStream(clock=Clock())
    for number, timestamp in ((1, 100), (2, 150), (3, 200), (4, 999)):
        stream.put(record(number), timestamp=timestamp)
    source = source_of(stream, start=start, stop_when_idle_secs=1)
    assert flat(ids(source)) == expected
    # Records that came while nobody read are not jumped over, whatever `start` says.
    stream.put(record(5))
    again = source_of(stream, start=start, stop_when_idle_secs=1)
    again.load_state_dict(source.state_dict())
    assert flat(ids(again)) == [5]


def test_partitions_that_are_added_are_read_from_their_first_record_on() -> None:
    stream = MemoryStream(clock=Clock())
    source = source_of(stream, start="end", refresh_secs=5, stop_when_idle_secs=20, max_wait_secs=0)
    stream.put(record(0))
    batches = iter(source)
    stream.put(record(1))
    collected = []
    stream.put(record(2))
    source2 = source_of(stream, refresh_secs=5, stop_when_idle_secs=20, max_wait_secs=0)
    batches = iter(source2)
    collected += next(batches)["id"].tolist()  # type: ignore[union-attr]
    stream.add_partition()
    stream.put(record(7), partition=1)
    collected += [number for batch in batches for number in batch["id"].tolist()]  # type: ignore[union-attr]
    assert collected == [0, 1, 2, 7]
    # One added while nobody read is new, too, although reading was to begin at the end.
    stream.add_partition()
    stream.put(record(8), partition=2)
    later = source_of(stream, start="end", stop_when_idle_secs=1)
    later.load_state_dict(source2.state_dict())
    assert ids(later) == [[8]]


def test_a_broker_that_does_not_answer_when_partitions_are_looked_for_ends_no_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = MemoryStream(clock=Clock())
    source = source_of(stream, refresh_secs=5, stop_when_idle_secs=20, max_wait_secs=0)
    stream.put(record(1))
    batches = iter(source)
    collected = next(batches)["id"].tolist()  # type: ignore[union-attr]
    present, asked = stream.partitions, [0]

    def away() -> list[str]:
        asked[0] += 1
        if asked[0] == 1:
            raise UnavailableError("clicks: no answer")
        return present()

    stream.add_partition()
    stream.put(record(2), partition=1)
    monkeypatch.setattr(stream, "partitions", away)
    collected += [number for batch in batches for number in batch["id"].tolist()]  # type: ignore[union-attr]
    assert asked[0] > 1
    assert collected == [1, 2]


def test_an_interruption_ends_a_read_that_waits_and_the_next_one_goes_on() -> None:
    stream = MemoryStream()
    source = StreamSource(stream, COLUMNS, batch_size=4, max_wait_secs=0)
    got: list[list[int]] = []
    reading = threading.Thread(target=lambda: got.extend(ids(source)), daemon=True)
    reading.start()
    stream.put(record(1))
    while not got and reading.is_alive():
        source.interrupt()
        reading.join(0.01)
    reading.join(60)
    assert not reading.is_alive()
    stream.put(record(2))
    with Prefetch(source) as batches:
        rest = flat(got)
        while len(rest) < 2:
            rest += batches.take(60)["id"].tolist()
    assert rest == [1, 2]


@pytest.mark.parametrize("format", ["json", "arrow", "example", "example_batch"])
def test_every_state_continues_with_the_next_row(format: StreamFormat) -> None:  # noqa: A002
    stream = MemoryStream(3, clock=Clock())
    encoder = MessageEncoder(COLUMNS, format=format)
    for start in range(0, 60, 5):
        for message in encoder.encode_rows([{"id": number} for number in range(start, start + 5)]):
            stream.put(message, partition=start % 3)
    whole = source_of(stream, format=format, until_end=True)
    batches, states = [], [whole.state_dict()]
    for batch in whole:
        batches.append(batch["id"].tolist())  # type: ignore[union-attr]
        states.append(whole.state_dict())
    assert sorted(itertools.chain(*batches)) == list(range(60))
    assert {len(batch) for batch in batches} == {4}
    for done, state in enumerate(states):
        other = source_of(stream, format=format, until_end=True, batch_size=3)
        other.load_state_dict(state)
        assert sorted(itertools.chain(*ids(other))) == sorted(itertools.chain(*batches[done:]))


@pytest.mark.parametrize("format", ["json", "arrow"])
def test_replay_yields_exactly_the_records_between_two_positions(format: StreamFormat) -> None:  # noqa: A002
    stream = MemoryStream(2, clock=Clock())
    encoder = MessageEncoder(COLUMNS, format=format)
    for start in range(0, 40, 4):
        for message in encoder.encode_rows([{"id": number} for number in range(start, start + 4)]):
            stream.put(message, partition=start // 4 % 2)
    source = source_of(stream, format=format, batch_size=3, stop_when_idle_secs=1)
    states, batches = [source.state_dict()], []
    for batch in source:
        batches.append(batch["id"].tolist())  # type: ignore[union-attr]
        states.append(source.state_dict())
    for first, last in itertools.combinations(range(len(states)), 2):
        again = source_of(stream, format=format, batch_size=5)
        again.load_state_dict(states[first])
        replayed = [batch["id"].tolist() for batch in again.replay(states[last])]  # type: ignore[union-attr]
        assert sorted(itertools.chain(*replayed)) == sorted(itertools.chain(*batches[first:last]))
        assert again.state_dict() == states[last]
    late = source_of(stream, format=format)
    late.load_state_dict(states[-1])
    with pytest.raises(InvalidArgumentError, match="expected a position at or after this one"):
        list(late.replay(states[1]))


def test_a_gap_is_an_error_unless_it_may_be_skipped(caplog: pytest.LogCaptureFixture) -> None:
    stream = MemoryStream(2, clock=Clock())
    stream.put(*map(record, range(4)))
    source = source_of(stream, stop_when_idle_secs=1)
    assert ids(source) == [[0, 1, 2, 3]]
    state = source.state_dict()
    stream.put(*map(record, range(4, 10)))
    stream.remove(0, 7)
    with pytest.raises(StreamGapError, match=r"clicks/0: does not have record 4.*on_gap='skip'"):
        ids(source)
    skipping = source_of(stream, stop_when_idle_secs=1, on_gap="skip")
    skipping.load_state_dict(state)
    assert ids(skipping) == [[7, 8, 9]]
    assert skipping.lag().lost == 3
    assert "3 records were lost" in caplog.text


def test_a_gap_that_opens_while_reading_is_skipped() -> None:
    stream = MemoryStream(clock=Clock())
    stream.put(*map(record, range(4)))
    source = source_of(stream, stop_when_idle_secs=1, on_gap="skip")
    batches = iter(source)
    assert next(batches)["id"].tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]
    stream.put(*map(record, range(4, 10)))
    stream.remove(0, 8)
    assert next(batches)["id"].tolist() == [8, 9]  # type: ignore[union-attr]
    assert source.lag().lost == 4


def test_no_more_is_read_ahead_than_allowed() -> None:
    stream = MemoryStream(clock=Clock())
    stream.put(*(b'{"id": 1}' + b" " * 991 for _ in range(300)))
    assert sum(map(len, ids(source_of(stream, until_end=True, read_ahead_bytes=10_000)))) == 300
    assert max(stream.polls) <= 10


def test_the_broker_is_told_how_far_reading_has_come() -> None:
    stream = MemoryStream(clock=Clock())
    stream.put(*map(record, range(5)))
    assert sum(map(len, ids(source_of(stream, until_end=True)))) == 5
    assert stream.committed == {"clicks/0": 5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"start": "yesterday"}, "2026-01-31T12:00:00Z"),
        ({"start": "2026-01-31T12:00:00"}, "with its zone"),
        ({"format": "yaml"}, "format"),
        ({"max_bad_share": 2.0}, "max_bad_share"),
        ({"late": "never"}, "late"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, InvalidArgumentError), match=message):
        source_of(MemoryStream(), **options)


def test_an_event_time_needs_its_column() -> None:
    with pytest.raises(InvalidArgumentError, match="event_time: expected the name of an int64 column"):
        source_of(MemoryStream(), event_time="when")
