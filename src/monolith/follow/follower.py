"""`Follower`: keeps copies of the tables and weights of a run up to date, whoever holds them.

One thread for each writer waits for its segments and applies them. Each bucket of ids has one writer that the follower believes:
the one that owned it when its rows were last read as a whole. What others say about the bucket is dropped, so that segments of
two servers, between which a bucket has moved, may arrive in any order.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from monolith.errors import (
    InvalidArgumentError,
    MonolithError,
    OwnershipChangedError,
    ServerRestartedError,
)
from monolith.follow.calls import DenseNames, Follow, FollowCall, Followed, ReadBuckets, ReadIds
from monolith.process_bound import ProcessBound
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS, bucket_of, mask_of, ranges_of
from monolith.transport.frames import Frame
from monolith.transport.link import Link

__all__ = ["FollowTarget", "Follower", "Writer", "WriterProgress"]

_NOBODY = -1
_READ_BYTES = 2**22
"""About how many bytes of rows are read with one call."""
MAX_UNDO = 2**24
"""Ids that are remembered because their changes are not durable. With more, a restart of the writer means reading all rows."""
FIND_SECS = 1.0
"""Seconds between two looks at which writers there are."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds between two attempts to reach a writer. Doubled each time, up to the longest."""

_log = logging.getLogger(__name__)


class FollowTarget(Protocol):
    """What is kept up to date."""

    def tables(self) -> Mapping[str, Sequence[EmbeddingTable]]:
        """Return the copies of each table, by the name that it has in the feed."""

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Replace dense weights, all at once. Some of them may not belong to the model."""


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


class Follower:
    """Follows all writers of a run until `close`. Thread-safe.

    Args:
        writers: The run itself, or each of its servers or ranks.
        target: What is kept up to date. It is changed by the threads of the follower.
        wait: Seconds that a writer may wait before it answers that nothing has changed.
        find_writer: Returns a writer by its address, for servers that buckets are moved to. None: they are not followed.
        find_writers: Returns all writers there are now. Asked every second: new ones are followed, others no longer.
        buckets: Only rows of these buckets are kept up to date. Rows of others are neither read nor applied.
        run: The identity of the run that the target belongs to. Writers of another run are refused. Empty: not checked.
        clock: Returns seconds, rising.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        target: FollowTarget,
        *,
        wait: float = 0.25,
        find_writer: Callable[[str], Writer] | None = None,
        find_writers: Callable[[], Sequence[Writer]] | None = None,
        buckets: range = range(NUM_BUCKETS),
        run: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not writers:
            raise InvalidArgumentError("writers: expected at least one")
        self.target, self.clock, self.wait, self.buckets, self.run = target, clock, wait, buckets, run
        self.number = secrets.randbits(62) | 1
        """Tells the writers who asks."""
        self._bound = ProcessBound("the follower")
        self.changing = threading.Lock()
        """Held while rows change: what is believed about a bucket and its rows change together."""
        self.held = threading.Event()
        """Set while nothing may change."""
        self.owners = np.full(NUM_BUCKETS, _NOBODY, dtype=np.int64)
        """The index of the writer that is believed, for each bucket."""
        self._find_writer = find_writer
        self._started = threading.Condition()
        self._threads: list[_WriterThread] = []
        self._addresses: set[str] = set()
        self._made = 0
        self._closing = threading.Event()
        self._adding = threading.Lock()
        for writer in writers:
            self._add(writer)
        self._finding: threading.Thread | None = None
        if find_writers is not None:
            self._finding = threading.Thread(
                target=self._find, args=(find_writers,), name="monolith-follow-writers", daemon=True
            )
            self._finding.start()

    @property
    def progress(self) -> dict[str, WriterProgress]:
        """How far it is with each writer, by name."""
        return {thread.writer.name: thread.progress for thread in list(self._threads)}

    @property
    def has_rows(self) -> bool:
        """Whether rows of some bucket were read from a writer."""
        return bool((self.owners != _NOBODY).any())

    def wait_until_read(self, timeout: float) -> bool:
        """Wait until the rows of all writers were read once. Returns whether that happened in time."""
        with self._started:
            return self._started.wait_for(self._all_read, timeout)

    def note_read(self) -> None:
        """Called by a thread when it has read all rows of its writer."""
        with self._started:
            self._started.notify_all()

    def note_moved(self, addresses: Sequence[str]) -> None:
        """Follow servers that buckets were moved to, unless they are followed already."""
        for address in addresses:
            if self._find_writer is None or address in self._addresses:
                continue
            writer = self._find_writer(address)
            self._addresses.add(address)
            if self._add(writer):
                _log.info("following %s, to which buckets were moved", writer.name)

    def hold(self) -> None:
        """Change nothing any more, until `resume`. Returns when no change is being made."""
        self.held.set()
        with self.changing:
            pass

    def resume(self) -> None:
        """Follow again after `hold`. All rows are read again."""
        for thread in self._threads:
            thread.start_over()
        self.held.clear()

    def close(self) -> None:
        """Stop following. The target keeps what it has."""
        if not self._bound.is_here:
            return
        with self._adding:
            self._closing.set()
        if self._finding is not None:
            self._finding.join()
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join()

    def _add(self, writer: Writer) -> bool:
        """Follow a writer, unless it is followed already. Several threads find writers."""
        with self._adding:
            if self._closing.is_set() or any(thread.writer.name == writer.name for thread in self._threads):
                return False
            thread = _WriterThread(self, writer, self._made)
            self._made += 1
            self._threads.append(thread)
            thread.start()
            return True

    def _find(self, find_writers: Callable[[], Sequence[Writer]]) -> None:
        found_here: set[str] = {thread.writer.name for thread in self._threads}
        while not self._closing.wait(FIND_SECS):
            try:
                writers = {writer.name: writer for writer in find_writers()}
            except MonolithError as error:
                _log.debug("the processes of the run cannot be found at the moment: %s", error)
                continue
            known = {thread.writer.name for thread in self._threads}
            for name in writers.keys() - known:
                found_here.add(name)
                if self._add(writers[name]):
                    _log.info("following %s", name)
            gone = [
                thread
                for thread in self._threads
                if thread.writer.name in found_here and thread.writer.name not in writers
            ]
            for thread in gone:
                _log.info("%s is not part of the run any more", thread.writer.name)
                thread.stop()
                self._threads.remove(thread)

    def _all_read(self) -> bool:
        """Whether every bucket has been read from somebody, and every writer has answered."""
        wanted = self.owners[self.buckets.start : self.buckets.stop]
        has_all = not self.target.tables() or bool((wanted != _NOBODY).all())
        return has_all and all(thread.progress.as_of is not None for thread in self._threads)


