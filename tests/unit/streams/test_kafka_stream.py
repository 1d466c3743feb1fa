"""Danger: a Kafka client that skips what was removed, gives up during a restart of the broker, or shows a password."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidArgumentError,
    MessageTooLargeError,
    StreamGapError,
    UnavailableError,
)
from monolith.streams import Stream, open_stream
from monolith.streams.kafka import KafkaReader, KafkaStream
from monolith.testing.mock_kafka import MockKafka
from stream_kinds import read, values

QUICK = {"fetch.wait.max.ms": "5", "reconnect.backoff.ms": "20", "reconnect.backoff.max.ms": "50"}
PRODUCE, FETCH = 0, 1


@pytest.fixture
def kafka() -> Iterator[MockKafka]:
    with MockKafka({"clicks": 2}) as cluster:
        yield cluster


def write(stream: Stream, *given: bytes, partition: int = 0) -> None:
    with stream.writer() as writer:
        for value in given:
            writer.append(value, partition=partition)


def test_records_removed_while_they_were_to_be_read_are_a_gap(kafka: MockKafka) -> None:
    # A queue of one record, so the rest is not fetched ahead.
    stream = open_stream(
        kafka.url("clicks"), settings={**QUICK, "queued.min.messages": "1", "fetch.message.max.bytes": "1000"}
    )
    for number in range(9):
        write(stream, b"%d" % number * 900)
    with stream.reader() as reader:
        reader.assign({"clicks/0": 3})
        assert reader.poll(1, 30)[0].offsets[0] == 3
        kafka.delete_records("clicks", 0, 9)
        with pytest.raises(StreamGapError, match=r"clicks/0: has no record \d any more: its oldest is 9"):
            all(iter(lambda: reader.poll(1, 10), []))


def test_a_reader_that_drops_a_partition_goes_on_with_the_others_without_asking_for_their_offsets_again(
    kafka: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assigned again, 40 partitions that end one after another are fetched again and again."""
    stream = open_stream(kafka.url("clicks"), settings=QUICK)
    assert isinstance(stream, KafkaStream)
    write(stream, b"0", b"1")
    asked: list[tuple[str, int]] = []
    ask = stream.watermarks
    monkeypatch.setattr(stream, "watermarks", lambda part: (asked.append(part), ask(part))[1])
    with stream.reader() as reader:
        reader.assign({"clicks/0": "start", "clicks/1": "start"})
        assert values(read(reader, 2)["clicks/0"]) == [b"0", b"1"]
        asked.clear()
        reader.assign({"clicks/1": "start"})
        write(stream, b"2")
        write(stream, b"a", partition=1)
        assert {name: values(parts) for name, parts in read(reader, 1).items()} == {"clicks/1": [b"a"]}
        assert asked == []
        # One that was dropped is not being read any more, and one can be read again from before.
        reader.assign({"clicks/0": 2, "clicks/1": 0})
        assert {name: values(parts) for name, parts in read(reader, 2).items()} == {
            "clicks/0": [b"2"],
            "clicks/1": [b"a"],
        }
        assert sorted(asked) == [("clicks", 0), ("clicks", 1)]


