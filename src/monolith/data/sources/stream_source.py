"""`StreamSource`: batches from a stream, as records come, with positions by partition."""

from __future__ import annotations

import copy
import datetime
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import Field, JsonValue, model_validator

from monolith.config import Config, nearest_name
from monolith.data.messages import LONGEST_MESSAGE, MessageDecoder, StreamFormat
from monolith.data.sources.dead_letters import DeadLetters
from monolith.data.sources.event_times import EventTimes
from monolith.data.sources.records import RecordHeader
from monolith.data.sources.source import Column, PartitionLag, Source, SourcePosition, StreamLag, checked_columns
from monolith.data.sources.stream_reading import Place, StreamReading, is_before
from monolith.data.transforms.compose import Transform, Transformed
from monolith.errors import ConfigError, InvalidArgumentError, MonolithError
from monolith.features import Batch
from monolith.streams import END, Stream, StreamReader, open_stream

__all__ = ["StreamInput", "StreamOptions", "StreamSource"]

_COMMIT_SECS = 5.0
_Seconds = Annotated[float, Field(ge=0)]


class StreamOptions(Config):
    """How a stream is read.

    Example:
        >>> StreamOptions(batch_size=512, start="2026-01-31T12:00:00Z").start_timestamp()
        1769860800000
    """

    batch_size: Annotated[int, Field(ge=1)]
    """Most rows of a batch."""
    max_wait_secs: _Seconds = 0.1
    """A batch is handed out so long after its first record came, however few rows it has."""
    format: StreamFormat = "json"
    """How the value of a record is written."""
    header: RecordHeader | None = None
    """The header before each of the original's messages, as in record files. None: the value is only the message."""
    start: int | str | dict[str, int] = "start"
    """Where partitions are read from that were not read before: "start" (the oldest record), "end" (only what comes after the
    first read, or after `fix_start`), milliseconds since 1970, an ISO time with its zone, or the offset for each partition. Ones
    added later: their start."""
    until_end: bool = False
    """Read up to what the stream has at the beginning of a read, and then end. The next read starts again, as with files."""
    stop_when_idle_secs: Annotated[float, Field(gt=0)] | None = None
    """End when no record came for so long, but not before what there was at the beginning. None waits forever."""
    event_time: str | None = None
    """The column that has the time of the event. None: the timestamp of the record."""
    event_time_unit: Literal["s", "ms"] = "s"
    """Unit of that column. Timestamps of records are always in milliseconds."""
    lateness_secs: _Seconds = 0.0
    """The watermark is so far behind the newest event time of the slowest partition."""
    idle_secs: Annotated[float, Field(gt=0)] = 60.0
    """A partition without records for so long does not hold the watermark back."""
    late: Literal["keep", "drop", "dead-letter"] = "keep"
    """What becomes of rows that are older than the watermark. They are counted in any case."""
    max_future_secs: _Seconds | None = 3600.0
    """Rows whose event time is further in the future are bad. None allows any."""
    max_record_bytes: Annotated[int, Field(ge=1)] = LONGEST_MESSAGE
    """Longer records are bad."""
    allow_nan: bool = False
    """Whether NaN and infinity are allowed in columns of floats. Otherwise a record that has one is bad."""
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """If more than this share of the last 1,000 records (of at least 100) is bad, reading raises `SchemaError`."""
    on_gap: Literal["error", "skip"] = "error"
    """When records were removed before they were read: raise `StreamGapError`, or continue at the oldest one with a log line."""
    refresh_secs: Annotated[float, Field(gt=0)] = 30.0
    """How often partitions that were added are looked for."""
    read_ahead_bytes: Annotated[int, Field(ge=1)] = 16 << 20
    """Most bytes of records that are taken from the stream at once."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if isinstance(self.start, str) and self.start not in ("start", "end"):
            try:
                zone = datetime.datetime.fromisoformat(self.start).tzinfo
            except ValueError:
                zone = None
            if zone is None:
                raise ValueError(
                    'start: expected "start", "end", milliseconds since 1970, a time such as 2026-01-31T12:00:00Z with its zone, '
                    f"or offsets by partition, got {self.start!r}"
                )
        return self

    def start_timestamp(self) -> int:
        """Return `start` in milliseconds since 1970, if it is a time."""
        if isinstance(self.start, str):
            return int(datetime.datetime.fromisoformat(self.start).timestamp() * 1000)
        assert isinstance(self.start, int)
        return self.start


class StreamSource(Source):
    """Batches from a stream, as the records come: up to `batch_size` rows, or fewer `max_wait_secs` after the first of them.

    The position is the offset of the next record of each partition, and for a record of many rows the row in it. So it is the
    same whatever the batches were: every record is in exactly one batch relative to the state that is saved with it. Partition n
    belongs to shard n % count, and any number of shards can continue from `join_state_dicts`. Partitions that are added are
    picked up while it runs.

    A bad record is counted, logged, and written to `dead_letters`, at least once, before the batch after it is handed out:
    records that are not of the format and columns, too long, with NaN or infinity, or with an event time in the future.

    Args:
        stream: a stream, or its URL, see `open_stream`.
        columns: as of `MessageDecoder`.
        dead_letters: the stream, or its URL, that bad records are written to. A folder stream is made if there is none. None
            only counts and logs them.
        settings: for `open_stream`.
        clock, now: the clocks for intervals and for event times, for tests.

    All other arguments are the fields of `StreamOptions`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stream = open_stream(f"{folder}/clicks", partitions=1)
        ...     with stream.writer() as writer:
        ...         for user in (7, 8, 9):
        ...             writer.append(b'{"user": %d}' % user)
        ...     source = StreamSource(stream, [Column(name="user", shape=())], batch_size=2, until_end=True)
        ...     [batch["user"].tolist() for batch in source]
        [[7, 8], [9]]
    """

    def __init__(
        self,
        stream: Stream | str,
        columns: Iterable[Column],
        *,
        batch_size: int,
        max_wait_secs: float = 0.1,
        format: StreamFormat = "json",  # noqa: A002 - the word of the file formats
        header: RecordHeader | None = None,
        start: int | str | Mapping[str, int] = "start",
        until_end: bool = False,
        stop_when_idle_secs: float | None = None,
        event_time: str | None = None,
        event_time_unit: Literal["s", "ms"] = "s",
        lateness_secs: float = 0.0,
        idle_secs: float = 60.0,
        late: Literal["keep", "drop", "dead-letter"] = "keep",
        max_future_secs: float | None = 3600.0,
        max_record_bytes: int = LONGEST_MESSAGE,
        allow_nan: bool = False,
        max_bad_share: float = 0.5,
        on_gap: Literal["error", "skip"] = "error",
        refresh_secs: float = 30.0,
        read_ahead_bytes: int = 16 << 20,
        dead_letters: Stream | str | None = None,
        settings: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.columns = checked_columns(columns)
        self.options = StreamOptions(
            batch_size=batch_size,
            max_wait_secs=max_wait_secs,
            format=format,
            header=header,
            start=dict(start) if isinstance(start, Mapping) else start,
            until_end=until_end,
            stop_when_idle_secs=stop_when_idle_secs,
            event_time=event_time,
            event_time_unit=event_time_unit,
            lateness_secs=lateness_secs,
            idle_secs=idle_secs,
            late=late,
            max_future_secs=max_future_secs,
            max_record_bytes=max_record_bytes,
            allow_nan=allow_nan,
            max_bad_share=max_bad_share,
            on_gap=on_gap,
            refresh_secs=refresh_secs,
            read_ahead_bytes=read_ahead_bytes,
        )
        MessageDecoder(self.columns, format=format, header=header)
        self._require_event_time_column()
        self.stream = open_stream(stream, settings=settings) if isinstance(stream, str) else stream
        """The stream that is read."""
        self.waits = not until_end
        self._dead_letters, self._clock, self._now = dead_letters, clock, now
        self._begin_anew()
        super().__init__()

    def _require_event_time_column(self) -> None:
        name = self.options.event_time
        matching = [column for column in self.columns if column.name == name]
        if name is not None and not (matching and matching[0].shape in ((), (1,)) and matching[0].dtype == "int64"):
            raise InvalidArgumentError(
                f"event_time: expected the name of an int64 column with one value in each row, got {name!r}; the columns are "
                f"{', '.join(column.name for column in self.columns)}"
            )

    def _begin_anew(self) -> None:
        """Give this source, a new one or a shard, its own counts."""
        self._lock = threading.Lock()
        self._reader: StreamReader | None = None
        self._reading: StreamReading | None = None
        self._interruptions = 0
        self._resumed = False
        self._dead: DeadLetters | None = None
        self._late = self._lost = 0
        self._events = self._new_events()

    def _new_events(self) -> EventTimes:
        lateness = int(self.options.lateness_secs * 1000)
        return EventTimes(lateness_ms=lateness, idle_secs=self.options.idle_secs, clock=self._clock)

    def _start(self) -> SourcePosition:
        return {"partitions": "{}", "event_times": "{}"}

    def shard(self, index: int, count: int) -> Self:
        """Return a new source, at its beginning, with the partitions n of which n % count is `index`."""
        part = super().shard(index, count)
        part._begin_anew()
        return part

    def starting_at(self, start: int | str | Mapping[str, int]) -> Self:
        """Return a new source, at its beginning, that reads partitions it has not read before from `start` on."""
        fields = {**dict(self.options), "start": dict(start) if isinstance(start, Mapping) else start}
        other = copy.copy(self)
        other.options = StreamOptions(**fields)
        other._begin_anew()
        other._position = other._start()
        return other

    def fix_start(self) -> bool:
        """Decide now where `start="end"` is, so that the position says it before the first record is read.

        If the position is saved then, a run that is killed before its first batch loses no record: another end would come later.

        Returns:
            Whether the position has changed by that.
        """
        if self.options.start != END or self._resumed or _places(self._position["partitions"]):
            return False
        bounds = self.stream.bounds()
        places = {name: bounds[name][1] for name in self._mine(self.stream.partitions())}
        self._position = {**self._position, "partitions": orjson.dumps(places).decode()}
        return bool(places)

    def _mine(self, partitions: list[str]) -> list[str]:
        """Return those partitions that belong to this shard, whatever others are added later."""
        topics = sorted({name.rpartition("/")[0] for name in partitions})
        mine = []
        for name in partitions:
            topic, _, number = name.rpartition("/")
            if (topics.index(topic) + int(number)) % self._shard_count == self._shard_index:
                mine.append(name)
        return mine

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        seen = self._interruptions
        with self._open(position, lambda: self._interruptions != seen) as reading:
            next_commit = self._clock() + _COMMIT_SECS
            for batch in reading.batches():
                yield batch, self._position_of(reading)
                if self._clock() >= next_commit:
                    next_commit = self._clock() + _COMMIT_SECS
                    self._commit(reading)
            self._commit(reading)
            # Bad records at the end were in no batch.
            self._position = self._position_of(reading)

    def _open(
        self, position: SourcePosition, stopped: Callable[[], bool], stops: Mapping[str, Place] | None = None
    ) -> _OpenReading:
        if self._dead is None:
            self._dead = DeadLetters(
                self.stream.url,
                self._dead_stream(),
                shard=self._shard_index,
                max_bad_share=self.options.max_bad_share,
                clock=self._clock,
            )
        places = _places(position["partitions"])
        if self._resumed and not places and self.options.start == END:
            # Had no partition when the state was taken, so all of them are new, and their end is not that of then.
            places = dict.fromkeys(self._mine(self.stream.partitions()), "start")
        if not places:
            self._events = self._new_events()
        reading = StreamReading(
            self.stream,
            self.columns,
            self.options,
            places=places,
            newest=orjson.loads(str(position["event_times"])),
            select=self._mine,
            events=self._events,
            dead=self._dead,
            stopped=stopped,
            clock=self._clock,
            now=self._now,
            stops=stops,
        )
        return _OpenReading(self, reading)

    def _dead_stream(self) -> Stream | None:
        if not isinstance(self._dead_letters, str):
            return self._dead_letters
        in_a_folder = "://" not in self._dead_letters or self._dead_letters.startswith("file:")
        return open_stream(self._dead_letters, partitions=self._shard_count if in_a_folder else None)

    def _position_of(self, reading: StreamReading) -> SourcePosition:
        return {
            "partitions": orjson.dumps(reading.places).decode(),
            "event_times": orjson.dumps(self._events.newest).decode(),
        }

    def _commit(self, reading: StreamReading) -> None:
        reading.reader.commit({name: place for name, place in reading.places.items() if isinstance(place, int)})

    def interrupt(self) -> None:
        """Let a read that waits for records end at once, as if the stream had ended. Rows that came are handed out."""
        with self._lock:
            self._interruptions += 1
            if self._reader is not None:
                self._reader.wake()

    def lag(self) -> StreamLag:
        """Return how far the batches handed out are behind the stream. Called by any thread."""
        reading, dead = self._reading, self._dead
        places = reading.places if reading is not None else _places(self._position["partitions"])
        ends = {} if reading is None else reading.ends()
        newest, now_ms = self._events.newest, self._now() * 1000
        partitions = {}
        for name, place in sorted(places.items()):
            offset = 0 if place == "start" else place if isinstance(place, int) else place[0]
            end = max(ends.get(name, offset), offset)
            records = 0 if reading is None else reading.count_between(offset, end)
            partitions[name] = PartitionLag(offset=offset, end=end, records=records, newest_event_time=newest.get(name))
        behind = [newest.get(name) for name, part in partitions.items() if part.records]
        known = [event_time for event_time in behind if event_time is not None]
        return StreamLag(
            records=sum(part.records for part in partitions.values()),
            seconds=0.0 if not behind else max(0.0, (now_ms - min(known)) / 1000) if known else None,
            watermark=self._events.watermark,
            newest_event_time=max(newest.values(), default=None),
            late=self._late + (reading.late if reading is not None else 0),
            bad=0 if dead is None else dead.count,
            lost=self._lost + (reading.lost if reading is not None else 0),
            partitions=partitions,
        )

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue after the batch at which `state` was taken: by this shard, or by all shards of one joined by
        `join_state_dicts`.
        """
        own = {"shard_index": self._shard_index, "shard_count": self._shard_count}
        whole = state.get("shard_count") == 1
        super().load_state_dict({**state, **own} if whole else state)
        places, newest = _places(self._position["partitions"]), orjson.loads(str(self._position["event_times"]))
        self._resumed = bool(places)
        mine = set(self._mine(list(places)))
        self._position = {
            "partitions": orjson.dumps({name: place for name, place in places.items() if name in mine}).decode(),
            "event_times": orjson.dumps({name: each for name, each in newest.items() if name in mine}).decode(),
        }
        self._events = self._new_events()

    def _check(self, position: SourcePosition) -> None:
        for key, parse in (("partitions", _places), ("event_times", orjson.loads)):
            try:
                parse(str(position[key]))
            except (ValueError, TypeError, AttributeError):
                raise InvalidArgumentError(
                    f"state[{key!r}]: expected JSON as StreamSource.state_dict() gives it, got {position[key]!r}"
                ) from None

    def join_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, int | str]:
        """Return one position from those of all shards, which any number of shards can load.

        Raises:
            InvalidArgumentError: a shard is missing.
        """
        counts = {int(state["shard_count"]) for state in states}
        held = {(int(state["shard_index"]), int(state["shard_count"])) for state in states}
        if not any(all((index, count) in held for index in range(count)) for count in counts):
            raise InvalidArgumentError(
                f"states: expected those of all shards, got (index, count) {sorted(held)}; the partitions of the others would be "
                "read again from their start"
            )
        places: dict[str, Place] = {}
        newest: dict[str, int] = {}
        for state in states:
            for name, place in _places(state["partitions"]).items():
                # Positions only grow, so of two the larger one is the newer one.
                if name not in places or is_before(places[name], place):
                    places[name] = place
            for name, event_time in orjson.loads(state["event_times"]).items():
                newest[name] = max(event_time, newest.get(name, event_time))
        return {
            "partitions": orjson.dumps(places).decode(),
            "event_times": orjson.dumps(newest).decode(),
            "shard_index": 0,
            "shard_count": 1,
        }

    def replay(self, until: Mapping[str, Any]) -> Iterator[Batch]:
        """Yield the records between the position of this source and the position `until`, and move there.

        Raises:
            InvalidArgumentError: `until` is before the position of this source.
        """
        part = self.shard(0, 1)
        part.load_state_dict(until)
        stops, places = _places(part._position["partitions"]), _places(self._position["partitions"])
        for name, place in places.items():
            if name not in stops or is_before(stops[name], place):
                raise InvalidArgumentError(
                    f"until: expected a position at or after this one, got {stops.get(name)} for {name}, which is at {place}"
                )
        fresh = [name for name in stops if name not in places]
        if fresh and not places and self.options.start != "start":
            raise InvalidArgumentError(
                f"until: this source has not read yet, and start={self.options.start!r} does not say where {fresh[0]} began"
            )
        places.update(dict.fromkeys(fresh, "start"))
        begin = {**self._position, "partitions": orjson.dumps(places).decode()}
        with self._open(begin, lambda: False, stops) as reading:
            yield from reading.batches()
        self._position = part._position

    def __repr__(self) -> str:
        return f"StreamSource({self.stream.url!r}, shard {self._shard_index} of {self._shard_count})"