class _HeldError(MonolithError):
    """Nothing may change at the moment."""


class _WriterThread(threading.Thread):
    def __init__(self, group: Follower, writer: Writer, index: int) -> None:
        super().__init__(name=f"monolith-follow-{writer.name}", daemon=True)
        self.writer, self.progress = writer, WriterProgress()
        self._group, self._index = group, index
        self._asked = Follow(follower=group.number, wait=group.wait)
        self._undo = _Undo()
        self._read: set[str] = set()
        self._starts_over = False
        self._closing = threading.Event()
        self._link: Link | None = None
        self._warned = ""

    def stop(self) -> None:
        self._closing.set()

    def start_over(self) -> None:
        """Read all rows with the next request."""
        self._starts_over = True

    def run(self) -> None:
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
        self.progress.connected, self.progress.error = True, ""
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
        arrays = iter(frame.arrays)
        for segment in answer.segments:
            tables = [(table, next(arrays), next(arrays), next(arrays)) for table in segment.tables]
            if segment.gained:
                self._gain(ranges_of(mask_of(segment.gained)), answer.rows)
            with self._group.changing:
                for table, ids, values, erased in tables:
                    self._undo.add(segment.sequence, table.name, ids, erased)
                    self._put(table.name, ids, values, erased, event_time=table.event_time, scales=table.scales)
            self.progress.sequence = segment.sequence

    def _put(
        self,
        name: str,
        ids: np.ndarray,
        values: np.ndarray,
        erased: np.ndarray,
        *,
        event_time: int = 0,
        scales: tuple[float, ...] = (),
    ) -> None:
        """Apply changes of one table. The lock is held."""
        self._require_not_held()
        owners = self._group.owners
        if not (owners == self._index).all():
            mine = owners[bucket_of(ids)] == self._index
            if not mine.all():
                ids, values = ids[mine], values[mine]
            erased = erased[owners[bucket_of(erased)] == self._index]
        for table in self._group.target.tables().get(name, ()):
            if len(erased):
                table.erase(erased)
            if len(ids):
                table.assign(ids, values, event_time=event_time)
            if scales and tuple(table.state().hashnet_scales) != scales:
                state = table.state()
                table.set_state(type(state)(max_event_time=event_time, updates=state.updates, hashnet_scales=scales))
        self.progress.rows += len(ids) + len(erased)

    def _require_not_held(self) -> None:
        if self._group.held.is_set():
            raise _HeldError("the follower is held")

    def _resync(self, answer: Followed) -> None:
        """Read all rows of the writer."""
        _log.info("reading all rows of %s", self.writer.name)
        unknown = self._group.target.tables().keys() - answer.rows.keys()
        if unknown and answer.rows:
            _log.warning("%s has no tables %s, which are not followed", self.writer.name, ", ".join(sorted(unknown)))
        # First: if the writer dies before the end, it is not known what to take back of the rows that were read.
        self._undo.reset()
        for first, end in answer.ranges:
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
        missing = owned & (self._group.owners != self._index)
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
            owners[owners == self._index] = _NOBODY

    def _read_range(self, rows: Mapping[str, int], first: int, end: int) -> None:
        copies, wanted = self._group.target.tables(), self._group.buckets
        first, end = max(first, wanted.start), min(end, wanted.stop)
        for name, count in rows.items():
            if name not in copies:
                continue
            row_bytes = 8 + 4 * copies[name][0].dim
            step = max(1, int(_READ_BYTES * NUM_BUCKETS / max(1, count * row_bytes)))
            for begin in range(first, end, step):
                self._read_buckets(name, begin, min(end, begin + step))

    def _read_buckets(self, name: str, first: int, end: int) -> None:
        frame = self._call(FollowCall.READ_BUCKETS, ReadBuckets(table=name, first=first, end=end).model_dump_json())
        # The writer owns these buckets, at least until now: from here on it is believed, and nobody else.
        ids, values = frame.arrays
        with self._group.changing:
            self._group.owners[first:end] = self._index
            gone = [
                np.setdiff1d(copy.rows_of_buckets(range(first, end)).ids, ids)
                for copy in self._group.target.tables()[name][:1]
            ]
            self._put(name, ids, values, np.concatenate([np.empty(0, np.int64), *gone]))

    def _rewind(self, answer: Followed, frame: Frame) -> bool:
        """Take back what the writer has lost, and read what it has kept and the follower has not received.

        Returns whether that was possible. If not, all rows have to be read.
        """
        undo = self._undo.by_table(dict(zip(answer.changed, frame.arrays, strict=True)))
        _log.warning(
            "%s was started again: reading %d rows again whose changes were not durable or not received",
            self.writer.name,
            sum(map(len, undo.values())),
        )
        owned = mask_of(answer.ranges)
        for name, ids in undo.items():
            if name not in self._group.target.tables():
                continue
            step = max(1, _READ_BYTES // (8 + 4 * self._group.target.tables()[name][0].dim))
            for begin in range(0, len(ids), step):
                some = ids[begin : begin + step]
                buckets = bucket_of(some)
                some = some[(self._group.owners[buckets] == self._index) & owned[buckets]]
                try:
                    frame = self._call(FollowCall.READ_IDS, ReadIds(table=name).model_dump_json(), [some])
                except OwnershipChangedError:
                    return False
                found, values = frame.arrays
                with self._group.changing:
                    self._put(name, found, values, np.setdiff1d(some, found))
        self.progress.sequence = 0
        self.progress.rewinds += 1
        self._undo.reset()
        return True

    def _follow_weights(self, answer: Followed) -> None:
        if answer.dense_version == self._asked.dense_version and answer.stream == self._asked.stream:
            return
        frame = self._call(FollowCall.READ_WEIGHTS, "{}")
        names = DenseNames.from_json(frame.text)
        weights = dict(zip(names.names, (array.copy() for array in frame.arrays), strict=True))
        with self._group.changing:
            self._require_not_held()
            if weights:
                self._group.target.set_weights(weights)
        self._asked = self._asked.model_copy(update={"dense_version": names.version})
