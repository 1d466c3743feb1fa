"""The calls by which followers read a feed, and their messages. A run, a parameter server and a rank answer them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from monolith.config import Config
from monolith.errors import InvalidArgumentError, OverloadedError, ProtocolError
from monolith.follow.feed import ANSWER_BYTES, Feed, FeedView, LogPosition, row_bytes
from monolith.follow.segments import MAX_SEGMENTS, FeedSegment
from monolith.table.buckets import NUM_BUCKETS
from monolith.transport.calls import Answer, CallNumber, Handlers, WireInt, WireName, message_of
from monolith.transport.frames import Frame

__all__ = [
    "Confirm",
    "Confirmed",
    "DenseNames",
    "Follow",
    "FollowCall",
    "FollowCalls",
    "Followed",
    "ReadBuckets",
    "ReadIds",
    "ReceivedRows",
    "RowsOfBuckets",
    "SegmentHeader",
    "TableHeader",
    "changes_in",
    "ids_in",
    "rows_in",
    "weights_in",
]

MAX_WAIT = 30.0
"""Seconds that a follower may let the server wait for changes."""
MAX_READERS = 2
"""Requests for rows that are answered at the same time. Their answers are made in the memory of the run or server."""
MAX_READ_SECS = 10.0
"""Seconds that a request for rows waits for others."""
MAX_MOVED = 1024
"""Addresses of servers in one answer."""

_Bucket = Annotated[int, Field(ge=0, le=NUM_BUCKETS)]
_Ranges = Annotated[tuple[tuple[_Bucket, _Bucket], ...], Field(max_length=NUM_BUCKETS)]
_EventTime = Annotated[int, Field(ge=0, lt=2**32)]
_Address = Annotated[str, Field(min_length=1, max_length=255)]


class FollowCall(CallNumber):
    """The calls on a feed."""

    FOLLOW = 160
    """The segments after a position. Waits for the next one."""
    READ_BUCKETS = 161
    """All rows of some buckets of a table."""
    READ_IDS = 162
    """The rows of some ids of a table."""
    READ_WEIGHTS = 163
    """The newest dense weights."""
    CONFIRM = 164
    """Publish everything, and wait until all followers have it."""


class Confirm(Config):
    """Ask whether all followers have what was written before."""

    wait: Annotated[float, Field(ge=0, le=MAX_WAIT)] = 5.0
    """Seconds to wait for them."""


class Confirmed(Config):
    """The answer to `Confirm`."""

    followers: WireInt
    """How many have asked for segments lately."""
    confirmed: WireInt
    """How many of them have applied everything that was written before."""


class Follow(Config):
    """Ask for what comes after a position."""

    follower: WireInt = 0
    """Drawn by the follower, so that the writer knows who has what."""

    stream: WireInt = 0
    """The stream that the position belongs to. 0: none, the follower has nothing yet."""
    since: WireInt = 0
    """The last segment applied."""
    dense_version: WireInt = 0
    """The version of the dense weights that the follower has."""
    log_sequence: WireInt = 0
    """The segment of the writer's change log that has everything which the follower knows to be durable. 0: none."""
    log_checksum: WireInt = 0
    wait: Annotated[float, Field(ge=0, le=MAX_WAIT)] = 1.0
    """Seconds to wait if there is nothing yet."""
    max_bytes: Annotated[int, Field(ge=1, le=ANSWER_BYTES)] = ANSWER_BYTES
    """Bytes of the answer. One segment is sent in any case."""

    @property
    def log(self) -> LogPosition | None:
        """The position in the change log. None if there is none."""
        if not self.log_sequence:
            return None
        return LogPosition(sequence=self.log_sequence, checksum=self.log_checksum)


class TableHeader(Config):
    """A table of a segment. Its arrays follow: ids, values, erased."""

    name: WireName
    scales: tuple[float, ...] = ()
    event_time: _EventTime = 0


class SegmentHeader(Config):
    """A segment without its arrays."""

    sequence: WireInt
    step: WireInt
    event_time: WireInt
    age: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since the moment up to which all changes are in this segment or in earlier ones."""
    gained: _Ranges = ()
    tables: tuple[TableHeader, ...] = ()


class Followed(Config):
    """The answer to `Follow`."""

    state: Literal["segments", "rewind", "resync"]
    """`segments`: those after `since`. `rewind`: read what was not durable again, and the ids in the arrays that follow, one for
    each table of `changed`. Then continue from 0 in the new stream. `resync`: read all rows again, then go on from `newest`."""
    stream: WireInt
    newest: WireInt
    segments: Annotated[tuple[SegmentHeader, ...], Field(max_length=MAX_SEGMENTS)] = ()
    age: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since the moment up to which all changes are in `newest` or in earlier segments."""
    durable: WireInt
    """The last segment whose changes are all in the change log."""
    log_sequence: WireInt = 0
    log_checksum: WireInt = 0
    dense_version: WireInt
    step: WireInt
    event_time: WireInt
    ranges: _Ranges = ()
    """The buckets that the writer owns."""
    rows: dict[str, WireInt] = {}
    """Rows of each table."""
    changed: tuple[WireName, ...] = ()
    """Tables with rows that the writer's log has changed after the position of the follower. Only with `rewind`."""
    moved_to: Annotated[tuple[_Address, ...], Field(max_length=MAX_MOVED)] = ()
    """Addresses of servers that buckets were given to."""
    run: str = ""
    """The identity of the run. Empty if the writer does not know it."""


