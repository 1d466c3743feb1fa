"""`Feed`: the changes of tables and dense weights, published to followers a moment after they were made.

A thread takes the changed rows of all tables every `every` seconds, as they are then, into one segment with the next number. The
newest segments are kept in memory, and followers wait for the next one. The disk is not involved.

A follower that asks for a segment which is no longer kept reads all rows of the tables again and continues from there. Every row
that changes while it reads is in a later segment, so the copy becomes equal to the tables.

The numbers belong to a *stream*, which ends with the process or when the rows of a table are replaced. If the writer has restored
itself from its change log, a follower has perhaps seen changes that were lost. It then reads the rows of the changes again that
were not durable, as far as it knows, or all rows if the log does not lead on from what it knows.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from monolith.errors import InvalidArgumentError, MonolithError, OwnershipChangedError
from monolith.follow.segments import FeedSegment, KeptSegments, TablePart, changed_rows
from monolith.process_bound import ProcessBound
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS, bucket_of, ranges_of

__all__ = [
    "ANSWER_BYTES",
    "EVERY_SECS",
    "Feed",
    "FeedView",
    "LAST_SECS",
    "LogPosition",
    "MAX_REWOUND",
    "Owner",
    "WriterLog",
    "row_bytes",
]

EVERY_SECS = 0.1
"""Seconds between two segments, by default."""
DENSE_SECS = 1.0
"""Seconds between two looks at the dense weights, by default."""
LAST_SECS = 5.0
"""Seconds that a run or a server waits at its end for followers to read its last changes."""
MAX_FOLLOWERS = 1024
"""Followers that are remembered."""
FOLLOWER_SECS = 5.0
"""Seconds after which a follower that has not asked again counts as gone."""
SEGMENT_BYTES = 2**24
"""About how many bytes of rows a segment has at most: an interval in which more has changed makes several."""
ANSWER_BYTES = 2**24
"""About how many bytes of rows a follower gets with one call, whatever it asks for. One bucket is sent in any case."""
KEPT_BYTES = 2**26
"""Memory of the segments that are kept for followers, by default."""
MAX_REWOUND = 2**22
"""Changes that a log may have after what a follower knows. With more, the follower reads all rows after a restart."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LogPosition:
    """A segment of the change log of a writer."""

    sequence: int
    checksum: int


class WriterLog(Protocol):
    """The change log of the process that has the feed."""

    def changed_since(self, position: LogPosition) -> Mapping[str, np.ndarray] | None:
        """Return the ids of each table that have changed after that segment. None if it is not known."""


class Owner(Protocol):
    """Which buckets the process with the feed owns."""

    def mask(self) -> np.ndarray:
        """Return bool [NUM_BUCKETS]."""


@dataclass(frozen=True, kw_only=True)
class FeedView:
    """What a follower gets to see, all of one moment."""

    stream: int
    newest: int
    """Number of the newest segment."""
    as_of: float
    """Seconds of the feed's clock: everything that was written before is in the segments up to `newest`."""
    durable: int
    """Number of the last segment whose changes are all in the change log."""
    log_position: LogPosition | None
    """The segment of the change log that has them."""
    dense_version: int
    step: int
    event_time: int
    segments: Sequence[FeedSegment] | None
    """Those after the position of the follower. None if one of them is no longer kept, or is of another stream."""


