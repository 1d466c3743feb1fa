"""What stream, readers and writers of Kafka share: names of partitions, messages by column, and the state of the connection."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from monolith.errors import (
    InvalidArgumentError,
)
from monolith.streams.locations import without_secrets
from monolith.streams.stream import Headers, Records

__all__ = [
    "ASK_SECS",
    "GROUP",
    "KafkaErrors",
    "Librdkafka",
    "OWN",
    "Status",
    "TopicPartition",
    "partition_name",
    "records_of",
    "topic_and_number",
]

_logger = logging.getLogger(__name__)
GROUP = "monolith"
"""The group of a consumer that is in none."""
ASK_SECS = 10.0
"""How long one question to the broker may take."""
_LOG_SECS = 10.0
OWN = {"enable.auto.commit": "false", "enable.auto.offset.store": "false", "auto.offset.reset": "error"}
"""What users cannot set: the positions are in the state of the run, and a gap is never skipped silently."""
TopicPartition = tuple[str, int]
"""Name of a topic and number of a partition."""


class KafkaErrors(Protocol):
    """What a stream knows about errors of librdkafka."""

    @property
    def url(self) -> str:
        """Of the stream, for messages."""

    def error(self, error: Any, what: str) -> Exception:  # noqa: ANN401 - a KafkaError
        """Return our exception for it."""

    def is_passing(self, error: Any) -> bool:  # noqa: ANN401 - a KafkaError
        """Return whether librdkafka goes on trying by itself."""


class Status:
    """Logs when the broker does not answer, and when it does again. Keeps errors that waiting does not heal."""

    def __init__(self, stream: KafkaErrors) -> None:
        self._stream = stream
        self._logged = self._first = 0.0
        self._fatal: Exception | None = None

    def note(self, error: Any) -> None:  # noqa: ANN401 - a KafkaError
        """Called by librdkafka in its callbacks, and by readers for errors that pass."""
        if not self._stream.is_passing(error):
            self._fatal = self._stream.error(error, "failed")
            return
        now = time.monotonic()
        self._first = self._first or now
        if now - self._logged >= _LOG_SECS:
            self._logged = now
            _logger.warning("%s: %s (%s); waiting for it", self._stream.url, error.str(), error.name())

    def answered(self) -> None:
        """Called with every batch of records."""
        if self._first:
            _logger.warning("%s: answers again after %.1f s", self._stream.url, time.monotonic() - self._first)
            self._first = self._logged = 0.0

    def check(self) -> None:
        """Raise an error that waiting does not heal."""
        if self._fatal is not None:
            raise self._fatal


class Librdkafka(logging.Logger):
    """Takes librdkafka's own log lines, without secrets. They are for debugging: what matters is logged by `Status`."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(f"{__name__}.librdkafka")
        self.parent = _logger
        self._settings = settings

    def handle(self, record: logging.LogRecord) -> None:
        """Pass it on as a line of our own logger, at the level of debugging."""
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("librdkafka: %s", without_secrets(record.getMessage(), self._settings))


def records_of(name: str, messages: Sequence[Any]) -> Records:
    """Return the messages of one partition by column. There is at least one."""
    # `map` over the methods of the class costs half of a comprehension.
    kind = type(messages[0])
    offsets, values = list(map(kind.offset, messages)), list(map(kind.value, messages))
    headers, times = list(map(kind.headers, messages)), list(map(kind.timestamp, messages))
    if not all(values):
        values = [value or b"" for value in values]
    return Records(
        partition=name,
        offsets=offsets,
        next_offset=offsets[-1] + 1,
        # A kind of 0 says that there is none.
        timestamps=[when if kind else -1 for kind, when in times],
        keys=list(map(kind.key, messages)),
        values=values,
        headers=list(map(_headers, headers)) if any(headers) else None,
    )


def _headers(found: Sequence[tuple[str, bytes | None]] | None) -> Headers:
    return tuple((name, value or b"") for name, value in found) if found else ()


def partition_name(part: TopicPartition) -> str:
    """Return the name of a partition.

    Example:
        >>> partition_name(("clicks", 3))
        'clicks/3'
    """
    return f"{part[0]}/{part[1]}"


def topic_and_number(name: str) -> TopicPartition:
    """Return what `partition_name` was made of.

    Example:
        >>> topic_and_number("clicks/3")
        ('clicks', 3)
    """
    topic, _, number = name.rpartition("/")
    if not topic or not number.isdecimal():
        raise InvalidArgumentError(f"partition: expected a name such as 'clicks/3', got {name!r}")
    return topic, int(number)
