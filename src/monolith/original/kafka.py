"""`KafkaDataset` and `create_plain_kafka_dataset` under the original's names, as a thin layer over `StreamSource`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from monolith.data.messages import StreamFormat
from monolith.data.sources.records import RecordHeader
from monolith.data.sources.source import Column
from monolith.data.sources.stream_source import StreamSource
from monolith.errors import InvalidArgumentError
from monolith.streams import Stream, open_stream

__all__ = ["KafkaDataset", "create_plain_kafka_dataset"]

_FORMATS: dict[str, StreamFormat] = {
    "INSTANCE": "instance",
    "EXAMPLE": "example",
    "EXAMPLEBATCH": "example_batch",
    "EXAMPLE_BATCH": "example_batch",
}
_STARTS: dict[str, Literal["start", "end"]] = {
    **dict.fromkeys(("earliest", "smallest", "beginning"), "start"),
    **dict.fromkeys(("latest", "largest", "end"), "end"),
}
"""Values of librdkafka's `auto.offset.reset`."""
_DEFAULT_POLL_MS = 10_000


def _stream(
    topics: str | Sequence[str], group_id: str, servers: str | Sequence[str], other: str | Mapping[str, str] | None
) -> tuple[Stream, Literal["start", "end"]]:
    """Return the stream of topics on brokers, as lists or with commas between them, and where reading begins."""
    names, hosts = (value if isinstance(value, str) else ",".join(value) for value in (topics, servers))
    if not names or not hosts:
        raise InvalidArgumentError(
            "topics, servers: expected at least one of each, as a list or with commas between them"
        )
    settings = {"group.id": group_id}
    if isinstance(other, str):
        for pair in filter(None, other.split(",")):
            name, equals, value = pair.partition("=")
            if not equals:
                raise InvalidArgumentError(
                    f"kafka_other_metadata: expected name=value with commas between, got {pair!r}"
                )
            settings[name.strip()] = value.strip()
    else:
        settings.update(other or {})
    # Settings of topics and of clients have been one list in librdkafka for long.
    settings = {name.removeprefix("conf.topic."): value for name, value in settings.items()}
    reset = settings.pop("auto.offset.reset", "earliest")
    if reset not in _STARTS:
        raise InvalidArgumentError(f"auto.offset.reset: expected one of {', '.join(_STARTS)}, got {reset!r}")
    return open_stream(f"kafka://{hosts}/{names}", settings=settings), _STARTS[reset]


def _stop_secs(stream_timeout: int, message_poll_timeout: int) -> float | None:
    """Return the seconds without a message after which the original stops: so many whole polls as fit into the timeout."""
    if message_poll_timeout < 1:
        raise InvalidArgumentError(f"message_poll_timeout: expected 1 or more milliseconds, got {message_poll_timeout}")
    if stream_timeout == -1:
        return None
    if stream_timeout < 0:
        raise InvalidArgumentError(f"stream_timeout: expected -1 (forever) or milliseconds, got {stream_timeout}")
    timeout = max(stream_timeout, message_poll_timeout)
    return timeout // message_poll_timeout * message_poll_timeout / 1000