class Feed:
    """Publishes changes of `tables` from the first call of `start` on. Thread-safe.

    Args:
        tables: Returns the tables by the name that followers know them by. It may grow.
        dense: Returns dense weights by name, or None if none have changed since the last call.
        every: Seconds between two segments.
        dense_every: Seconds between two calls of `dense`.
        kept_bytes: Memory of the segments that are kept. The newest is always kept.
        moment: Returns the newest global step and event time.
        owner: Which buckets the process owns, if others own the rest. Changes in other buckets are not published.
        log: The change log of the process. Without one, followers read all rows again after a restart.
        clock: Returns seconds, rising.

    Example:
        >>> from monolith import EmbeddingTable
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(1, name="item"))
        >>> feed = Feed(lambda: {"item": table}, every=3600)
        >>> feed.start()
        >>> table.assign([7], np.ones((1, 1), np.float32))
        >>> feed.drain()
        1
        >>> feed.view(stream=feed.stream, since=0, max_bytes=1000).segments[0].parts[0].ids.tolist()
        [7]
        >>> feed.close()
    """

    def __init__(
        self,
        tables: Callable[[], Mapping[str, EmbeddingTable]],
        *,
        dense: Callable[[], Mapping[str, np.ndarray] | None] | None = None,
        every: float = EVERY_SECS,
        dense_every: float = DENSE_SECS,
        kept_bytes: int = KEPT_BYTES,
        moment: Callable[[], tuple[int, int]] = lambda: (0, 0),
        owner: Owner | None = None,
        log: WriterLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not every > 0 or not dense_every > 0:
            raise InvalidArgumentError(f"every, dense_every: expected seconds above 0, got {every!r}, {dense_every!r}")
        self._all_tables, self._all_dense = tables, dense
        self._every, self._dense_every = every, dense_every
        self._moment, self._owner, self._writer_log, self._clock = moment, owner, log, clock
        self._bound = ProcessBound("the feed")
        self._changed = threading.Condition()
        self._draining = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._released = False
        self._tables: dict[str, tuple[EmbeddingTable, int]] = {}
        self._owned = np.ones(NUM_BUCKETS, dtype=np.bool_)
        self._kept = KeptSegments(kept_bytes)
        self._followers: dict[int, tuple[int, int, float]] = {}
        self.stream = 0
        """Names this sequence of segments. 0 until `start`."""
        self.complete = False
        """Whether all segments of the stream are kept and it began with the process, before anything was written."""
        self.newest = 0
        """Number of the newest segment."""
        self.as_of = 0.0
        """Seconds of `clock`: everything that was written before is published."""
        self.durable = 0
        """Number of the last segment whose changes are all in the change log."""
        self.log_position: LogPosition | None = None
        """The segment of the change log that has them."""
        self.dense: Mapping[str, np.ndarray] = {}
        """The newest dense weights that were published."""
        self.dense_version = 0
        """Grows when `dense` changes."""
        self._dense_at = float("-inf")

    @property
    def is_active(self) -> bool:
        """Whether it publishes."""
        return self._thread is not None

    def start(self, *, complete: bool = False) -> None:
        """Begin to publish. Does nothing the second time. `complete` says that nothing was written since the last restore."""
        self._bound.require()
        with self._draining:
            if self._thread is not None or self._closing.is_set():
                return
            self._begin_stream(complete=complete)
            self._look_at_dense()
            self._thread = threading.Thread(target=self._run, name="monolith-feed", daemon=True)
            self._thread.start()

    def drain(self) -> int:
        """Publish what has changed since the last call. Returns the number of the newest segment."""
        with self._draining:
            if self.stream == 0:
                raise InvalidArgumentError("feed: it has not been started")
            try:
                self._drain()
            except BaseException:
                # Rows that were taken and not published would be missing for ever.
                self._begin_stream(complete=False)
                raise
            return self.newest

    def view(self, *, stream: int, since: int, max_bytes: int) -> FeedView:
        """Return the segments after `since`, oldest first, at least one if there is any, and where the feed is."""
        step, event_time = self._moment()
        with self._changed:
            return FeedView(
                stream=self.stream,
                newest=self.newest,
                as_of=self.as_of,
                durable=self.durable,
                log_position=self.log_position,
                dense_version=self.dense_version,
                step=step,
                event_time=event_time,
                segments=self._kept.after(since, max_bytes) if stream == self.stream else None,
            )

    def wait(self, *, stream: int, since: int, dense_version: int, timeout: float) -> None:
        """Wait until there is something after `since`, newer dense weights, or another stream."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.stream != stream
                    or self.newest > since
                    or self.dense_version != dense_version
                    or self._released
                ),
                timeout=timeout,
            )

    def note(self, follower: int, *, since: int, dense_version: int) -> None:
        """Remember how far a follower is."""
        with self._changed:
            if len(self._followers) > MAX_FOLLOWERS:
                self._followers.clear()  # those that are there ask again at once
            self._followers[follower] = since, dense_version, self._clock()
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Publish everything and wait until all followers have it. Returns whether they had it in time."""
        if not self.is_active:
            return True
        self.drain()
        self._look_at_dense()
        with self._changed:
            return self._changed.wait_for(self._all_have_it, timeout)

    def confirm(self, timeout: float) -> tuple[int, int]:
        """Publish everything and wait until all followers have it. Returns how many follow, and how many of them have it."""
        if not self.is_active:
            return 0, 0
        published = self.drain()
        with self._changed:
            self._changed.wait_for(lambda: all(self._have(published)), timeout)
            have = self._have(published)
        return len(have), sum(have)

    def _have(self, published: int) -> list[bool]:
        self._drop_gone()
        return [since >= published for since, _, _ in self._followers.values()]

    def _drop_gone(self) -> None:
        lately = self._clock() - FOLLOWER_SECS
        self._followers = {number: seen for number, seen in self._followers.items() if seen[2] >= lately}

    def _all_have_it(self) -> bool:
        self._drop_gone()
        return all(
            since >= self.newest and version == self.dense_version for since, version, _ in self._followers.values()
        )

    def changed_since(self, position: LogPosition | None) -> Mapping[str, np.ndarray] | None:
        """Return the ids that have changed in the log after `position`, for a follower that knows everything up to there.

        None if that is not known, or not everything since is in this stream. The follower then reads all rows again.
        """
        with self._changed:
            kept_all = self.newest == 0 or self._kept.first == 1
        if position is None or self._writer_log is None or not self.complete or not kept_all:
            return None
        return self._writer_log.changed_since(position)

    def cut(self) -> Callable[[LogPosition], None]:
        """Call it right before the change log cuts the tables. Call what it returns when that commit is durable."""
        with self._changed:
            stream, sequence = self.stream, self.newest

        def durable(position: LogPosition) -> None:
            with self._changed:
                if self.stream == stream:
                    self.durable, self.log_position = max(self.durable, sequence), position

        return durable

    def seconds_since(self, moment: float) -> float:
        """Return how long ago a moment of the feed's clock was."""
        return max(0.0, self._clock() - moment)

    def published_dense(self) -> tuple[Mapping[str, np.ndarray], int]:
        """Return the newest dense weights and their version."""
        with self._changed:
            return self.dense, self.dense_version

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the buckets that the process owns now."""
        return ranges_of(self._mask())

    def table(self, name: str) -> EmbeddingTable:
        """Return a table by name."""
        found = self._all_tables().get(name)
        if found is None:
            raise InvalidArgumentError(f"table: there is no {name!r}; known are {', '.join(self._all_tables())}")
        return found

    def tables(self) -> Mapping[str, EmbeddingTable]:
        """Return all tables by name."""
        return self._all_tables()

    def rows(self, name: str, first: int, end: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return ids and stored weights of the rows in the buckets from `first` to before `end`, all of which must be owned.

        If there are more than about `ANSWER_BYTES`, they are those of the first buckets. The first result is the bucket before
        which they end.
        """
        self._require_owned(first, end)
        table = self.table(name)
        end = min(end, first + max(1, ANSWER_BYTES * NUM_BUCKETS // max(1, len(table) * row_bytes(table))))
        raw = table.rows_of_buckets(range(first, end))
        entries = table.lookup_entry(raw.ids)
        # Checked again: rows that were given away while they were read may have been removed.
        self._require_owned(first, end)
        return end, entries.ids[entries.found].numpy(), entries.values[entries.found].numpy()

    def values(self, name: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return those of `ids` that have a row, and its stored weights. Ids of buckets that are not owned are an error."""
        buckets = bucket_of(ids)
        mask = self._mask()
        if not mask[buckets].all():
            raise OwnershipChangedError(
                "ids: some are in buckets that this server does not own; ask again which one does"
            )
        entries = self.table(name).lookup_entry(ids)
        return entries.ids[entries.found].numpy(), entries.values[entries.found].numpy()

    def release(self) -> None:
        """Answer followers that wait, now and from now on."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def close(self) -> None:
        """Publish what is left and stop. Followers that wait are answered."""
        if not self._bound.is_here:
            return
        self._closing.set()
        self.release()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        due = self._clock() + self._every
        while not self._closing.wait(max(0.0, due - self._clock())):
            began = self._clock()
            self._tick()
            # No bursts after a pause: the next one is due a whole interval after this one began.
            due = max(due + self._every, began + self._every / 2)
        self._tick()
        with self._changed:
            self._changed.notify_all()

    def _tick(self) -> None:
        try:
            self.drain()
            if self._clock() - self._dense_at >= self._dense_every or self._closing.is_set():
                self._look_at_dense()
        except MonolithError as error:
            _log.warning("changes could not be published, followers will read all rows again: %s", error)
        except Exception:
            _log.exception("changes could not be published, followers will read all rows again")

    def _begin_stream(self, *, complete: bool) -> None:
        self._tables = {}
        self._owned = self._mask()
        self._track(self._all_tables())
        with self._changed:
            self.stream = secrets.randbits(62) | 1
            self.complete = complete
            self.newest = self.durable = 0
            self.log_position = None
            self._kept.clear()
            self.as_of = self._clock()
            self._changed.notify_all()

    def add_tables(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Track new tables from now on. Call it before anything is written to them, or followers read all rows again."""
        with self._draining:
            if self.stream:
                self._track(tables)

    def _track(self, tables: Mapping[str, EmbeddingTable]) -> bool:
        """Track new tables. Returns whether some had rows that no segment has."""
        missed = False
        for name, table in tables.items():
            known = self._tables.get(name)
            if known is not None and known == (table, table.replacements):
                continue
            replacements = table.replacements
            table.track_feed()
            missed |= known is not None or len(table) > 0
            self._tables[name] = table, replacements
        return missed

    def _drain(self) -> None:
        if self._track(self._all_tables()):
            # Rows were restored, or written before the table was tracked.
            self._begin_stream(complete=False)
        begun = self._clock()
        moment = self._moment()
        waiting: list[TablePart] = []
        for name, (table, _) in self._tables.items():
            for part in changed_rows(name, table):
                waiting.append(part)
                if sum(one.nbytes for one in waiting) >= SEGMENT_BYTES:
                    # Not everything that was written before `begun` is in it yet.
                    self._publish(waiting, moment, self.as_of)
                    waiting = []
        self._publish(waiting, moment, begun)

    def _publish(self, parts: Sequence[TablePart], moment: tuple[int, int], begun: float) -> None:
        """Make the next segment of parts that were read, unless there is nothing in it."""
        # After the rows were read: those of a bucket that was given away since are removed here, and must not look removed.
        owned = self._mask()
        gained = ranges_of(owned & ~self._owned)
        if self._owner is not None and not owned.all():
            parts = [part.of_buckets(owned) for part in parts]
        self._owned = owned
        filled = tuple(part for part in parts if len(part.ids) or len(part.erased))
        with self._changed:
            self.as_of = begun
            if not filled and not gained:
                return
            self.newest += 1
            step, event_time = moment
            newest = max([event_time, *(part.event_time for part in filled)])
            self._kept.add(
                FeedSegment(
                    sequence=self.newest, step=step, event_time=newest, begun=begun, gained=gained, parts=filled
                )
            )
            self._changed.notify_all()

    def publish_dense(self, weights: Mapping[str, np.ndarray]) -> None:
        """Publish dense weights, which must not change afterwards."""
        with self._changed:
            self.dense, self.dense_version = weights, self.dense_version + 1
            self._changed.notify_all()

    @property
    def nbytes(self) -> int:
        """Memory of what is kept for followers."""
        return self._kept.nbytes + sum(array.nbytes for array in self.dense.values())

    def _look_at_dense(self) -> None:
        self._dense_at = self._clock()
        found = None if self._all_dense is None else self._all_dense()
        if found is not None and not _equal(found, self.dense):
            self.publish_dense(found)

    def _mask(self) -> np.ndarray:
        return np.ones(NUM_BUCKETS, dtype=np.bool_) if self._owner is None else self._owner.mask()

    def _require_owned(self, first: int, end: int) -> None:
        if not 0 <= first < end <= NUM_BUCKETS:
            raise InvalidArgumentError(f"buckets: expected a range within [0, {NUM_BUCKETS}), got [{first}, {end})")
        if not self._mask()[first:end].all():
            raise OwnershipChangedError(
                f"buckets: not all of [{first}, {end}) are owned here; ask again which server does"
            )


def row_bytes(table: EmbeddingTable) -> int:
    """Return the bytes of a row in an answer."""
    return 8 + 4 * table.dim


def _equal(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(_same_bytes(one[name], other[name]) for name in one)


def _same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
