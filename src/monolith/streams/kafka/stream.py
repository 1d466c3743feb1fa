"""`KafkaStream`: topics of Apache Kafka, and of everything that speaks its protocol, through confluent-kafka (librdkafka)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from monolith.errors import (
    AuthenticationError,
    ConfigError,
    InvalidArgumentError,
    UnavailableError,
)
from monolith.optional_packages import import_extra
from monolith.streams.kafka.client import (
    ASK_SECS,
    GROUP,
    OWN,
    Librdkafka,
    TopicPartition,
    partition_name,
    records_of,
    topic_and_number,
)
from monolith.streams.kafka.reader import KafkaReader
from monolith.streams.kafka.writer import KafkaWriter
from monolith.streams.locations import refuse_secrets, resolved_settings, without_secrets
from monolith.streams.stream import Records

__all__ = ["KafkaStream"]

_logger = logging.getLogger(__name__)
_ASK_TIMES = 6


class KafkaStream:
    """One or more topics of Kafka. Made by `open_stream("kafka://host:9092,host2:9092/topic,topic2")`.

    Settings are those of librdkafka, such as `security.protocol`. `NAME.file` and `NAME.env` name a file or an environment
    variable that has the value of NAME. Settings of this module are `partitions.by` (`position`, the default, or `group`) and
    `replication.factor` (of a topic that is made).

    Example:
        >>> stream = KafkaStream("kafka://localhost:9092/clicks", {"security.protocol": "plaintext"})
        >>> stream.url
        'kafka://localhost:9092/clicks'
    """

    def __init__(self, url: str, settings: Mapping[str, str] | None = None, partitions: int | None = None) -> None:
        refuse_secrets(url)
        self.url = url
        servers, topics = _parsed(url)
        given = resolved_settings(settings)
        self._by: Literal["position", "group"] = _choice(given.pop("partitions.by", "position"))
        self._replication = given.pop("replication.factor", None)
        for name, value in OWN.items():
            if given.get(name, value) != value:
                raise ConfigError(
                    f"settings[{name!r}]: expected {value!r}, got {given[name]!r}: positions are kept with what was trained, and "
                    f"a gap is an error"
                )
        if self._by == "group" and "group.id" not in given:
            raise ConfigError("settings['group.id']: is needed with partitions.by=group")
        self._reports = "group.id" in given
        self._settings = {"bootstrap.servers": servers, **given}
        self.topics = topics
        """Their names."""
        self._api = import_extra("confluent_kafka", extra="kafka", purpose="a stream of Kafka")
        self._lock = threading.Lock()
        self._asking: Any = None
        self._asking_process = 0
        if partitions is not None:
            self._create(partitions)

    def partitions(self) -> list[str]:
        """As of every stream."""
        counts = self._counts()
        return [partition_name((topic, number)) for topic in sorted(counts) for number in range(counts[topic])]

    def bounds(self) -> dict[str, tuple[int, int]]:
        """As of every stream."""
        return {name: self.watermarks(topic_and_number(name)) for name in self.partitions()}

    def first_offset_at(self, timestamp: int) -> dict[str, int]:
        """As of every stream. The broker looks it up, by the timestamps of the records."""
        wanted = [self._api.TopicPartition(*topic_and_number(name), timestamp) for name in self.partitions()]
        found = self._asked("first_offset_at", lambda: self._client().offsets_for_times(wanted, timeout=ASK_SECS))
        offsets = {}
        for each in found:
            if each.error is not None:
                raise self.error(each.error, f"first_offset_at: {each.topic}/{each.partition}")
            part = (each.topic, each.partition)
            # Beyond the last record the broker answers with the mark of the end.
            offsets[partition_name(part)] = each.offset if each.offset >= 0 else self.watermarks(part)[1]
        return offsets

    def reader(self) -> KafkaReader:
        """As of every stream."""
        return KafkaReader(self, by_group=self._by == "group", reports=self._reports)

    def writer(self, partitions: Sequence[int] | None = None) -> KafkaWriter:
        """As of every stream. Of a stream of one topic."""
        if len(self.topics) != 1:
            raise InvalidArgumentError(f"writer: expected a stream of one topic, got {', '.join(self.topics)}")
        present = self._counts()[self.topics[0]]
        wanted = list(dict.fromkeys(range(present) if partitions is None else partitions))
        wrong = [number for number in wanted if not 0 <= number < present]
        if wrong or not wanted:
            raise InvalidArgumentError(
                f"partitions: expected some of 0 to {present - 1} of {self.url}, got {wrong[0] if wrong else 'none'}"
            )
        return KafkaWriter(self, self.topics[0], wanted, present)

    def last(self, partition: str) -> Records | None:
        """As of every stream."""
        (part,) = self.checked([partition])
        low, high = self.watermarks(part)
        back = 1
        with self.consumer({"enable.partition.eof": "true"}) as consumer:
            # The last offset may be a mark of a transaction, or of a record that was compacted away.
            while low < high:
                start = max(low, high - back)
                consumer.assign([self._api.TopicPartition(*part, start)])
                found = self._until_end(consumer, partition)
                if found:
                    return records_of(partition, found[-1:])
                if start == low:
                    break
                back *= 16
        return None

    def __repr__(self) -> str:
        return f"KafkaStream({self.url!r})"

    def checked(self, names: Iterable[str]) -> list[TopicPartition]:
        """Return topic and number of partitions, after a check that this stream has them."""
        counts, parts = self._counts(), []
        for name in names:
            topic, number = topic_and_number(name)
            if not 0 <= number < counts.get(topic, 0):
                ranges = ", ".join(f"{each}/0 to {each}/{count - 1}" for each, count in sorted(counts.items()))
                raise InvalidArgumentError(f"positions: expected partitions of {ranges}, got {name!r}")
            parts.append((topic, number))
        return parts

    def watermarks(self, part: TopicPartition) -> tuple[int, int]:
        """Return the offsets of the oldest record of a partition and of the next one."""
        wanted = self._api.TopicPartition(*part)
        low, high = self._asked(
            partition_name(part), lambda: self._client().get_watermark_offsets(wanted, timeout=ASK_SECS, cached=False)
        )
        return low, high

    @contextmanager
    def consumer(self, more: Mapping[str, str]) -> Iterator[Any]:
        """Yield a consumer for a short use."""
        consumer = self.new_client("Consumer", {"group.id": GROUP, **OWN}, more)
        try:
            yield consumer
        finally:
            consumer.close()

    def new_client(self, kind: str, defaults: Mapping[str, str], more: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Return a `Consumer` or `Producer` with our defaults below the user's settings, and `more` above them."""
        settings = {**defaults, **self._settings, **more}
        try:
            return getattr(self._api, kind)({**settings, "logger": Librdkafka(self._settings)})
        except (self._api.KafkaException, ValueError, TypeError) as error:
            text = error.args[0].str() if isinstance(error, self._api.KafkaException) else str(error)
            raise ConfigError(f"settings: {without_secrets(text, self._settings)}") from None

    def error(self, error: Any, what: str) -> Exception:  # noqa: ANN401 - a KafkaError
        """Return our exception for an error of librdkafka."""
        text = f"{self.url}: {what}: {without_secrets(error.str(), self._settings)}"
        code, codes = error.code(), self._api.KafkaError
        if code in (codes._AUTHENTICATION, codes.SASL_AUTHENTICATION_FAILED, codes.TOPIC_AUTHORIZATION_FAILED):
            return AuthenticationError(text)
        return UnavailableError(text)

    def is_passing(self, error: Any) -> bool:  # noqa: ANN401 - a KafkaError
        """Return whether librdkafka goes on trying by itself."""
        codes = self._api.KafkaError
        passing = (codes._TRANSPORT, codes._ALL_BROKERS_DOWN, codes._TIMED_OUT, codes._RESOLVE, codes._PARTITION_EOF)
        return not error.fatal() and (error.retriable() or error.code() in passing)

    def is_gap(self, error: Any) -> bool:  # noqa: ANN401 - a KafkaError
        """Return whether the broker does not have the offset that was asked for."""
        return error.code() in (self._api.KafkaError._AUTO_OFFSET_RESET, self._api.KafkaError.OFFSET_OUT_OF_RANGE)

    def _client(self) -> Any:  # noqa: ANN401 - a Consumer
        """Return the consumer that asks for topics and offsets, which reads nothing. A forked child makes its own."""
        with self._lock:
            if self._asking is None or self._asking_process != os.getpid():
                self._asking = self.new_client("Consumer", {"group.id": GROUP, **OWN}, {})
                self._asking_process = os.getpid()
            return self._asking

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:  # noqa: ANN401 - what `ask` returns
        """Return what `ask` returns, after some tries while the broker restarts."""
        for attempt in range(1, _ASK_TIMES + 1):
            begun = time.monotonic()
            try:
                return ask()
            except self._api.KafkaException as error:
                # Just after a connection was lost, partitions are unknown for a moment.
                unknown = error.args[0].code() == self._api.KafkaError._UNKNOWN_PARTITION
                if attempt == _ASK_TIMES or not (unknown or self.is_passing(error.args[0])):
                    raise self.error(error.args[0], what) from None
                _logger.warning("%s: %s: %s; trying again", self.url, what, error.args[0].name())
                time.sleep(max(0.0, min(1.0, 0.1 * 2**attempt) - (time.monotonic() - begun)))
        raise AssertionError

    def _counts(self) -> dict[str, int]:
        """Return the number of partitions of each topic."""
        counts = self._present()
        missing = [topic for topic in self.topics if topic not in counts]
        if missing:
            raise InvalidArgumentError(
                f"{self.url}: there is no topic {missing[0]!r}. Make it with `monolith stream create {self.url} --partitions 4`, "
                f"or with the tools of the broker"
            )
        return counts

    def _present(self) -> dict[str, int]:
        counts = {}
        for topic in self.topics:
            found = self._asked(topic, partial(self._list, topic))
            entry = found.topics[topic]
            if entry.error is None:
                counts[topic] = len(entry.partitions)
            elif entry.error.code() != self._api.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self.error(entry.error, topic)
        return counts

    def _list(self, topic: str) -> Any:  # noqa: ANN401 - metadata of the cluster
        return self._client().list_topics(topic, timeout=ASK_SECS)

    def _create(self, partitions: int) -> None:
        present = self._present()
        missing = [topic for topic in self.topics if topic not in present]
        fewer = [topic for topic, count in present.items() if count < partitions]
        if fewer:
            raise InvalidArgumentError(
                f"partitions: topic {fewer[0]} exists with {present[fewer[0]]}, fewer than {partitions}; add some with the tools "
                f"of the broker"
            )
        if not missing:
            return
        admin_api = import_extra("confluent_kafka.admin", extra="kafka", purpose="making a topic of Kafka")
        admin = admin_api.AdminClient({**self._settings, "logger": Librdkafka(self._settings)})
        replication = int(self._replication or -1)
        futures = admin.create_topics(
            [admin_api.NewTopic(topic, partitions, replication) for topic in missing], request_timeout=ASK_SECS
        )
        for topic, future in futures.items():
            try:
                future.result(2 * ASK_SECS)
            except self._api.KafkaException as error:
                if error.args[0].code() != self._api.KafkaError.TOPIC_ALREADY_EXISTS:
                    raise self.error(error.args[0], f"topic {topic} cannot be made") from None

    def _until_end(self, consumer: Any, name: str) -> list[Any]:  # noqa: ANN401 - a Consumer
        """Return the messages of the assigned partition until its end."""
        found, deadline = list[Any](), time.monotonic() + _ASK_TIMES * ASK_SECS
        while time.monotonic() < deadline:
            for message in consumer.consume(500, 0.1):
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == self._api.KafkaError._PARTITION_EOF:
                    return found
                elif not self.is_passing(error):
                    raise self.error(error, name)
        raise UnavailableError(f"{self.url}: {name}: the broker did not answer within {_ASK_TIMES * ASK_SECS:.0f} s")


def _parsed(url: str) -> tuple[str, list[str]]:
    servers, slash, topics = url.removeprefix("kafka://").partition("/")
    named = [topic for topic in topics.split(",") if topic]
    if not servers or not slash or not named or any("/" in topic or "?" in topic for topic in named):
        raise InvalidArgumentError(f"url: expected kafka://host:9092,host2:9092/topic,topic2, got {url!r}")
    return servers, list(dict.fromkeys(named))


def _choice(text: str) -> Literal["position", "group"]:
    if text not in ("position", "group"):
        raise ConfigError(f"settings['partitions.by']: expected 'position' or 'group', got {text!r}")
    return "group" if text == "group" else "position"
