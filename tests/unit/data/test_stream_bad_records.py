"""Danger: one bad record that stops training, that is lost without a trace, or a wrong schema that silently drops everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory_stream import Clock, MemoryStream
from monolith.data import Column, MessageEncoder, StreamSource
from monolith.errors import SchemaError
from monolith.streams import open_stream

COLUMNS = [Column(name="id", shape=()), Column(name="label", dtype="float32", shape=(), default=0.0)]
HOUR_MS = 3_600_000


def source_of(stream: MemoryStream, **options: Any) -> StreamSource:  # noqa: ANN401 - any option
    clock = stream.clock or Clock()
    defaults = {"batch_size": 4, "until_end": True, "clock": clock, "now": clock}
    return StreamSource(stream, COLUMNS, **{**defaults, **options})


def ids(source: StreamSource) -> list[int]:
    return [number for batch in source for number in batch["id"].tolist()]  # type: ignore[union-attr]


BAD = {
    b"": "the record is empty",
    b'{"id": "x"}': "expected an integer",
    b'{"id": 1, "label": NaN}': "NaN and Infinity are not JSON",
    b'{"id": 1, "label": 1e40}': "in the range of its type",
    b"\xff\xfe": "expected an object",
    b"{}": "field 'id' is missing",
    b'{"id": 1}' + b" " * 200: "more than max_record_bytes",
}


def test_bad_records_are_counted_and_kept_with_their_origin_and_reason() -> None:
    stream, dead = MemoryStream(2), MemoryStream(1, topic="dead")
    bad = {}
    for number in range(40):
        partition = number % 2
        if number % 5 == 0:
            value, reason = list(BAD.items())[number // 5 % len(BAD)]
            bad[f"clicks/{partition}", str(stream.next_offsets[partition])] = (value, reason)
            headers = (("origin", b"me"),)
            stream.put(value, partition=partition, timestamp=1000 + number, key=b"k%d" % number, headers=headers)
        else:
            stream.put(b'{"id": %d}' % number, partition=partition)
    source = source_of(stream, dead_letters=dead, max_record_bytes=100)
    assert sorted(ids(source)) == [number for number in range(40) if number % 5]
    assert source.lag().bad == len(bad) == len(dead.records[0])
    for _, timestamp, key, value, headers in dead.records[0]:
        facts = dict(headers)
        expected, reason = bad.pop((facts["dead-letter.partition"].decode(), facts["dead-letter.offset"].decode()))
        assert value == expected
        assert reason in facts["dead-letter.reason"].decode()
        assert facts["dead-letter.stream"] == b"memory:clicks"
        assert facts["origin"] == b"me"
        assert key is not None
        assert timestamp == 1000 + int(key[1:])
    assert not bad


def test_dead_letters_are_stored_before_the_batch_behind_them() -> None:
    stream, dead = MemoryStream(), MemoryStream(topic="dead")
    stream.put(*(b"bad" if number % 7 == 3 else b'{"id": %d}' % number for number in range(20)))
    stored = 0
    for batch in source_of(stream, dead_letters=dead):
        last = int(batch["id"][-1])  # type: ignore[index]
        before = sum(1 for number in range(last) if number % 7 == 3)
        assert len(dead.records[0]) >= before
        assert dead.flushes > stored or len(dead.records[0]) == stored or before == 0
        stored = dead.flushes


def test_long_values_are_cut_with_their_size_noted() -> None:
    stream, dead = MemoryStream(), MemoryStream(topic="dead")
    stream.put(b"x" * 2_000_000, b'{"id": 1}')
    assert ids(source_of(stream, dead_letters=dead)) == [1]
    ((_, _, _, value, headers),) = dead.records[0]
    assert len(value) < 1_000_000
    assert dict(headers)["dead-letter.bytes"] == b"2000000"


def test_a_wrong_schema_is_an_error_and_not_an_empty_run() -> None:
    stream = MemoryStream()
    stream.put(*(b'{"user": %d}' % number for number in range(500)))
    source = source_of(stream, until_end=False, stop_when_idle_secs=1)
    with pytest.raises(
        SchemaError, match=r"100 of the last 100 records are bad.*field 'id' is missing.*max_bad_share=1"
    ):
        ids(source)
    assert source.lag().bad == 100


def test_few_records_that_are_all_bad_end_a_bounded_read_with_an_error() -> None:
    stream = MemoryStream()
    stream.put(b"bad", b"bad", b'{"id": 1}')
    with pytest.raises(SchemaError, match=r"2 of all 3 records are bad"):
        ids(source_of(stream))
    assert ids(source_of(stream, max_bad_share=1.0)) == [1]


def test_the_share_is_that_of_recent_records() -> None:
    stream = MemoryStream()
    stream.put(*(b'{"id": %d}' % number for number in range(5000)))
    stream.put(*(b"bad" for _ in range(2000)))
    source = source_of(stream)
    with pytest.raises(SchemaError, match="bad"):
        ids(source)
    assert 500 <= source.lag().bad <= 501


def test_event_times_in_the_future_are_bad() -> None:
    stream, dead = MemoryStream(clock=Clock(1_000_000.0)), MemoryStream(topic="dead")
    now_ms = 1_000_000_000
    for number, timestamp in enumerate(
        [now_ms, now_ms + HOUR_MS, now_ms + HOUR_MS + 1000, -1, 2**60, now_ms - HOUR_MS]
    ):
        stream.put(b'{"id": %d}' % number, timestamp=timestamp)
    source = source_of(stream, dead_letters=dead)
    assert ids(source) == [0, 1, 3, 5]
    assert [value for _, _, _, value, _ in dead.records[0]] == [b'{"id": 2}', b'{"id": 4}']
    assert ids(source_of(stream, max_future_secs=None)) == [0, 1, 2, 3, 4, 5]


def test_event_times_in_the_wrong_unit_are_an_error() -> None:
    columns = [*COLUMNS, Column(name="when", shape=())]
    clock = Clock(1_700_000_000.0)
    stream = MemoryStream(clock=clock)
    stream.put(*(b'{"id": %d, "when": 1700000000000}' % number for number in range(300)))
    source = StreamSource(stream, columns, batch_size=64, event_time="when", until_end=True, clock=clock, now=clock)
    with pytest.raises(SchemaError, match=r"event time .* is in the future"):
        ids(source)
    source = StreamSource(
        stream, columns, batch_size=64, event_time="when", event_time_unit="ms", until_end=True, clock=clock, now=clock
    )
    assert len(ids(source)) == 300
    assert source.lag().newest_event_time == 1_700_000_000_000


def test_only_the_bad_rows_of_a_record_with_many_are_left_out() -> None:
    columns = [Column(name="id", shape=()), Column(name="when", shape=())]
    encoder = MessageEncoder(columns, format="arrow")
    clock = Clock(1000.0)
    stream, dead = MemoryStream(clock=clock), MemoryStream(topic="dead")
    for start in (0, 5):
        rows = [{"id": number, "when": 9_999_999 if number in (3, 6, 7) else 500} for number in range(start, start + 5)]
        stream.put(*encoder.encode_rows(rows))
    stream.put(b"not arrow")
    source = StreamSource(
        stream, columns, batch_size=4, format="arrow", event_time="when", until_end=True,
        dead_letters=dead, clock=clock, now=clock, max_bad_share=1.0,
    )  # fmt: skip
    assert ids(source) == [0, 1, 2, 4, 5, 8, 9]
    assert [dict(headers).get("dead-letter.row") for *_, headers in dead.records[0]] == [b"3", b"1", None]


def test_bad_records_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    stream = MemoryStream(clock=Clock())
    stream.put(*(b"bad" if number % 3 == 0 else b'{"id": %d}' % number for number in range(600)))
    assert len(ids(source_of(stream))) == 400
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "memory:clicks: 1 bad record left out, clicks/0 offset 0: not JSON at byte 0" in caplog.text
    assert "199 bad records left out" in caplog.text


def test_each_shard_has_a_partition_of_a_folder_of_dead_letters(tmp_path: Path) -> None:
    stream = MemoryStream(4)
    for partition in range(4):
        stream.put(*([b'{"id": 1}', b"bad"] * 3), partition=partition)
    source = source_of(stream, dead_letters=str(tmp_path / "dead"))
    for index in range(2):
        assert ids(source.shard(index, 2)) == [1] * 6
    letters = open_stream(tmp_path / "dead")
    assert letters.partitions() == ["dead/0", "dead/1"]
    with letters.reader() as reader:
        reader.assign({"dead/0": 0, "dead/1": 0})
        found = {records.partition: len(records) for records in reader.poll(100, 10)}
    assert found == {"dead/0": 6, "dead/1": 6}


def test_records_of_several_partitions_are_decoded_together_and_a_bad_one_is_still_the_right_one() -> None:
    """Arrow records of many partitions become one batch, and each has a partition, an offset and a place of its own."""
    columns = [Column(name="id", shape=())]
    encoder = MessageEncoder(columns, format="arrow")
    stream, dead = MemoryStream(4), MemoryStream(topic="dead")
    expected = []
    for number in range(40):
        partition = number % 4
        if number in (6, 21, 23):
            stream.put(b"%d is not arrow" % number, partition=partition)
        else:
            expected += [10 * number + row for row in range(3)]
            stream.put(*encoder.encode_rows([{"id": each} for each in expected[-3:]]), partition=partition)
    source = StreamSource(stream, columns, batch_size=5, format="arrow", until_end=True, dead_letters=dead)
    found: list[int] = []
    while True:
        # Each batch by a source of its own, from the state of the one before.
        batch = next(iter(source), None)
        if batch is None:
            break
        found += batch["id"].tolist()  # type: ignore[union-attr]
        state = source.state_dict()
        source = StreamSource(stream, columns, batch_size=5, format="arrow", until_end=True, dead_letters=dead)
        source.load_state_dict(state)
    assert sorted(found) == expected
    whole = StreamSource(stream, columns, batch_size=100, format="arrow", until_end=True)
    assert next(iter(whole))["id"].tolist()[:30] == [  # type: ignore[union-attr]
        10 * number + row for number in range(0, 40, 4) for row in range(3)
    ]
    origins = {
        (value, dict(headers)["dead-letter.partition"], dict(headers)["dead-letter.offset"])
        for *_, value, headers in dead.records[0]
    }
    assert origins == {
        (b"6 is not arrow", b"clicks/2", b"1"),
        (b"21 is not arrow", b"clicks/1", b"5"),
        (b"23 is not arrow", b"clicks/3", b"5"),
    }
