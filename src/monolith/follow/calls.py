"""The calls by which followers read a feed, and their messages. A run, a parameter server and a rank answer them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from monolith.config import Config
from monolith.errors import InvalidArgumentError
from monolith.follow.feed import Feed, FeedSegment, FeedView, LogPosition
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
    "SegmentHeader",
    "TableHeader",
]

MAX_WAIT = 30.0
"""Seconds that a follower may let the server wait for changes."""
MAX_BYTES = 2**27
"""Bytes of the segments in one answer, if they are several."""

_Bucket = Annotated[int, Field(ge=0, le=NUM_BUCKETS)]


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
    max_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)] = 2**24
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
    event_time: WireInt = 0


class SegmentHeader(Config):
    """A segment without its arrays."""

    sequence: WireInt
    step: WireInt
    event_time: WireInt
    age: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since the moment up to which all changes are in this segment or in earlier ones."""
    gained: tuple[tuple[_Bucket, _Bucket], ...] = ()
    tables: tuple[TableHeader, ...] = ()


class Followed(Config):
    """The answer to `Follow`."""

    state: Literal["segments", "rewind", "resync"]
    """`segments`: those after `since`. `rewind`: read what was not durable again, and the ids in the arrays that follow, one for
    each table of `changed`. Then continue from 0 in the new stream. `resync`: read all rows again, then go on from `newest`."""
    stream: WireInt
    newest: WireInt
    segments: tuple[SegmentHeader, ...] = ()
    age: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since the moment up to which all changes are in `newest` or in earlier segments."""
    durable: WireInt
    """The last segment whose changes are all in the change log."""
    log_sequence: WireInt = 0
    log_checksum: WireInt = 0
    dense_version: WireInt
    step: WireInt
    event_time: WireInt
    ranges: tuple[tuple[_Bucket, _Bucket], ...] = ()
    """The buckets that the writer owns."""
    rows: dict[str, WireInt] = {}
    """Rows of each table."""
    changed: tuple[WireName, ...] = ()
    """Tables with rows that the writer's log has changed after the position of the follower. Only with `rewind`."""
    moved_to: tuple[str, ...] = ()
    """Addresses of servers that buckets were given to."""
    run: str = ""
    """The identity of the run. Empty if the writer does not know it."""


class ReadBuckets(Config):
    """Ask for all rows of some buckets."""

    table: WireName
    first: _Bucket
    end: _Bucket


class ReadIds(Config):
    """Ask for the rows of the ids in the request's only array."""

    table: WireName


class DenseNames(Config):
    """The names of the weights whose arrays follow."""

    version: WireInt
    names: tuple[str, ...]


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

    def calls(self) -> Handlers:
        """Return the handler of each call."""
        return {
            FollowCall.FOLLOW: self._follow,
            FollowCall.READ_BUCKETS: self._read_buckets,
            FollowCall.READ_IDS: self._read_ids,
            FollowCall.READ_WEIGHTS: self._read_weights,
            FollowCall.CONFIRM: self._confirm,
        }

    def _follow(self, frame: Frame) -> Answer:
        asked, feed = message_of(Follow, frame), self._feed
        if not feed.is_active:
            self._on_follower()
            feed.start()
        if asked.follower and asked.stream == feed.stream:
            feed.note(asked.follower, since=asked.since, dense_version=asked.dense_version)
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
            moved_to=self._moved_to(),
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
        return Answer(arrays=self._feed.rows(read.table, read.first, read.end))

    def _read_ids(self, frame: Frame) -> Answer:
        read = message_of(ReadIds, frame)
        if len(frame.arrays) != 1 or frame.arrays[0].dtype != np.dtype("<i8") or frame.arrays[0].ndim != 1:
            raise InvalidArgumentError("ids: expected one array int64 [n]")
        return Answer(arrays=self._feed.values(read.table, frame.arrays[0]))

    def _read_weights(self, frame: Frame) -> Answer:
        dense, version = self._feed.published_dense()
        names = DenseNames(version=version, names=tuple(dense))
        return Answer(text=names.model_dump_json(), arrays=tuple(dense.values()))

    def _confirm(self, frame: Frame) -> Answer:
        followers, confirmed = self._feed.confirm(message_of(Confirm, frame).wait)
        return Answer(text=Confirmed(followers=followers, confirmed=confirmed).model_dump_json())