class ReadBuckets(Config):
    """Ask for all rows of some buckets."""

    table: WireName
    first: _Bucket
    end: _Bucket


class RowsOfBuckets(Config):
    """The answer to `ReadBuckets`. The ids and the values of the rows follow."""

    end: _Bucket
    """They are the rows of the buckets before this one. If it is not the one that was asked for, ask for the rest."""


class ReadIds(Config):
    """Ask for the rows of the ids in the request's only array."""

    table: WireName


class DenseNames(Config):
    """The names of the weights whose arrays follow."""

    version: WireInt
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReceivedRows:
    """What a segment has of one table, as a follower receives it."""

    table: TableHeader
    ids: np.ndarray
    """int64 [n]."""
    values: np.ndarray
    """float32 [n, dim]."""
    erased: np.ndarray
    """int64 [m]."""


def changes_in(answer: Followed, frame: Frame, *, since: int) -> list[tuple[SegmentHeader, list[ReceivedRows]]]:
    """Return the segments of an answer with their arrays. Raises `ProtocolError` before anything is used."""
    tables = sum(len(segment.tables) for segment in answer.segments)
    _require_arrays(frame, 3 * tables, f"{len(answer.segments)} segments of {tables} tables")
    arrays: Iterator[np.ndarray] = iter(frame.arrays)
    found = []
    for segment in answer.segments:
        if not since < segment.sequence <= answer.newest:
            raise ProtocolError(f"segment: expected a number in ({since}, {answer.newest}], got {segment.sequence}")
        since = segment.sequence
        changes = []
        for table in segment.tables:
            ids, values, erased = next(arrays), next(arrays), next(arrays)
            _require_rows(table.name, ids, values)
            _require_ids(table.name, erased)
            changes.append(ReceivedRows(table=table, ids=ids, values=values, erased=erased))
        found.append((segment, changes))
    return found


