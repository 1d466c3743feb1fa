"""Danger: a client that works with librdkafka's mock cluster and not with a broker, above all when that is killed and restarts.

The broker is an old one, 0.9: it has no timestamps, headers or idempotent producers, and cannot look up offsets by time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from monolith.errors import StreamGapError, UnavailableError
from monolith.streams import Stream, open_stream
from monolith.testing.servers import KafkaServer
from real_servers import kafka_server, until, zookeeper_server
from stream_kinds import offsets, read, values

SETTINGS = {**KafkaServer.CLIENT, "reconnect.backoff.ms": "50", "reconnect.backoff.max.ms": "200"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    folder: Path = tmp_path_factory.mktemp("kafka")
    with zookeeper_server(folder / "zookeeper") as zookeeper, kafka_server(folder / "kafka", zookeeper) as server:
        yield server


def topic(broker: KafkaServer, name: str, partitions: int = 1, **config: str) -> Stream:
    broker.create_topic(name, partitions, **config)
    stream = open_stream(f"kafka://{broker.address}/{name}", settings=SETTINGS)

    def has_leaders() -> bool:
        # librdkafka 2.16 cannot read what so old a broker says of a topic without leaders.
        with suppress(UnavailableError):
            return len(stream.partitions()) == partitions
        return False

    until(has_leaders)
    return stream


def test_records_are_read_in_order_from_every_position(broker: KafkaServer) -> None:
    stream = topic(broker, "clicks", 2)
    assert stream.partitions() == ["clicks/0", "clicks/1"]
    with stream.writer() as writer, stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        for number in range(1000):
            writer.append(b"%d" % number, partition=number % 2, key=b"k")
        writer.flush()
        found = read(reader, 1000)
        assert {name: values(parts) for name, parts in found.items()} == {
            f"clicks/{part}": [b"%d" % number for number in range(part, 1000, 2)] for part in (0, 1)
        }
        assert offsets(found["clicks/0"]) == list(range(500))
        assert reader.ends() == {"clicks/0": 500, "clicks/1": 500}
        reader.assign({"clicks/1": 498})
        assert values(read(reader, 2)["clicks/1"]) == [b"997", b"999"]
    last = stream.last("clicks/0")
    assert last is not None
    assert (list(last.values), list(last.offsets), last.next_offset) == ([b"998"], [499], 500)


def test_a_killed_broker_is_waited_for_by_readers_and_writers(broker: KafkaServer) -> None:
    stream = topic(broker, "restarts")
    with stream.writer() as writer, stream.reader() as reader:
        reader.assign({"restarts/0": "start"})
        for round_ in range(3):
            writer.append(b"before %d" % round_)
            writer.flush(60)
            assert values(read(reader, 1)["restarts/0"]) == [b"before %d" % round_]
            broker.stop(kill=True)
            writer.append(b"during %d" % round_)
            assert reader.poll(10, 0.5) == []
            broker.start()
            writer.flush(120)
            found = list[bytes]()
            while not found:
                found += [value for records in reader.poll(10, 5) for value in records.values]
            # Without an idempotent producer a record may be there twice.
            assert set(found) == {b"during %d" % round_}
            reader.assign({"restarts/0": "end"})


@pytest.mark.slow  # The broker waits half a minute before it removes anything.
def test_records_that_the_broker_has_removed_are_a_gap(broker: KafkaServer) -> None:
    stream = topic(broker, "short", segment_bytes="2000", retention_bytes="3000", retention_ms="100000000")
    with stream.writer() as writer:
        for number in range(40):
            writer.append(b"%d" % number * 400)
            writer.flush(60)
    oldest = 0

    def removed() -> bool:
        nonlocal oldest
        with stream.reader() as reader:
            reader.assign({"short/0": "start"})
            oldest = offsets(read(reader, 1, max_records=1)["short/0"])[0]
        return oldest > 0

    until(removed)
    with (
        stream.reader() as reader,
        pytest.raises(StreamGapError, match="short/0: has no record 0 any more: its oldest is"),
    ):
        reader.assign({"short/0": 0})


def test_partitions_that_are_added_are_seen(broker: KafkaServer) -> None:
    stream = topic(broker, "growing")
    broker.add_partitions("growing", 3)
    until(lambda: stream.partitions() == ["growing/0", "growing/1", "growing/2"])
    with stream.writer() as writer, stream.reader() as reader:
        writer.append(b"x", partition=2)
        writer.flush(60)
        reader.assign({"growing/2": "start"})
        assert values(read(reader, 1)["growing/2"]) == [b"x"]
