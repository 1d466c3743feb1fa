"""The rows and weights of one writer, and who is believed: the thread of a `Follower` for each process that it follows."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from monolith.errors import (
    InvalidArgumentError,
    MonolithError,
    OwnershipChangedError,
    ProtocolError,
    ServerRestartedError,
)
from monolith.follow.calls import (
    DenseNames,
    Follow,
    FollowCall,
    Followed,
    ReadBuckets,
    ReadIds,
    ReceivedRows,
    RowsOfBuckets,
    TableHeader,
    changes_in,
    ids_in,
    rows_in,
    weights_in,
)
from monolith.follow.feed import row_bytes
from monolith.table.buckets import NUM_BUCKETS, bucket_of, mask_of, ranges_of
from monolith.transport.frames import Frame
from monolith.transport.link import Link

if TYPE_CHECKING:
    from monolith.follow.follower import Follower

__all__ = ["FollowedWriter", "NO_WRITER", "Writer", "WriterProgress"]

NO_WRITER = -1
"""The owner of buckets of which no writer is believed."""
_READ_BYTES = 2**22
"""About how many bytes of rows are read with one call."""
MAX_UNDO = 2**24
"""Ids that are remembered because their changes are not durable. With more, a restart of the writer means reading all rows."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds between two attempts to reach a writer. Doubled each time, up to the longest."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A process that holds rows of the run."""

    name: str
    """For people: "run", "ps 0", "rank 1"."""
    connect: Callable[[], Link]
    """Returns a new connection to it."""


@dataclass(kw_only=True)
class WriterProgress:
    """How far the follower is with one writer."""

    sequence: int = 0
    """The last segment applied."""
    durable: int = 0
    """The last segment that the change log of the writer has, as far as the follower knows."""
    step: int = 0
    event_time: int = 0
    as_of: float | None = None
    """Seconds of the follower's clock: everything that the writer did before is applied. None before the first rows."""
    connected: bool = False
    rows: int = 0
    """Rows applied so far."""
    resyncs: int = 0
    """How often all rows were read."""
    rewinds: int = 0
    """How often changes were taken back because the writer had lost them."""
    error: str = ""
    """Why it is not connected."""
    silent_since: float | None = None
    """Seconds of the follower's clock at which it has stopped to answer, or at which the follower has begun. None: it answers."""