def KafkaDataset(  # noqa: N802 - the original's name
    topics: str | Sequence[str],
    group_id: str,
    servers: str | Sequence[str],
    columns: Iterable[Column],
    *,
    batch_size: int,
    input_pb_type: str = "INSTANCE",
    stream_timeout: int = -1,
    message_poll_timeout: int = _DEFAULT_POLL_MS,
    poll_batch_size: int | None = None,
    has_sort_id: bool | None = None,
    kafka_dump: bool = False,
    kafka_dump_prefix: bool = False,
    lagrangex_header: bool = False,
    kafka_other_metadata: str | Mapping[str, str] | None = None,
    **options: Any,  # noqa: ANN401 - those of StreamSource
) -> StreamSource:
    """Return a `StreamSource` of Kafka topics with the original's arguments.

    Args:
        topics: names, as a list or with commas between them.
        group_id: the group under which positions are reported to the broker. They are not read back.
        servers: brokers as host:port, as a list or with commas between them.
        columns: of the batches, as of `StreamSource`. The original makes examples, and parses them later.
        batch_size: rows of a batch.
        input_pb_type: INSTANCE, EXAMPLE or EXAMPLEBATCH.
        stream_timeout: stop when no message came for so many milliseconds. -1: never.
        message_poll_timeout: milliseconds of one wait. Timeouts count in whole polls: 25,000 with polls of 10,000 are 20,000.
        poll_batch_size: the original's number of messages of one poll. Reading polls as many as are there.
        has_sort_id, kafka_dump, kafka_dump_prefix, lagrangex_header: what precedes each message, see `RecordHeader`.
        kafka_other_metadata: settings of librdkafka, as a mapping or as name=value with commas between them.
            `auto.offset.reset` says where reading begins, by default at the oldest message.
        options: further arguments of `StreamSource`.

    Example:
        >>> from monolith.testing.mock_kafka import MockKafka
        >>> with MockKafka({"movie-train": 2}) as kafka:
        ...     source = KafkaDataset(
        ...         "movie-train", "cgonline", kafka.address, [Column(name="user")], batch_size=256, stream_timeout=25_000
        ...     )
        >>> source.options.format, source.options.stop_when_idle_secs
        ('instance', 20.0)
    """
    if input_pb_type.upper() not in _FORMATS:
        raise InvalidArgumentError(f"input_pb_type: expected INSTANCE, EXAMPLE or EXAMPLEBATCH, got {input_pb_type!r}")
    if poll_batch_size is not None and poll_batch_size < 1:
        raise InvalidArgumentError(f"poll_batch_size: expected 1 or more, got {poll_batch_size}")
    flags = {
        "sort_id": bool(has_sort_id),
        "kafka_dump": kafka_dump,
        "kafka_dump_prefix": kafka_dump_prefix,
        "lagrangex": lagrangex_header,
    }
    stream, start = _stream(topics, group_id, servers, kafka_other_metadata)
    return StreamSource(
        stream,
        columns,
        batch_size=batch_size,
        format=_FORMATS[input_pb_type.upper()],
        header=RecordHeader(**flags) if any(flags.values()) else None,
        stop_when_idle_secs=_stop_secs(stream_timeout, message_poll_timeout),
        **{"start": start, **options},
    )


def create_plain_kafka_dataset(
    topics: str | Sequence[str],
    group_id: str,
    servers: str | Sequence[str],
    *,
    stream_timeout: int = -1,
    message_poll_timeout: int = _DEFAULT_POLL_MS,
    poll_batch_size: int = 1024,
    kafka_other_metadata: str | Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[list[bytes]]:
    """Yield the values of messages as they are, at most `poll_batch_size` at a time.

    The arguments are those of `KafkaDataset`. -1 as `stream_timeout` is forever: in the original it ends the stream at the
    first message.

    Example:
        >>> from monolith.testing.mock_kafka import MockKafka
        >>> with MockKafka({"clicks": 1}) as kafka:
        ...     with open_stream(kafka.url("clicks")).writer() as writer:
        ...         writer.append(b"one")
        ...     dataset = create_plain_kafka_dataset("clicks", "mine", kafka.address)
        ...     next(dataset)
        [b'one']
    """
    if poll_batch_size < 1:
        raise InvalidArgumentError(f"poll_batch_size: expected 1 or more, got {poll_batch_size}")
    stop_secs = _stop_secs(stream_timeout, message_poll_timeout)
    stream, start = _stream(topics, group_id, servers, kafka_other_metadata)
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), start))
        last = clock()
        while stop_secs is None or clock() - last < stop_secs:
            values = [
                value
                for records in reader.poll(poll_batch_size, message_poll_timeout / 1000)
                for value in records.values
            ]
            if values:
                last = clock()
                yield values