def test_records_that_were_taken_with_an_error_come_again_when_they_are_assigned(
    kafka: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_stream(kafka.url("clicks"), settings=QUICK)
    write(stream, b"0", b"1")
    with stream.reader() as reader:
        assert isinstance(reader, KafkaReader)
        reader.assign({"clicks/0": 0})

        def refuse(messages: list[Any]) -> list[Any]:
            if messages:
                raise StreamGapError("clicks/1: gone")
            return []

        with monkeypatch.context() as patch:
            patch.setattr(reader, "_sorted", refuse)
            with pytest.raises(StreamGapError):
                reader.poll(2, 60)
        reader.assign({"clicks/0": 0})
        assert values(read(reader, 2)["clicks/0"]) == [b"0", b"1"]


def test_a_broker_that_restarts_is_waited_for_and_both_are_logged(
    kafka: MockKafka, caplog: pytest.LogCaptureFixture
) -> None:
    stream = open_stream(kafka.url("clicks"), settings=QUICK)
    with stream.reader() as reader, stream.writer() as writer:
        reader.assign({"clicks/0": "start"})
        writer.append(b"before", partition=0)
        assert values(read(reader, 1)["clicks/0"]) == [b"before"]
        kafka.set_down()
        writer.append(b"during", partition=0)
        # Until the client has noticed.
        while "waiting for it" not in caplog.text:
            assert reader.poll(10, 0.1) == []
        kafka.set_up()
        writer.flush(60)
        assert values(read(reader, 1)["clicks/0"]) == [b"during"]
    assert "answers again" in caplog.text


def test_records_are_stored_once_although_answers_of_the_broker_are_lost(kafka: MockKafka) -> None:
    stream = open_stream(kafka.url("clicks"), settings=QUICK)
    # REQUEST_TIMED_OUT and NOT_ENOUGH_REPLICAS: the producer sends again.
    with stream.writer() as writer:
        kafka.fail_requests(PRODUCE, [7, 19, 7])
        for number in range(50):
            writer.append(b"%d" % number, partition=0)
        writer.flush(60)
    with stream.reader() as reader:
        reader.assign({"clicks/0": "start"})
        assert values(read(reader, 50)["clicks/0"]) == [b"%d" % n for n in range(50)]
        assert reader.poll(10, 0) == []


def test_records_that_are_not_stored_are_counted_at_flush(kafka: MockKafka) -> None:
    settings = {**QUICK, "message.timeout.ms": "1500"}
    writer = open_stream(kafka.url("clicks"), settings=settings).writer()
    kafka.set_down()
    for _ in range(3):
        writer.append(b"x")
    with pytest.raises(UnavailableError, match="3 records were not stored"):
        writer.flush(60)
    kafka.set_up()
    # It was reported once, and the writer can go on.
    writer.append(b"y")
    writer.close()


def test_flush_ends_in_time(kafka: MockKafka) -> None:
    writer = open_stream(kafka.url("clicks"), settings={**QUICK, "message.timeout.ms": "2000"}).writer()
    kafka.set_down()
    writer.append(b"x")
    with pytest.raises(DeadlineExceededError, match=r"1 records were not stored within 0\.1 seconds"):
        writer.flush(0.1)
    kafka.set_up()
    writer.flush(60)
    writer.close()


def test_a_record_above_the_limit_is_refused_and_named(kafka: MockKafka) -> None:
    with (
        open_stream(kafka.url("clicks")).writer() as writer,
        pytest.raises(MessageTooLargeError, match=r"message\.max\.bytes"),
    ):
        writer.append(bytes(1_100_000))


def test_several_topics_are_one_stream(kafka: MockKafka) -> None:
    kafka.create_topic("views", 1)
    for topic in ("clicks", "views"):
        write(open_stream(kafka.url(topic)), topic.encode())
    stream = open_stream(kafka.url("views,clicks"), settings=QUICK)
    assert stream.partitions() == ["clicks/0", "clicks/1", "views/0"]
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        found = read(reader, 2)
    assert {name: values(parts) for name, parts in found.items()} == {"clicks/0": [b"clicks"], "views/0": [b"views"]}
    with pytest.raises(InvalidArgumentError, match="expected a stream of one topic, got views, clicks"):
        stream.writer()


def test_a_missing_topic_says_how_to_make_it(kafka: MockKafka) -> None:
    with pytest.raises(InvalidArgumentError, match=r"monolith stream create kafka://.*/nothing --partitions 4"):
        open_stream(kafka.url("nothing")).partitions()
    with pytest.raises(InvalidArgumentError, match="topic clicks exists with 2, fewer than 3"):
        open_stream(kafka.url("clicks"), partitions=3)
    assert len(open_stream(kafka.url("clicks"), partitions=2).partitions()) == 2


def test_readers_of_a_group_divide_the_partitions_and_hand_over_what_was_committed(kafka: MockKafka) -> None:
    settings = {
        **QUICK,
        "partitions.by": "group",
        "group.id": "trainers",
        "session.timeout.ms": "6000",
        "heartbeat.interval.ms": "100",
    }
    stream = open_stream(kafka.url("clicks"), settings=settings)
    write(stream, b"0", b"1", b"2")
    write(stream, b"a", b"b", partition=1)
    start = dict.fromkeys(stream.partitions(), "start")
    first = stream.reader()
    second = stream.reader()
    assert isinstance(first, KafkaReader)
    assert isinstance(second, KafkaReader)
    try:
        first.assign(start)
        got = read(first, 5)
        assert {name: values(parts) for name, parts in got.items()} == {
            "clicks/0": [b"0", b"1", b"2"],
            "clicks/1": [b"a", b"b"],
        }
        assert first.assigned == ["clicks/0", "clicks/1"]
        first.commit({"clicks/0": 2, "clicks/1": 1})
        second.assign(start)
        again: dict[str, list[bytes]] = {}
        for _ in range(600):
            for reader in (first, second):
                for records in reader.poll(10, 0.05):
                    again.setdefault(records.partition, []).extend(records.values)
            if len(first.assigned) == len(second.assigned) == 1 and len(again) == 2:
                break
        # Both begin where the group had committed, and may do so again when the partitions move once more.
        assert {name: set(got) for name, got in again.items()} == {"clicks/0": {b"2"}, "clicks/1": {b"b"}}
        assert set(first.assigned) | set(second.assigned) == set(start)
    finally:
        first.close()
        second.close()


def test_offsets_by_time_are_those_of_the_broker(kafka: MockKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock cluster answers every time with the end, so the answer of a broker is put in its place."""
    stream = open_stream(kafka.url("clicks"))
    assert isinstance(stream, KafkaStream)
    write(stream, b"0", b"1", b"2", partition=1)
    asked: list[Any] = []

    def answer(wanted: list[Any], timeout: float) -> list[Any]:
        asked.extend((each.topic, each.partition, each.offset) for each in wanted)
        return [SimpleNamespace(topic="clicks", partition=n, offset=(7, -1)[n], error=None) for n in (0, 1)]

    counts, marks = {"clicks": 2}, stream.watermarks(("clicks", 1))
    monkeypatch.setattr(stream, "_counts", lambda: counts)
    monkeypatch.setattr(stream, "watermarks", lambda part: marks)
    monkeypatch.setattr(stream, "_client", lambda: SimpleNamespace(offsets_for_times=answer))
    assert stream.first_offset_at(1_700_000_000_000) == {"clicks/0": 7, "clicks/1": 3}
    assert asked == [("clicks", 0, 1_700_000_000_000), ("clicks", 1, 1_700_000_000_000)]


def test_positions_are_not_left_to_the_broker() -> None:
    with pytest.raises(ConfigError, match=r"settings\['enable.auto.commit'\]: expected 'false'"):
        open_stream("kafka://localhost/clicks", settings={"enable.auto.commit": "true"})
    with pytest.raises(ConfigError, match=r"settings\['auto.offset.reset'\]: expected 'error'"):
        open_stream("kafka://localhost/clicks", settings={"auto.offset.reset": "latest"})
    with pytest.raises(ConfigError, match=r"settings\['group.id'\]"):
        open_stream("kafka://localhost/clicks", settings={"partitions.by": "group"})


@pytest.mark.parametrize(
    "url", ["kafka://localhost", "kafka:///clicks", "kafka://localhost/", "kafka://h/a/b", "kafka://h/a?x=1"]
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected kafka://host:9092"):
        open_stream(url)


def test_secrets_are_in_no_message(
    kafka: MockKafka, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(InvalidArgumentError, match="do not belong into a URL") as refused:
        open_stream("kafka://me:hunter2@localhost/clicks")
    (tmp_path / "secret").write_text("hunter2\n")
    monkeypatch.setenv("KAFKA_USER", "me")
    settings = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username.env": "KAFKA_USER",
        "sasl.password.file": str(tmp_path / "secret"),
        "debug": "conf",
        "ssl.key.password": "hunter2",
        "no.such.setting": "hunter2",
    }
    with pytest.raises(ConfigError, match=r"no\.such\.setting") as unknown:
        open_stream(kafka.url("clicks"), settings=settings).partitions()
    del settings["no.such.setting"]
    stream = open_stream(kafka.url("clicks"), settings=settings)
    for text in (str(refused.value), str(unknown.value), repr(stream), stream.url, caplog.text):
        assert "hunter2" not in text


def test_a_setting_that_names_a_missing_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="no environment variable 'NO_SUCH_NAME'"):
        open_stream("kafka://localhost/clicks", settings={"sasl.password.env": "NO_SUCH_NAME"})


def test_wake_interrupts_a_reader_without_a_broker(kafka: MockKafka) -> None:
    stream = open_stream(kafka.url("clicks"), settings=QUICK)
    with stream.reader() as reader:
        reader.assign({"clicks/0": "start"})
        kafka.set_down()
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(reader.poll(1, 600)))
        thread.start()
        reader.wake()
        thread.join(60)
        assert found == [[]]