@dataclass(kw_only=True)
class _Undo:
    """Ids whose rows may be lost with the writer, by the segment that they came with."""

    waiting: deque[tuple[int, str, np.ndarray]] = field(default_factory=deque)
    size: int = 0
    unsafe_until: float = math.inf
    """Rows that were read as a whole may have changes that are not durable. The log has those when it has this segment."""

    def add(self, sequence: int, table: str, *ids: np.ndarray) -> None:
        for some in ids:
            if len(some):
                self.waiting.append((sequence, table, some.copy()))
                self.size += len(some)
        if self.size > MAX_UNDO:
            self.reset()

    def drop(self, durable: int) -> None:
        while self.waiting and self.waiting[0][0] <= durable:
            self.size -= len(self.waiting.popleft()[2])

    def reset(self) -> None:
        """Forget all ids: from now on, the log has to catch up with the present before changes can be taken back."""
        self.waiting.clear()
        self.size, self.unsafe_until = 0, math.inf

    def note(self, newest: int) -> None:
        """Take what the writer has said after the last rows were read or applied."""
        if self.unsafe_until == math.inf:
            self.unsafe_until = newest + 1

    def by_table(self, others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the ids, and `others`, by table."""
        found: dict[str, list[np.ndarray]] = {name: [ids] for name, ids in others.items()}
        for _, table, ids in self.waiting:
            found.setdefault(table, []).append(ids)
        return {table: np.unique(np.concatenate(ids)) for table, ids in found.items()}


class _HeldError(MonolithError):
    """Nothing may change at the moment."""


class FollowedWriter(threading.Thread):
    """Asks one writer for its changes and applies them to what the group keeps, until `stop`.

    Args:
        group: The follower, which has what all writers share.
        writer: Who is asked.
        index: A number that no other thread of the group has.
    """

    def __init__(self, group: Follower, writer: Writer, index: int) -> None:
        super().__init__(name=f"monolith-follow-{writer.name}", daemon=True)
        self.writer, self.progress = writer, WriterProgress(silent_since=group.clock())
        self._group = group
        self.index = index
        """What the group calls it in `owners`."""
        self._asked = Follow(follower=group.number, wait=group.wait)
        self._undo = _Undo()
        self._read: set[str] = set()
        self._starts_over = self._weights_again = False
        self._closing = threading.Event()
        self._link: Link | None = None
        self._warned = ""

    def stop(self) -> None:
        """End soon. Does not wait."""
        self._closing.set()

    def start_over(self) -> None:
        """Read all rows with the next request. What was asked for before is not applied any more."""
        self._starts_over = True

    def read_weights_again(self) -> None:
        """Read all weights with the next request, and no rows."""
        self._weights_again = True

    def run(self) -> None:
        """Follow until `stop`."""
        pause = FIRST_PAUSE
        while not self._closing.is_set():
            try:
                if self._group.held.is_set():
                    self._closing.wait(0.1)
                    continue
                self._once()
                pause = FIRST_PAUSE
            except _HeldError:
                self.start_over()
            except Exception as error:
                self._failed(error)
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._disconnect()

    def _once(self) -> None:
        if self._link is None:
            self._link = self.writer.connect()
        if self._starts_over:
            self._starts_over, self._asked = False, Follow(follower=self._group.number, wait=self._group.wait)
        frame = self._link.call(FollowCall.FOLLOW, self._asked.model_dump_json(), timeout=self._group.wait + 2.0)
        received = self._group.clock()
        answer = Followed.from_json(frame.text)
        if self._group.run and answer.run and answer.run != self._group.run:
            raise InvalidArgumentError(
                f"it is run {answer.run}, and the model was exported from run {self._group.run}; export it again"
            )
        if not self.progress.connected:
            _log.info("following %s", self.writer.name)
        self.progress.connected, self.progress.error, self.progress.silent_since = True, "", None
        if answer.state == "resync":
            self._resync(answer)
        elif answer.state == "rewind":
            if not self._can_rewind() or not self._rewind(answer, frame):
                # It was not known what to take back. Asking without a position makes the writer send everything.
                self._asked = Follow(follower=self._group.number, wait=self._group.wait)
                return
        else:
            self._apply(answer, frame)
        self._read_missing(answer)
        self._follow_weights(answer)
        self._note(answer, received)

    def _note(self, answer: Followed, received: float) -> None:
        last = answer.segments[-1] if answer.segments else None
        behind = last is not None and last.sequence < answer.newest
        age = last.age if last is not None and behind else answer.age
        progress = self.progress
        if answer.state == "segments":
            progress.step = max(answer.step if not behind else 0, last.step if last is not None else 0, progress.step)
            progress.event_time = max(answer.event_time, progress.event_time)
        else:  # perhaps of an earlier moment than what was there
            progress.step, progress.event_time = answer.step, answer.event_time
        self._group.note_moved(answer.moved_to)
        first = progress.as_of is None
        progress.as_of = received - age
        if first or answer.state == "resync":
            self._group.note_read()
        if answer.state == "segments":
            self._undo.note(answer.newest)
        update = {"stream": answer.stream, "since": progress.sequence}
        # What the log has counts when it is here too: what was not received is not among the ids to be read again.
        if answer.state != "segments" or answer.durable <= progress.sequence:
            update |= {"log_sequence": answer.log_sequence, "log_checksum": answer.log_checksum}
            progress.durable = answer.durable
            self._undo.drop(answer.durable)
        self._asked = self._asked.model_copy(update=update)

    def _can_rewind(self) -> bool:
        return self.progress.durable >= self._undo.unsafe_until

    def _failed(self, error: Exception) -> None:
        self.progress.connected, self.progress.error = False, str(error)
        if self.progress.silent_since is None:
            self.progress.silent_since = self._group.clock()
        if isinstance(error, ServerRestartedError) and self._link is not None:
            # The next request is for the new process, whatever it remembers.
            self._link.instance = 0
            return
        self._disconnect()
        # Once for each reason: it is tried again every few seconds.
        if str(error) != self._warned:
            self._warned = str(error)
            trace = None if isinstance(error, MonolithError) else error
            _log.warning(
                "%s cannot be followed at the moment, trying again: %s", self.writer.name, error, exc_info=trace
            )

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _call(self, call: FollowCall, text: str, arrays: Sequence[np.ndarray] = ()) -> Frame:
        assert self._link is not None
        return self._link.call(call, text, arrays, timeout=30.0)

    def _apply(self, answer: Followed, frame: Frame) -> None:
        for segment, changes in changes_in(answer, frame, since=self.progress.sequence):
            for one in changes:
                self._require_dim(one.table.name, one.values)
            if segment.gained:
                self._gain(ranges_of(mask_of(segment.gained)), answer.rows)
            with self._group.changing:
                for one in changes:
                    self._undo.add(segment.sequence, one.table.name, one.ids, one.erased)
                    self._put(one)
            self.progress.sequence = segment.sequence

    def _put(self, changes: ReceivedRows) -> None:
        """Apply changes of one table. The lock is held."""
        self._require_current()
        table, ids, values, erased = changes.table, changes.ids, changes.values, changes.erased
        owners = self._group.owners
        if not (owners == self.index).all():
            mine = owners[bucket_of(ids)] == self.index
            if not mine.all():
                ids, values = ids[mine], values[mine]
            erased = erased[owners[bucket_of(erased)] == self.index]
        for copy in self._group.target.tables().get(table.name, ()):
            if len(erased):
                copy.erase(erased)
            if len(ids):
                copy.assign(ids, values, event_time=table.event_time)
            if table.scales and tuple(copy.state().hashnet_scales) != table.scales:
                state = copy.state()
                copy.set_state(
                    type(state)(max_event_time=table.event_time, updates=state.updates, hashnet_scales=table.scales)
                )
        self.progress.rows += len(ids) + len(erased)

    def _require_dim(self, name: str, values: np.ndarray) -> None:
        for copy in self._group.target.tables().get(name, ()):
            if values.shape[1] != copy.dim:
                raise ProtocolError(
                    f"table {name!r}: {self.writer.name} has rows of {values.shape[1]} values, the model has {copy.dim}; "
                    "export the model again"
                )

    def _require_current(self) -> None:
        """Raise if something else was put into the copies since the request, to which the answer does not belong."""
        if self._group.held.is_set() or self._starts_over:
            raise _HeldError("the follower is held, or starts over")

    def _resync(self, answer: Followed) -> None:
        """Read all rows of the writer."""
        _log.info("reading all rows of %s", self.writer.name)
        unknown = self._group.target.tables().keys() - answer.rows.keys()
        if unknown and answer.rows:
            _log.warning("%s has no tables %s, which are not followed", self.writer.name, ", ".join(sorted(unknown)))
        # First: if the writer dies before the end, it is not known what to take back of the rows that were read.
        self._undo.reset()
        for first, end in ranges_of(mask_of(answer.ranges)):
            self._read_range(answer.rows, first, end)
        self.progress.sequence = answer.newest
        self.progress.resyncs += 1
        self._read = set(answer.rows)

    def _read_missing(self, answer: Followed) -> None:
        """Read all rows of what the writer has and the follower has not read from it: buckets and tables.

        It has not heard of buckets that were gained right before the writer was started again, or that went to another writer
        and came back between two segments.
        """
        copies, wanted = self._group.target.tables(), self._group.buckets
        rows = {name: count for name, count in answer.rows.items() if name in copies}
        new = {name: count for name, count in rows.items() if name not in self._read}
        owned = mask_of(answer.ranges) & mask_of([(wanted.start, wanted.stop)])
        missing = owned & (self._group.owners != self.index)
        if rows and missing.any():
            self._gain(ranges_of(missing), rows)
        if new:
            self._gain(ranges_of(owned), new)
            self._read |= new.keys()

    def _gain(self, ranges: Sequence[tuple[int, int]], rows: Mapping[str, int]) -> None:
        """Read all rows of buckets that the writer has taken over, unless it has given them away since."""
        self._undo.reset()
        for first, end in ranges:
            try:
                self._read_range(rows, first, end)
            except OwnershipChangedError:
                _log.info("%s has given buckets [%d, %d) away again", self.writer.name, first, end)
                self._doubt(first, end)
            except BaseException:
                self._doubt(first, end)
                raise

    def _doubt(self, first: int, end: int) -> None:
        """Believe nobody about buckets of which perhaps not all tables were read."""
        with self._group.changing:
            owners = self._group.owners[first:end]
            owners[owners == self.index] = NO_WRITER

    def _read_range(self, rows: Mapping[str, int], first: int, end: int) -> None:
        copies, wanted = self._group.target.tables(), self._group.buckets
        first, end = max(first, wanted.start), min(end, wanted.stop)
        for name, count in rows.items():
            if name not in copies:
                continue
            step = max(1, _READ_BYTES * NUM_BUCKETS // max(1, count * row_bytes(copies[name][0])))
            begin = first
            while begin < end:
                begin = self._read_buckets(name, begin, min(end, begin + step))

    def _read_buckets(self, name: str, first: int, end: int) -> int:
        """Read all rows of buckets. Returns the bucket before which they end: the writer may send less than was asked for."""
        frame = self._call(FollowCall.READ_BUCKETS, ReadBuckets(table=name, first=first, end=end).model_dump_json())
        read = RowsOfBuckets.from_json(frame.text)
        ids, values = rows_in(name, frame)
        self._require_dim(name, values)
        buckets = bucket_of(ids)
        if not first < read.end <= end or ((buckets < first) | (buckets >= read.end)).any():
            raise ProtocolError(f"rows of {name!r}: expected those of the buckets from {first} to {end} at most")
        # The writer owns these buckets, at least until now: from here on it is believed, and nobody else.
        with self._group.changing:
            self._require_current()
            self._group.owners[first : read.end] = self.index
            gone = [
                np.setdiff1d(copy.rows_of_buckets(range(first, read.end)).ids, ids)
                for copy in self._group.target.tables()[name][:1]
            ]
            erased = np.concatenate([np.empty(0, np.int64), *gone])
            self._put(ReceivedRows(table=TableHeader(name=name), ids=ids, values=values, erased=erased))
        return read.end

    def _rewind(self, answer: Followed, frame: Frame) -> bool:
        """Take back what the writer has lost, and read what it has kept and the follower has not received.

        Returns whether that was possible. If not, all rows have to be read.
        """
        undo = self._undo.by_table(ids_in(answer, frame))
        _log.warning(
            "%s was started again: reading %d rows again whose changes were not durable or not received",
            self.writer.name,
            sum(map(len, undo.values())),
        )
        owned = mask_of(answer.ranges)
        for name, ids in undo.items():
            if name not in self._group.target.tables():
                continue
            step = max(1, _READ_BYTES // row_bytes(self._group.target.tables()[name][0]))
            for begin in range(0, len(ids), step):
                some = ids[begin : begin + step]
                buckets = bucket_of(some)
                some = some[(self._group.owners[buckets] == self.index) & owned[buckets]]
                try:
                    frame = self._call(FollowCall.READ_IDS, ReadIds(table=name).model_dump_json(), [some])
                except OwnershipChangedError:
                    return False
                found, values = rows_in(name, frame)
                self._require_dim(name, values)
                if not np.isin(found, some).all():
                    raise ProtocolError(f"rows of {name!r}: some have ids that were not asked for")
                gone = np.setdiff1d(some, found)
                with self._group.changing:
                    self._put(ReceivedRows(table=TableHeader(name=name), ids=found, values=values, erased=gone))
        self.progress.sequence = 0
        self.progress.rewinds += 1
        self._undo.reset()
        return True

    def _follow_weights(self, answer: Followed) -> None:
        known = answer.dense_version == self._asked.dense_version and answer.stream == self._asked.stream
        if known and not self._weights_again:
            return
        frame = self._call(FollowCall.READ_WEIGHTS, "{}")
        names = DenseNames.from_json(frame.text)
        weights = weights_in(names, frame)
        with self._group.changing:
            self._require_current()
            if weights:
                self._group.target.set_weights(weights)
            self._weights_again = False
        self._asked = self._asked.model_copy(update={"dense_version": names.version})
