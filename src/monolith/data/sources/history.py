"""`HistoryThenStream`: files first and then the stream that continues them, as one source with one position."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from monolith.data.sources.records import RecordFileSource, RecordHeader
from monolith.data.sources.source import FileSource, HasLag, StreamLag
from monolith.data.sources.stream_source import StreamSource
from monolith.data.sources.tables import ParquetSource, newest_value, stream_range
from monolith.data.transforms.compose import Shuffle, Transformed
from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch

__all__ = ["HistoryThenStream", "file_source_of", "kafka_like", "start_after", "transformed_like"]

_log = logging.getLogger(__name__)
_HISTORY, _STREAM = "history", "stream"


class HistoryThenStream:
    """The batches of `history`, in `epochs` passes, and then those of `stream`, which has no end.

    Which of the two is read is part of the position: a run that is started again continues there, and never reads the history
    again. A run that was trained on the history alone goes on with the stream. Each shard of several goes on when its part of the
    history ends. With another number of shards only the stream can be continued.

    Args:
        history: a source with an end, such as files.
        stream: where it continues. `StreamSource(start=...)` says at which record, see `start_after`.
        epochs: passes over the history.

    Example:
        >>> import tempfile, torch
        >>> from monolith.data import Column, IteratorSource, StreamSource
        >>> from monolith.streams import open_stream
        >>> history = IteratorSource(lambda: iter([{"user": torch.tensor([1, 2])}]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stream = open_stream(f"{folder}/clicks", partitions=1)
        ...     with stream.writer() as writer:
        ...         writer.append(b'{"user": 3}')
        ...     live = StreamSource(stream, [Column(name="user", shape=())], batch_size=2, stop_when_idle_secs=0.01)
        ...     [batch["user"].tolist() for batch in HistoryThenStream(history, live)]
        [[1, 2], [3]]
    """

    waits = True
    """The stream waits for records."""

    def __init__(self, history: Any, stream: Any, *, epochs: int = 1) -> None:  # noqa: ANN401 - sources, and what wraps them
        if epochs < 1:
            raise InvalidArgumentError(f"epochs: expected at least 1, got {epochs}")
        for name, source in ((_HISTORY, history), (_STREAM, stream)):
            if not (hasattr(source, "state_dict") and getattr(source, "resumable", True)):
                raise InvalidArgumentError(
                    f"{name}: expected a source with a position, or a restarted run would not know where it is; got a "
                    f"{type(source).__name__}"
                )
        if getattr(history, "waits", False):
            raise InvalidArgumentError(f"history: expected a source with an end, got a {type(history).__name__}")
        self.history, self.stream, self.epochs = history, stream, epochs
        self._epoch, self._phase = 0, _HISTORY

    @property
    def phase(self) -> str:
        """What is read now, "history" or "stream"."""
        return self._phase

    def __iter__(self) -> Iterator[Batch]:
        """Continue after the last batch handed out. At its end the stream is read on, and the history not again."""
        yield from self._passes()
        yield from self.stream

    def _passes(self) -> Iterator[Batch]:
        """Read what is left of the history."""
        while self._phase == _HISTORY:
            yield from self.history
            self._epoch += 1
            if self._epoch >= self.epochs:
                self.skip_history()
                _log.info("the history ended, the run goes on with %s", _named(self.stream))

    def skip_history(self) -> None:
        """Begin with the stream: the history is trained already."""
        self._phase = _STREAM

    def interrupt(self) -> None:
        """Let a read of the stream that waits for records end at once. Called by another thread."""
        if getattr(self.stream, "waits", False):
            self.stream.interrupt()

    def fix_start(self) -> bool:
        """Decide now where the stream begins, if that is its end: what comes during the history is not lost then.

        Returns whether the position has changed by that.
        """
        return bool(getattr(self.stream, "waits", False)) and bool(self.stream.fix_start())

    def lag(self) -> StreamLag | None:
        """Return how far the stream is behind. None while the history is read."""
        return self.stream.lag() if self._phase == _STREAM and isinstance(self.stream, HasLag) else None

    def shard(self, index: int, count: int) -> HistoryThenStream:
        """Return the part of worker `index` of `count`, at its beginning."""
        for source in (self.history, self.stream):
            if not hasattr(source, "shard"):
                raise InvalidArgumentError(f"source: a {type(source).__name__} cannot be sharded")
        return HistoryThenStream(self.history.shard(index, count), self.stream.shard(index, count), epochs=self.epochs)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out."""
        history = {"history": self.history.state_dict()} if self._phase == _HISTORY else {}
        return {"phase": self._phase, "epoch": self._epoch, **history, "stream": self.stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where `state` was taken: by this source, or by a run of the history or of the stream alone."""
        if "phase" not in state:
            self._phase, self._epoch = self._phase_of(state), 0
            (self.history if self._phase == _HISTORY else self.stream).load_state_dict(state)
            return
        if state["phase"] == _HISTORY:
            self.history.load_state_dict(state["history"])
        self.stream.load_state_dict(state["stream"])
        self._phase, self._epoch = str(state["phase"]), int(state["epoch"])

    def _phase_of(self, state: Mapping[str, Any]) -> str:
        """Return the phase of a position, which may be that of the history or of the stream alone."""
        if "phase" in state:
            return str(state["phase"])
        return _HISTORY if state.keys() == self.history.state_dict().keys() else _STREAM

    def join_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one position from those of all shards, once all of them read the stream."""
        behind = [number for number, state in enumerate(states) if self._phase_of(state) == _HISTORY]
        if behind:
            raise InvalidArgumentError(
                f"shards {behind} of {len(states)} still read the history, whose positions are those of so many shards: continue "
                f"with {len(states)} until the stream is reached"
            )
        streams = [state["stream"] if "phase" in state else state for state in states]
        return {"phase": _STREAM, "epoch": self.epochs, "stream": self.stream.join_state_dicts(streams)}

    def replay(self, until: Mapping[str, Any]) -> Iterator[Batch]:
        """Yield the records between this position and the position `until`, and move there."""
        for batch in self._passes():
            yield batch
            if self.state_dict() == until:
                return
        if until["phase"] != _STREAM:
            raise InvalidArgumentError("until: expected a position at or after this one, got one in the history")
        yield from self.stream.replay(until["stream"])

    def __repr__(self) -> str:
        return f"HistoryThenStream({self.history!r}, {self.stream!r})"


def _named(source: object) -> str:
    """Return what a person calls a source: a stream by its URL."""
    while isinstance(source, Transformed | Shuffle):
        source = source._source
    return source.stream.url if isinstance(source, StreamSource) else f"a {type(source).__name__}"


def file_source_of(source: object) -> FileSource | None:
    """Return the source of files inside of transforms and shuffling. None if there is another one.

    Example:
        >>> file_source_of([])
    """
    while isinstance(source, Transformed | Shuffle):
        source = source._source
    return source if isinstance(source, FileSource) else None


def kafka_like(history: Iterable[Batch], *, servers: str, topics: str, group: str | None) -> StreamSource | Transformed:
    """Return a Kafka stream with the columns, message format, batch size and transforms of a source of record files.

    Args:
        history: `RecordFileSource`, or one inside of transforms.
        servers: `host:port` of brokers, separated by commas.
        topics: their names, separated by commas.
        group: the consumer group under which the position is reported to tools that monitor Kafka.

    Raises:
        InvalidArgumentError: it is another source.
    """
    files = file_source_of(history)
    if not isinstance(files, RecordFileSource):
        raise InvalidArgumentError(
            f"RunConfig.kafka_topics: expected data in RecordFileSource, whose messages are those on Kafka, got a "
            f"{type(history).__name__}; give a StreamSource of the topic as the data instead"
        )
    stream = StreamSource(
        f"kafka://{servers}/{topics}",
        files.columns,
        batch_size=files.batch_size,
        format=files.format,
        header=None if files.header == RecordHeader() else files.header,
        settings=None if group is None else {"group.id": group},
    )
    return transformed_like(stream, history)


def transformed_like(stream: StreamSource, history: object) -> StreamSource | Transformed:
    """Return `stream` with the transforms of `history`. Shuffling is left out, because it would hold records back.

    Example:
        >>> transformed_like("a stream", [])
        'a stream'
    """
    if isinstance(history, Shuffle):
        return transformed_like(stream, history._source)
    if not isinstance(history, Transformed):
        return stream
    inner = transformed_like(stream, history._source)
    return Transformed(inner, *history._transform.for_shard(0).transforms)


def start_after(history: Iterable[Batch], stream: StreamSource) -> dict[str, int] | int:
    """Return where `stream` continues after the Parquet files of `history`, as `StreamSource(start=...)` takes it.

    Files of `monolith join` say which offsets they have, so that no record is lost or repeated. Otherwise it is the newest
    value of the stream's `event_time` column in them, milliseconds since 1970: records that were written since, some of which
    may be in the files too.

    Raises:
        InvalidArgumentError: neither is known.
    """
    source = file_source_of(history)
    what = f"a {type(history).__name__}" if source is None else f"{type(source).__name__}"
    if not isinstance(source, ParquetSource):
        raise InvalidArgumentError(_unknown(f"the history is {what}, which does not say where it ends"))
    ranges = [stream_range(file) for file in source.files]
    if all(ranges):
        return _next_offsets([json.loads(text) for text in ranges if text], stream)
    if any(ranges):
        without = source.files[ranges.index(None)]
        raise InvalidArgumentError(_unknown(f"{without} does not say which records it has, other files do"))
    column = stream.options.event_time
    if column is None:
        raise InvalidArgumentError(_unknown("its files name no offsets, and the stream has no event_time column"))
    field = next((one.source for one in source.columns if one.name == column), column)
    newest = [value for file in source.files if (value := newest_value(file, field)) is not None]
    if not newest:
        raise InvalidArgumentError(_unknown(f"its files have no statistics of column {field!r}"))
    start = max(newest) * (1 if stream.options.event_time_unit == "ms" else 1000)
    _log.info("the stream begins at the newest event time of the history, %d ms: records near it may be in both", start)
    return start


def _next_offsets(ranges: Sequence[Mapping[str, Any]], stream: StreamSource) -> dict[str, int]:
    offsets: dict[str, int] = {}
    for part in sorted(ranges, key=lambda one: (str(one["partition"]), int(one["first_offset"]))):
        name, first = str(part["partition"]), int(part["first_offset"])
        if offsets.get(name, first) != first:
            raise InvalidArgumentError(
                _unknown(
                    f"partition {name} has files up to offset {offsets[name]:,} and from {first:,} on: one is missing"
                )
            )
        offsets[name] = int(part["next_offset"])
    there = set(stream.stream.partitions())
    if unknown := sorted(offsets.keys() - there):
        raise InvalidArgumentError(
            _unknown(f"its files are of partition {unknown[0]}, which {stream.stream.url} does not have")
        )
    return offsets


def _unknown(why: str) -> str:
    return (
        f"then_from: after-history is not known: {why}. Say where the stream begins: start, end, a time such as "
        "2026-01-31T12:00:00Z, or offsets by partition"
    )
