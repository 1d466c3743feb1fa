"""`KafkaReader`: reads partitions of Kafka from positions of ours, or as a member of a group."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from monolith.errors import (
    InvalidArgumentError,
    StreamGapError,
)
from monolith.optional_packages import import_extra
from monolith.process_bound import ProcessBound
from monolith.streams.kafka.client import (
    ASK_SECS,
    GROUP,
    OWN,
    Status,
    TopicPartition,
    partition_name,
    records_of,
    topic_and_number,
)
from monolith.streams.stream import END, START, Offset, Records

if TYPE_CHECKING:
    from monolith.streams.kafka.stream import KafkaStream

__all__ = ["KafkaReader"]

_logger = logging.getLogger(__name__)
# consume() cannot be interrupted, so a reader waits in parts of this length for `wake`.
_WAIT_SECS = 0.02


class KafkaReader:
    """Reads partitions of Kafka. Made by `KafkaStream.reader`. Used by one thread, except for `wake`.

    With `partitions.by=group` the broker divides the partitions among all readers of the group. A reader then has some of the
    partitions of `assign`, from the positions that the group last committed, or those of `assign` where it has none. What another
    reader had read and not committed comes again.

    Example:
        >>> from monolith.streams import open_stream
        >>> from monolith.testing.mock_kafka import MockKafka
        >>> with MockKafka({"clicks": 1}) as kafka:
        ...     stream = open_stream(kafka.url("clicks"))
        ...     with stream.writer() as writer, stream.reader() as reader:
        ...         writer.append(b"hello")
        ...         writer.flush()
        ...         reader.assign({"clicks/0": "start"})
        ...         [(records.partition, records.values) for records in reader.poll(10, timeout=60)]
        [('clicks/0', [b'hello'])]
    """

    def __init__(self, stream: KafkaStream, *, by_group: bool, reports: bool) -> None:
        self._stream, self._by_group, self._reports = stream, by_group, reports
        self._api = import_extra("confluent_kafka", extra="kafka", purpose="a stream of Kafka")
        self._status = Status(stream)
        defaults = {"group.id": GROUP, "enable.partition.eof": "false"}
        self._consumer = stream.new_client("Consumer", defaults, {**OWN, "error_cb": self._status.note})
        self._parts: dict[TopicPartition, str] = {}
        self._wanted: dict[str, int] = {}
        self._reading: dict[str, Offset] = {}
        self._ends: dict[str, int] = {}
        self._committed: dict[str, int] = {}
        self._woken = threading.Event()
        self._bound = ProcessBound("the reader of a stream")
        self._closed = False

    @property
    def assigned(self) -> list[str]:
        """Names of the partitions that are read now. With `partitions.by=group` they change."""
        return sorted(self._parts.values())

    def assign(self, positions: Mapping[str, Offset]) -> None:
        """As of every reader."""
        self._require_open("assign")
        if not self._by_group and self._continues(positions):
            return
        parts = dict(zip(self._stream.checked(positions), positions, strict=True))
        self._wanted = {name: self._start_of(part, name, positions[name]) for part, name in parts.items()}
        if self._by_group:
            topics = sorted({topic for topic, _ in parts})
            self._consumer.subscribe(topics, on_assign=self._given, on_revoke=self._taken, on_lost=self._lost)
            return
        self._parts = parts
        self._consumer.assign([self._api.TopicPartition(*part, self._wanted[name]) for part, name in parts.items()])
        self._reading = dict(positions)

    def _continues(self, positions: Mapping[str, Offset]) -> bool:
        """Return whether these partitions are being read from there on. Others are then no longer read.

        Assigning them again would throw away what librdkafka has fetched of them, and ask the broker for each of their offsets.
        """
        if END in positions.values() or not positions.items() <= self._reading.items():
            return False
        ended = [part for part, name in self._parts.items() if name not in positions]
        if ended:
            self._consumer.incremental_unassign([self._api.TopicPartition(*part) for part in ended])
        self._parts = {part: name for part, name in self._parts.items() if name in positions}
        self._reading = dict(positions)
        return True

    def poll(self, max_records: int, timeout: float) -> list[Records]:
        """As of every reader."""
        self._bound.require()
        self._require_open("poll")
        if max_records < 1:
            raise InvalidArgumentError(f"max_records: expected 1 or more, got {max_records}")
        deadline = time.monotonic() + timeout
        try:
            while True:
                messages = self._consumer.consume(max_records, 0)
                if not messages:
                    left = deadline - time.monotonic()
                    if self._woken.is_set() or left <= 0:
                        self._woken.clear()
                        self._status.check()
                        return []
                    messages = self._consumer.consume(1, min(left, _WAIT_SECS))
                    if messages and max_records > 1:
                        messages += self._consumer.consume(max_records - 1, 0)
                self._status.check()
                if found := self._sorted(messages):
                    self._status.answered()
                    return found
        except BaseException:
            # Messages may have been taken and not returned, so nothing goes on from where the caller is.
            self._reading = {}
            raise

    def ends(self) -> dict[str, int]:
        """As of every reader. As of the last answer of the broker."""
        for part, name in self._parts.items():
            low, high = self._consumer.get_watermark_offsets(self._api.TopicPartition(*part), cached=True)
            if high >= max(low, self._ends.get(name, 0)):
                self._ends[name] = high
        return {name: self._ends.get(name, 0) for name in self._parts.values()}

    def commit(self, positions: Mapping[str, int]) -> None:
        """As of every reader, if the settings have a `group.id`. With `partitions.by=group` these positions are handed over."""
        if not self._reports:
            return
        self._committed.update(positions)
        offsets = [self._api.TopicPartition(*topic_and_number(name), offset) for name, offset in positions.items()]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except self._api.KafkaException as error:
            _logger.warning("%s: positions were not committed: %s", self._stream.url, error.args[0].name())

    def wake(self) -> None:
        """As of every reader."""
        self._woken.set()

    def close(self) -> None:
        """As of every reader. Calling it twice is harmless."""
        if not self._closed and self._bound.is_here:
            self._closed = True
            self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise InvalidArgumentError(f"{what}: the reader is closed")

    def _start_of(self, part: TopicPartition, name: str, offset: Offset) -> int:
        low, high = self._stream.watermarks(part)
        self._ends[name] = high
        if offset == START:
            return low
        if offset == END:
            return high
        if not low <= offset <= high:
            raise StreamGapError(self._gap(name, offset, low, high))
        return offset

    def _gap(self, name: str, offset: int, low: int, high: int) -> str:
        if offset < low:
            return (
                f"{self._stream.url}: {name}: has no record {offset:,} any more: its oldest is {low:,}, older ones were removed "
                f"by retention. Start at the oldest, or let the broker keep records longer than the reader may be behind"
            )
        return (
            f"{self._stream.url}: {name}: has never had a record {offset:,}: its next one is {high:,}. Was the topic removed and "
            f"made again, or has the broker lost records?"
        )

    def _sorted(self, messages: Sequence[Any]) -> list[Records]:
        """Return the messages by partition. Raises what is wrong with one."""
        if not messages:
            return []
        kind = type(messages[0])
        if any(map(kind.error, messages)):
            messages = self._without_errors(messages)
        # They come in long runs of one partition.
        groups: dict[TopicPartition, list[Any]] = {}
        for _, run in itertools.groupby(
            messages, _topic_and_number if len(self._stream.topics) > 1 else kind.partition
        ):
            same = list(run)
            groups.setdefault(_topic_and_number(same[0]), []).extend(same)
        found = [records_of(name, groups[part]) for part, name in self._parts.items() if part in groups]
        for records in found:
            self._wanted[records.partition] = self._reading[records.partition] = records.next_offset
        return found

    def _without_errors(self, messages: Sequence[Any]) -> list[Any]:
        """Return the records among the messages. Raises what is wrong with one."""
        good = []
        for message in messages:
            error = message.error()
            if error is None:
                good.append(message)
            elif self._stream.is_gap(error):
                self._raise_gap(message)
            elif self._stream.is_passing(error):
                self._status.note(error)
            else:
                raise self._stream.error(error, f"{message.topic()}/{message.partition()}")
        return good

    def _raise_gap(self, message: Any) -> None:  # noqa: ANN401 - a Message
        part = (message.topic(), message.partition())
        name = partition_name(part)
        low, high = self._stream.watermarks(part)
        # Records that came in the same batch are not lost: the caller assigns from its own positions after this.
        raise StreamGapError(self._gap(name, self._wanted.get(name, message.offset()), low, high))

    def _given(self, consumer: Any, partitions: Sequence[Any]) -> None:  # noqa: ANN401 - a Consumer
        """Called in `poll` when the broker has given this reader its partitions."""
        committed = consumer.committed(list(partitions), timeout=ASK_SECS)
        start = []
        for each in committed:
            part = (each.topic, each.partition)
            name = partition_name(part)
            if name not in self._wanted:
                # It was added to the topic meanwhile.
                self._wanted[name] = self._start_of(part, name, START)
            offset = each.offset if each.offset >= 0 else self._wanted[name]
            start.append(self._api.TopicPartition(*part, offset))
            self._parts[part] = name
            self._wanted[name] = offset
        cooperative = self._cooperative(consumer)
        (consumer.incremental_assign if cooperative else consumer.assign)(start)
        _logger.info("%s: reads %s", self._stream.url, ", ".join(self.assigned) or "no partition")

    def _taken(self, consumer: Any, partitions: Sequence[Any]) -> None:  # noqa: ANN401 - a Consumer
        """Called in `poll` when the broker takes partitions away: their next reader begins at what was committed."""
        parts = [(each.topic, each.partition) for each in partitions]
        offsets = [
            self._api.TopicPartition(*part, self._committed[partition_name(part)])
            for part in parts
            if partition_name(part) in self._committed
        ]
        if offsets:
            try:
                consumer.commit(offsets=offsets, asynchronous=False)
            except self._api.KafkaException as error:
                _logger.warning("%s: positions were not handed over: %s", self._stream.url, error.args[0].name())
        self._lost(consumer, partitions)

    def _lost(self, consumer: Any, partitions: Sequence[Any]) -> None:  # noqa: ANN401 - a Consumer
        for each in partitions:
            self._parts.pop((each.topic, each.partition), None)
        if self._cooperative(consumer):
            consumer.incremental_unassign(list(partitions))
        else:
            consumer.unassign()

    def _cooperative(self, consumer: Any) -> bool:  # noqa: ANN401 - a Consumer
        protocol = getattr(consumer, "rebalance_protocol", None)
        return protocol is not None and protocol() == "COOPERATIVE"


def _topic_and_number(message: Any) -> TopicPartition:  # noqa: ANN401 - a Message
    return message.topic(), message.partition()
