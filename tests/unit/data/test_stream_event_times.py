"""Danger: a watermark that falls, or that one silent partition holds back forever, and late rows that nobody counts."""

from __future__ import annotations

from typing import Any

import pytest

from memory_stream import Clock, MemoryStream
from monolith.data import Column, StreamSource
from monolith.data.sources.event_times import EventTimes
from monolith.data.sources.source import HasLag


def source_of(stream: MemoryStream, **options: Any) -> StreamSource:  # noqa: ANN401 - any option
    clock = stream.clock or Clock(10_000.0)
    defaults = {"batch_size": 2, "stop_when_idle_secs": 1, "clock": clock, "now": clock, "max_wait_secs": 0}
    return StreamSource(stream, [Column(name="id", shape=())], **{**defaults, **options})


def put(stream: MemoryStream, *events: tuple[int, int], partition: int = 0) -> None:
    for number, secs in events:
        stream.put(b'{"id": %d}' % number, partition=partition, timestamp=secs * 1000)


def ids(source: StreamSource) -> list[int]:
    return [number for batch in source for number in batch["id"].tolist()]  # type: ignore[union-attr]


def test_the_watermark_is_that_of_the_slowest_partition_and_never_falls() -> None:
    clock = Clock()
    times = EventTimes(lateness_ms=5, idle_secs=10, clock=clock)
    times.assign(["t/0", "t/1"])
    times.observe("t/0", 100)
    assert times.watermark is None, "nobody knows what is in the other one"
    times.observe("t/1", 50)
    assert times.watermark == 45
    times.observe("t/1", 20)
    assert times.watermark == 45
    times.observe("t/1", 300)
    assert times.watermark == 95


def test_idle_partitions_do_not_hold_the_watermark_back() -> None:
    clock = Clock()
    times = EventTimes(lateness_ms=0, idle_secs=10, clock=clock)
    times.assign(["t/0", "t/1", "t/2"])
    times.observe("t/0", 100)
    times.observe("t/1", 50)
    clock.seconds = 9
    times.observe("t/0", 200)
    times.advance()
    assert times.watermark is None
    clock.seconds = 11
    times.advance()
    assert times.watermark == 200, "the others are idle, one of them without having had a record"
    times.observe("t/1", 60)
    assert times.watermark == 200
    clock.seconds = 100
    times.advance()
    assert times.watermark == 200, "when all are idle time stands still"


@pytest.mark.parametrize(
    ("late", "expected", "letters"),
    [("keep", [0, 1, 2, 3, 4, 5], 0), ("drop", [0, 1, 3, 4], 0), ("dead-letter", [0, 1, 3, 4], 2)],
)
def test_late_rows_are_counted_and_treated_as_told(late: str, expected: list[int], letters: int) -> None:
    stream, dead = MemoryStream(clock=Clock(10_000.0)), MemoryStream(topic="dead")
    put(stream, (0, 100), (1, 200), (2, 139), (3, 140), (4, 300), (5, 1))
    source = source_of(stream, lateness_secs=60, late=late, dead_letters=dead)
    assert ids(source) == expected
    lag = source.lag()
    assert (lag.late, lag.bad, len(dead.records[0])) == (2, 0, letters)
    assert lag.watermark == 240_000


def test_the_watermark_survives_a_restart() -> None:
    stream = MemoryStream(2, clock=Clock(10_000.0))
    put(stream, (0, 100))
    put(stream, (1, 500), partition=1)
    source = source_of(stream)
    assert sorted(ids(source)) == [0, 1]
    again = source_of(stream, late="drop")
    again.load_state_dict(source.state_dict())
    put(stream, (2, 99), (3, 101))
    assert ids(again) == [3]
    assert again.lag().watermark == 101_000


def test_lag_is_counted_in_records_and_in_time_by_partition() -> None:
    stream = MemoryStream(2, clock=Clock(1000.0))
    put(stream, (0, 900), (1, 950), (2, 960), (3, 970))
    put(stream, (4, 999), partition=1)
    source = source_of(stream)
    assert isinstance(source, HasLag)
    assert source.lag().records == 0
    batches = iter(source)
    next(batches)
    lag = source.lag()
    assert lag.records == 3
    assert lag.partitions["clicks/0"].records == 2
    assert lag.partitions["clicks/0"].newest_event_time == 950_000
    assert lag.partitions["clicks/1"].records == 1
    assert lag.seconds == pytest.approx(50.0)
    assert str(lag) == "lag 3 records, 50.0 s"
    assert len([*batches]) == 2
    assert source.lag().records == 0
    assert source.lag().seconds == 0.0
