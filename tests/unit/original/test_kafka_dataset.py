"""Danger: a pipeline of the original that stops after its first batch, never stops, or reads framed messages as bare ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memory_stream import Clock
from monolith.data import Column, MessageEncoder, RecordHeader
from monolith.errors import InvalidArgumentError
from monolith.original import KafkaDataset, create_plain_kafka_dataset
from monolith.streams import open_stream
from monolith.testing.mock_kafka import MockKafka

COLUMNS = [Column(name="user"), Column(name="label", dtype="float32", shape=(1,))]


@pytest.fixture(scope="module")
def kafka() -> Iterator[MockKafka]:
    with MockKafka() as cluster:
        yield cluster


def filled(kafka: MockKafka, topic: str, messages: list[bytes]) -> None:
    kafka.create_topic(topic, 2)
    with open_stream(kafka.url(topic)).writer() as writer:
        for number, message in enumerate(messages):
            writer.append(message, partition=number % 2)


@pytest.mark.parametrize(
    ("kind", "header"), [("INSTANCE", {}), ("EXAMPLE", {"sort_id": True}), ("EXAMPLEBATCH", {"kafka_dump": True})]
)
def test_messages_of_all_kinds_become_batches(kafka: MockKafka, kind: str, header: dict[str, bool]) -> None:
    names = {"INSTANCE": "instance", "EXAMPLE": "example", "EXAMPLEBATCH": "example_batch"}
    encoder = MessageEncoder(COLUMNS, format=names[kind], header=RecordHeader(**header) if header else None)  # type: ignore[arg-type]
    rows = [{"user": [number], "label": [1.0]} for number in range(12)]
    filled(kafka, kind, [encoder.encode_row(row) for row in rows])
    source = KafkaDataset(
        [kind], "group", [kafka.address], COLUMNS, batch_size=5, input_pb_type=kind, stream_timeout=100,
        message_poll_timeout=100, has_sort_id=header.get("sort_id"), kafka_dump=header.get("kafka_dump", False),
    )  # fmt: skip
    users = [ids for batch in source for ids in batch["user"].to_lists()]  # type: ignore[union-attr]
    assert sorted(users) == [[number] for number in range(12)]


@pytest.mark.parametrize(
    ("stream_timeout", "poll", "secs"),
    [(-1, 10_000, None), (25_000, 10_000, 20.0), (5_000, 10_000, 10.0), (0, 100, 0.1)],
)
def test_timeouts_count_in_whole_polls(kafka: MockKafka, stream_timeout: int, poll: int, secs: float | None) -> None:
    source = KafkaDataset(
        "stop", "group", kafka.address, COLUMNS, batch_size=5, stream_timeout=stream_timeout, message_poll_timeout=poll
    )
    assert source.options.stop_when_idle_secs == secs


def test_plain_messages_go_on_after_the_first_batch_and_stop_when_nothing_comes(kafka: MockKafka) -> None:
    filled(kafka, "plain", [b"%d" % number for number in range(10)])
    forever = create_plain_kafka_dataset("plain", "group", kafka.address, poll_batch_size=4)
    found = list[bytes]()
    while len(found) < 10:
        part = next(forever)
        assert len(part) <= 4
        found += part
    assert sorted(found) == [b"%d" % number for number in range(10)]
    forever.close()  # type: ignore[attr-defined]
    clock = Clock()

    def ticking() -> float:
        clock.seconds += 0.05
        return clock.seconds

    bounded = create_plain_kafka_dataset(
        "plain", "group", kafka.address, stream_timeout=600, message_poll_timeout=100, clock=ticking
    )
    assert sum(map(len, bounded)) in range(11), "it ends"


def test_settings_are_those_of_librdkafka(kafka: MockKafka) -> None:
    kafka.create_topic("settings", 1)
    for other in ("fetch.wait.max.ms=5,conf.topic.auto.offset.reset=latest", {"fetch.wait.max.ms": "5"}):
        source = KafkaDataset("settings", "group", kafka.address, COLUMNS, batch_size=5, kafka_other_metadata=other)
        assert source.options.start == ("end" if isinstance(other, str) else "start")
    with pytest.raises(InvalidArgumentError, match="expected name=value"):
        KafkaDataset("settings", "group", kafka.address, COLUMNS, batch_size=5, kafka_other_metadata="earliest")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_pb_type": "PARQUET"}, "input_pb_type"),
        ({"stream_timeout": -2}, "stream_timeout"),
        ({"message_poll_timeout": 0}, "message_poll_timeout"),
        ({"poll_batch_size": 0}, "poll_batch_size"),
        ({"topics": []}, "topics, servers"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    given = {"topics": "t", "group_id": "g", "servers": "h:1", "columns": COLUMNS, "batch_size": 2, **arguments}
    with pytest.raises(InvalidArgumentError, match=message):
        KafkaDataset(**given)  # type: ignore[arg-type]
