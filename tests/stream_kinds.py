"""The three kinds of streams behind one door, for tests that all of them must pass: a folder, Kafka's mock cluster, Redis."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from monolith.streams import FolderStream, Records, Stream, StreamReader, open_stream
from monolith.testing.mock_kafka import MockKafka
from monolith.testing.servers import RedisServer
from real_servers import redis_server

KINDS = ("folder", "kafka", "redis")


class StreamKind(ABC):
    """Makes streams, and removes their oldest records as retention does."""

    name: str

    def __init__(self) -> None:
        self._numbers = itertools.count()

    @abstractmethod
    def new(self, partitions: int = 1, topic: str | None = None) -> Stream:
        """A new stream, with a topic of its own unless one is given."""

    @abstractmethod
    def remove_before(self, stream: Stream, partition: int, offset: int) -> None:
        """Remove at least one record before `offset`, and none after."""

    def topic(self) -> str:
        return f"topic{next(self._numbers)}"


class Folders(StreamKind):
    name = "folder"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def new(self, partitions: int = 1, topic: str | None = None) -> FolderStream:
        # Small, so that most tests cross the border between two files.
        settings = {"segment_bytes": "4096"}
        stream = open_stream(self.folder / (topic or self.topic()), partitions=partitions, settings=settings)
        assert isinstance(stream, FolderStream)
        return stream

    def remove_before(self, stream: Stream, partition: int, offset: int) -> None:
        segments = sorted((Path(stream.url) / str(partition)).glob("*.segment"))
        bases = [int(path.stem) for path in segments]
        old = [path for path, following in zip(segments, bases[1:], strict=False) if following <= offset]
        assert old, "the stream has too few segments"
        for path in old:
            path.unlink()


class KafkaTopics(StreamKind):
    name = "kafka"

    def __init__(self, cluster: MockKafka) -> None:
        super().__init__()
        self.cluster = cluster

    def new(self, partitions: int = 1, topic: str | None = None) -> Stream:
        topic = topic or self.topic()
        self.cluster.create_topic(topic, partitions)
        # A broker answers as soon as there are records, the mock cluster only after this time.
        return open_stream(self.cluster.url(topic), settings={"fetch.wait.max.ms": "5"})

    def remove_before(self, stream: Stream, partition: int, offset: int) -> None:
        self.cluster.delete_records(stream.url.rpartition("/")[2], partition, offset)


class RedisTopics(StreamKind):
    name = "redis"

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.server = server

    def new(self, partitions: int = 1, topic: str | None = None) -> Stream:
        return open_stream(f"redis://{self.server.address}/0/{topic or self.topic()}", partitions=partitions)

    def remove_before(self, stream: Stream, partition: int, offset: int) -> None:
        with redis.Redis(port=self.server.port) as client:
            key = f"{stream.url.rpartition('/')[2]}:{partition}"
            assert client.xtrim(key, minid=f"{offset >> 20}-{offset & 0xFFFFF}", approximate=False)


@contextmanager
def kind_of_streams(name: str, folder: Path) -> Iterator[StreamKind]:
    """One kind, with the server that it needs."""
    if name == "folder":
        yield Folders(folder)
    elif name == "kafka":
        with MockKafka() as cluster:
            yield KafkaTopics(cluster)
    else:
        with redis_server(folder / "redis") as server:
            yield RedisTopics(server)


def read(reader: StreamReader, count: int, *, max_records: int = 1000) -> dict[str, list[Records]]:
    """`count` records of the reader, by partition. They must come."""
    found: dict[str, list[Records]] = {}
    left = count
    while left > 0:
        got = reader.poll(min(max_records, left), 30.0)
        assert got, f"{left} of {count} records did not come"
        for records in got:
            assert len(records) > 0
            found.setdefault(records.partition, []).append(records)
            left -= len(records)
    assert left == 0, "more records than were asked for"
    return found


def values(parts: list[Records]) -> list[bytes]:
    return [value for records in parts for value in records.values]


def offsets(parts: list[Records]) -> list[int]:
    return [offset for records in parts for offset in records.offsets]


__all__ = ["KINDS", "StreamKind", "kind_of_streams", "offsets", "read", "values"]