class _OpenReading:
    """A reading that `interrupt` can wake while it is open."""

    def __init__(self, source: StreamSource, reading: StreamReading) -> None:
        self._source, self._reading = source, reading

    def __enter__(self) -> StreamReading:
        with self._source._lock:
            self._source._reader, self._source._reading = self._reading.reader, self._reading
        return self._reading

    def __exit__(self, *exception: object) -> None:
        source, reading = self._source, self._reading
        with source._lock:
            source._reader = source._reading = None
            source._late += reading.late
            source._lost += reading.lost
        try:
            reading.close()
        finally:
            if source._dead is not None:
                source._dead.close()


def _places(text: object) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for name, place in orjson.loads(str(text)).items():
        if place == "start" or type(place) is int:
            places[name] = place
        elif isinstance(place, list) and len(place) == 2 and all(type(part) is int for part in place):
            places[name] = (place[0], place[1])
        else:
            raise ValueError(place)
    return places


class StreamInput(StreamOptions):
    """A stream as the input of a job: what `input` of a YAML file of `monolith train` may be instead of a function.

    Example:
        >>> StreamInput(stream="runs/clicks/events", columns=(Column(name="user", shape=()),), batch_size=512).format
        'json'
    """

    stream: str
    """URL of the stream."""
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]
    """The columns of the batches."""
    dead_letters: str | None = None
    """URL of the stream that bad records are written to."""
    settings: dict[str, str] = {}
    """What is not in the URL, see `open_stream`."""
    transforms: tuple[dict[str, dict[str, JsonValue]], ...] | None = None
    """Transforms of the batches, in order: each a name in `monolith.data.transforms` with its fields, such as
    `HashText: {columns: [user]}`. None: of an input none, of `then` those of the input."""

    def transformed(self, source: StreamSource) -> StreamSource | Transformed:
        """Return `source` with the transforms of the field.

        Raises:
            ConfigError: there is no such transform, or it does not take these fields.
        """
        made = self._made_transforms()
        return Transformed(source, *made) if made else source

    def _made_transforms(self) -> list[Transform]:
        return [_transform(name, fields) for each in self.transforms or () for name, fields in each.items()]

    def open(self, *, until_end: bool | None = None) -> StreamSource:
        """Return the source, without `transforms`. `until_end` overrides the field."""
        self._made_transforms()  # one that is wrong is said before anything is opened
        options = {name: getattr(self, name) for name in StreamOptions.model_fields}
        if until_end is not None:
            options["until_end"] = until_end
        return StreamSource(
            self.stream, self.columns, dead_letters=self.dead_letters, settings=self.settings or None, **options
        )


def _transform(name: str, fields: Mapping[str, JsonValue]) -> Transform:
    from monolith.data import transforms

    known = [each for each in transforms.__all__ if "__call__" in dir(getattr(transforms, each))]
    if name not in known:
        near = nearest_name(name, known)
        hint = f"did you mean {near!r}?" if near else "expected a name of monolith.data.transforms"
        raise ConfigError(f"StreamInput.transforms: there is no {name!r}; {hint}")
    kind = getattr(transforms, name)
    try:
        if isinstance(kind, type) and issubclass(kind, Config):
            made: Transform = kind.from_json(json.dumps(fields))  # type: ignore[assignment]
        else:
            inspect.signature(kind).bind(**fields)
            made = kind(**fields)
    except (TypeError, MonolithError) as error:
        raise ConfigError(f"StreamInput.transforms: {name}: {error}") from None
    return made
