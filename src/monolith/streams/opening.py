"""`open_stream`: a stream by its URL, whatever kind it is of."""

from __future__ import annotations

import os
from collections.abc import Mapping

from monolith.errors import InvalidArgumentError
from monolith.streams.folder import FolderStream, create_folder_stream
from monolith.streams.kafka import KafkaStream
from monolith.streams.redis import RedisStream
from monolith.streams.stream import Stream

__all__ = ["open_stream"]


def open_stream(
    url: str | os.PathLike[str], *, settings: Mapping[str, str] | None = None, partitions: int | None = None
) -> Stream:
    """Return the stream at `url`.

    Args:
        url: a folder (`runs/clicks/events`, or with `stream:` or `file://` in front), `kafka://host:9092,host2:9092/topic` with
            one or more topics, or `redis://host:6379/0/topic`.
        settings: what is not in the URL: of a folder the fields of `FolderSettings`, of Kafka librdkafka's settings. See
            docs/guide-streams.md.
        partitions: make the stream, with so many partitions, if it does not exist. One that exists may have more.

    Raises:
        InvalidArgumentError: the URL is not valid, there is no stream, or it has fewer partitions.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     open_stream(f"{folder}/clicks", partitions=2).partitions()
        ['clicks/0', 'clicks/1']
    """
    text = os.fspath(url).removeprefix("stream:")
    if text.startswith("kafka://"):
        return KafkaStream(text, settings, partitions)
    if text.startswith(("redis://", "rediss://")):
        return RedisStream(text, settings, partitions)
    if partitions is not None:
        create_folder_stream(text, partitions, settings)
    stream = FolderStream(text, settings)
    present = len(stream.partitions())
    if partitions is not None and present < partitions:
        raise InvalidArgumentError(
            f"partitions: {text} exists with {present}, fewer than {partitions}; add some with "
            f"`monolith stream add-partitions {text} {partitions - present}`"
        )
    return stream
