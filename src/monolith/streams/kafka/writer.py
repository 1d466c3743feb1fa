"""`KafkaWriter`: appends to a topic of Kafka."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from monolith.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    MessageTooLargeError,
    UnavailableError,
)
from monolith.optional_packages import import_extra
from monolith.process_bound import ProcessBound
from monolith.streams.kafka.client import Status
from monolith.streams.stream import Headers, NewRecord, partition_of_key

if TYPE_CHECKING:
    from monolith.streams.kafka.stream import KafkaStream

__all__ = ["KafkaWriter"]

_SERVE_EVERY = 256


class KafkaWriter:
    """Appends to a topic of Kafka. Made by `KafkaStream.writer`.

    Records are in order, and in the topic once, also if the broker restarts: the producer is idempotent and waits for all
    replicas, unless the settings say otherwise.

    Example:
        >>> from monolith.streams import open_stream
        >>> from monolith.testing.mock_kafka import MockKafka
        >>> with MockKafka({"clicks": 1}) as kafka, open_stream(kafka.url("clicks")).writer() as writer:
        ...     writer.append(b"hello", key=b"user 7")
        ...     writer.flush()
    """

    def __init__(self, stream: KafkaStream, topic: str, partitions: Sequence[int], present: int) -> None:
        self._stream, self._topic, self._numbers, self._present = stream, topic, list(partitions), present
        self._api = import_extra("confluent_kafka", extra="kafka", purpose="a stream of Kafka")
        self._status = Status(stream)
        defaults = {"enable.idempotence": "true", "acks": "all", "linger.ms": "2"}
        more = {
            "error_cb": self._status.note,
            "on_delivery": self._delivered,
            "delivery.report.only.error": True,
        }
        self._producer = stream.new_client("Producer", defaults, more)
        self._failed, self._failure = 0, ""
        self._next = self._count = 0
        self._closed = False
        self._bound = ProcessBound("the writer of a stream")

    def append(
        self,
        value: bytes,
        *,
        partition: int | None = None,
        key: bytes | None = None,
        timestamp: int | None = None,
        headers: Headers = (),
    ) -> None:
        """As of every writer."""
        if self._closed:
            raise InvalidArgumentError("append: the writer is closed")
        if partition is None:
            partition = self._choose(key)
        elif not 0 <= partition < self._present:
            raise InvalidArgumentError(
                f"partition: expected 0 to {self._present - 1} of {self._topic}, got {partition}"
            )
        more = {"headers": list(headers)} if headers else {}
        when = time.time_ns() // 1_000_000 if timestamp is None else timestamp
        while True:
            try:
                self._producer.produce(self._topic, value, key, partition=partition, timestamp=when, **more)
                break
            except BufferError:
                # Records leave the queue, delivered or failed, at the latest after message.timeout.ms.
                self._producer.poll(0.1)
                self._status.check()
            except self._api.KafkaException as error:
                raise self._refused(error.args[0], len(value)) from None
        self._count += 1
        if self._count % _SERVE_EVERY == 0:
            self._producer.poll(0)
            self._status.check()

    def extend(self, records: Sequence[NewRecord], *, partition: int) -> None:
        """As of every writer."""
        for value, key, timestamp, headers in records:
            self.append(value, partition=partition, key=key, timestamp=timestamp, headers=headers)

    def flush(self, timeout: float | None = None) -> None:
        """As of every writer."""
        self._bound.require()
        left = self._producer.flush() if timeout is None else self._producer.flush(timeout)
        failed, self._failed = self._failed, 0
        if failed:
            raise UnavailableError(
                f"{self._stream.url}: {failed:,} records were not stored; the last one because of: {self._failure}"
            )
        self._status.check()
        if left:
            raise DeadlineExceededError(
                f"{self._stream.url}: {left:,} records were not stored within {timeout} seconds"
            )

    def close(self) -> None:
        """As of every writer. Calling it twice is harmless."""
        if not self._closed and self._bound.is_here:
            self._closed = True
            self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _choose(self, key: bytes | None) -> int:
        if key is not None:
            return partition_of_key(key, self._numbers)
        self._next = (self._next + 1) % len(self._numbers)
        return self._numbers[self._next]

    def _delivered(self, error: Any, message: Any) -> None:  # noqa: ANN401 - of librdkafka
        if error is not None:
            self._failed += 1
            self._failure = str(self._stream.error(error, f"{message.topic()}/{message.partition()}"))

    def _refused(self, error: Any, size: int) -> Exception:  # noqa: ANN401 - a KafkaError
        if error.code() == self._api.KafkaError.MSG_SIZE_TOO_LARGE:
            return MessageTooLargeError(
                f"{self._stream.url}: a record of {size:,} bytes is larger than the setting message.max.bytes"
            )
        return self._stream.error(error, self._topic)