def rows_in(name: str, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and values of the answer to `READ_BUCKETS` or `READ_IDS`. Raises `ProtocolError` if they are none."""
    _require_arrays(frame, 2, f"rows of {name!r}")
    ids, values = frame.arrays
    _require_rows(name, ids, values)
    return ids, values


def ids_in(answer: Followed, frame: Frame) -> dict[str, np.ndarray]:
    """Return the ids by table that came with `rewind`. Raises `ProtocolError` if they are none."""
    _require_arrays(frame, len(answer.changed), f"ids of {len(answer.changed)} tables")
    for name, ids in zip(answer.changed, frame.arrays, strict=True):
        _require_ids(name, ids)
    return dict(zip(answer.changed, frame.arrays, strict=True))


def weights_in(names: DenseNames, frame: Frame) -> dict[str, np.ndarray]:
    """Return copies of the weights by name. Raises `ProtocolError` if there is not an array for each."""
    _require_arrays(frame, len(names.names), f"{len(names.names)} weights")
    return dict(zip(names.names, (array.copy() for array in frame.arrays), strict=True))


def _require_arrays(frame: Frame, count: int, what: str) -> None:
    if len(frame.arrays) != count:
        raise ProtocolError(f"{what}: expected {count} arrays, got {len(frame.arrays)}")


def _require_ids(name: str, ids: np.ndarray) -> None:
    if ids.dtype != np.dtype("<i8") or ids.ndim != 1:
        raise ProtocolError(f"ids of table {name!r}: expected int64 [n], got {ids.dtype} {list(ids.shape)}")


def _require_rows(name: str, ids: np.ndarray, values: np.ndarray) -> None:
    _require_ids(name, ids)
    if values.dtype != np.dtype("<f4") or values.ndim != 2 or len(values) != len(ids):
        raise ProtocolError(
            f"rows of table {name!r}: expected float32 [{len(ids)}, dim], got {values.dtype} {list(values.shape)}"
        )


class FollowCalls:
    """Answers followers of `feed`, which starts with the first of them.

    Args:
        feed: What is followed.
        on_follower: Called when somebody follows, before the first answer.
        moved_to: Returns addresses of servers that buckets were given to.
        run: Returns the identity of the run, "" if it is not known.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        on_follower: Callable[[], None] = lambda: None,
        moved_to: Callable[[], tuple[str, ...]] = tuple,
        run: Callable[[], str] = str,
    ) -> None:
        self._feed, self._run = feed, run
        self._on_follower, self._moved_to = on_follower, moved_to
        self._readers = threading.BoundedSemaphore(MAX_READERS)

    def calls(self) -> Handlers:
        """Return the handler of each call."""
        return {
            FollowCall.FOLLOW: self._follow,
            FollowCall.READ_BUCKETS: self._in_turn(self._read_buckets),
            FollowCall.READ_IDS: self._in_turn(self._read_ids),
            FollowCall.READ_WEIGHTS: self._read_weights,
            FollowCall.CONFIRM: self._confirm,
        }

    def _in_turn(self, read: Callable[[Frame], Answer]) -> Callable[[Frame], Answer]:
        """Let few followers read rows at once, however many there are: training goes on meanwhile."""

        def answer(frame: Frame) -> Answer:
            if not self._readers.acquire(timeout=MAX_READ_SECS):
                raise OverloadedError(
                    f"{MAX_READERS} followers are reading rows, no more are accepted; try again later"
                )
            try:
                return read(frame)
            finally:
                self._readers.release()

        return answer

    def _follow(self, frame: Frame) -> Answer:
        asked, feed = message_of(Follow, frame), self._feed
        if not feed.is_active:
            self._on_follower()
            feed.start()
        if asked.follower:
            # One that reads all rows has nothing of the stream yet. A run that ends waits for it too.
            known = asked.stream == feed.stream
            feed.note(
                asked.follower, since=asked.since if known else -1, dense_version=asked.dense_version if known else -1
            )
        feed.wait(stream=asked.stream, since=asked.since, dense_version=asked.dense_version, timeout=asked.wait)
        view = feed.view(stream=asked.stream, since=asked.since, max_bytes=asked.max_bytes)
        if view.segments is not None:
            return self._answer("segments", view)
        changed = None if asked.stream in (0, view.stream) else feed.changed_since(asked.log)
        return self._answer("resync" if changed is None else "rewind", view, changed or {})

    def _answer(
        self,
        state: Literal["segments", "rewind", "resync"],
        view: FeedView,
        changed: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> Answer:
        feed, log, segments = self._feed, view.log_position, view.segments or ()
        answer = Followed(
            state=state,
            stream=view.stream,
            newest=view.newest,
            segments=tuple(self._header(segment) for segment in segments),
            age=feed.seconds_since(view.as_of),
            durable=view.durable,
            log_sequence=0 if log is None else log.sequence,
            log_checksum=0 if log is None else log.checksum,
            dense_version=view.dense_version,
            step=view.step,
            event_time=view.event_time,
            # After `newest` was read: a bucket that is gained later is announced by a later segment.
            ranges=feed.ranges(),
            rows={name: len(table) for name, table in feed.tables().items()},
            changed=tuple(changed),
            moved_to=self._moved_to()[-MAX_MOVED:],
            run=self._run(),
        )
        arrays = [
            array for segment in segments for part in segment.parts for array in (part.ids, part.values, part.erased)
        ]
        return Answer(text=answer.model_dump_json(), arrays=(*arrays, *changed.values()))

    def _header(self, segment: FeedSegment) -> SegmentHeader:
        return SegmentHeader(
            sequence=segment.sequence,
            step=segment.step,
            event_time=segment.event_time,
            age=self._feed.seconds_since(segment.begun),
            gained=segment.gained,
            tables=tuple(
                TableHeader(name=part.name, scales=part.scales, event_time=part.event_time) for part in segment.parts
            ),
        )

    def _read_buckets(self, frame: Frame) -> Answer:
        read = message_of(ReadBuckets, frame)
        end, ids, values = self._feed.rows(read.table, read.first, read.end)
        return Answer(text=RowsOfBuckets(end=end).model_dump_json(), arrays=(ids, values))

    def _read_ids(self, frame: Frame) -> Answer:
        read = message_of(ReadIds, frame)
        if len(frame.arrays) != 1 or frame.arrays[0].dtype != np.dtype("<i8") or frame.arrays[0].ndim != 1:
            raise InvalidArgumentError("ids: expected one array int64 [n]")
        most = ANSWER_BYTES // row_bytes(self._feed.table(read.table))
        if len(frame.arrays[0]) > most:
            raise InvalidArgumentError(f"ids: expected at most {most:,} with one call, got {len(frame.arrays[0]):,}")
        return Answer(arrays=self._feed.values(read.table, frame.arrays[0]))

    def _read_weights(self, frame: Frame) -> Answer:
        dense, version = self._feed.published_dense()
        names = DenseNames(version=version, names=tuple(dense))
        return Answer(text=names.model_dump_json(), arrays=tuple(dense.values()))

    def _confirm(self, frame: Frame) -> Answer:
        followers, confirmed = self._feed.confirm(message_of(Confirm, frame).wait)
        return Answer(text=Confirmed(followers=followers, confirmed=confirmed).model_dump_json())
