"""`StreamReading`: one read of a stream, from positions on, cut into batches by count and by time."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from monolith.data.messages import MessageDecoder
from monolith.data.sources.dead_letters import DeadLetters
from monolith.data.sources.event_times import EventTimes
from monolith.data.sources.source import Column
from monolith.data.transforms.rows import numbers_of, select_rows
from monolith.errors import MonolithError, StreamGapError, UnavailableError
from monolith.features import Batch, num_rows
from monolith.streams import END, START, Records, Stream
from monolith.streams.stream import Offset

if TYPE_CHECKING:
    from monolith.data.sources.stream_source import StreamOptions

__all__ = ["Place", "StreamReading", "is_before"]

_log = logging.getLogger(__name__)

Place = int | tuple[int, int] | Literal["start"]
"""Where a partition is read next: the offset of a record, with a row in it if some of its rows have been read, or its start."""

_LATEST_SECS = 2**53
"""No event is later. So its milliseconds are an int64."""
_POLL_SECS = 1.0
"""Longest wait for records, after which idle partitions and interruptions are looked at."""
_QUIET_SECS = 30.0
"""A read with an end waits so long for records that should be there. A broker may have removed the last of them."""
_ENDS_SECS = 0.2
_OLD_ENDS_SECS = 2 * _POLL_SECS
"""Ends are older than this only if nothing is polled, because no batch is taken."""
_ANSWER_SECS = 0.2
"""So long a caller waits for ends that have to be asked for. What is known later is for the next one."""
_MOST_RECORDS = 4096


def is_before(place: Place, other: Place) -> bool:
    """Return whether `place` is before `other`."""
    return _as_pair(place) < _as_pair(other)


def _as_pair(place: Place) -> tuple[int, int]:
    if place == "start":
        return (-1, 0)
    return place if isinstance(place, tuple) else (place, 0)


@dataclass(slots=True)
class _Run:
    """Records that were polled, and how far they are used."""

    records: Records
    values: Sequence[bytes]
    """Of the records to use as a whole: a read with an end may have got more."""
    size: int
    """Records to use."""
    last_rows: int | None
    """Rows to use of the last one if it is not used as a whole."""
    index: int = 0
    row: int = 0

    def place(self) -> Place:
        if self.index < len(self.records):
            offset = self.records.offsets[self.index]
            return (offset, self.row) if self.row else offset
        return self.records.next_offset


@dataclass(slots=True)
class _Stretch:
    """Rows of the batch that come from consecutive records, or of one record with many rows from row `row` on."""

    records: Records
    first: int
    row: int
    rows: int


class _Ends:
    """Asks a stream for its ends in a thread, so that a broker that is away delays no caller for long."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failed = False
        self._known: dict[str, int] = {}

    def ask(self) -> dict[str, int]:
        """Return the ends of all partitions, those of an earlier question if there is no answer in time."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._ask, name="ends of a stream", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(_ANSWER_SECS)
        return self._known

    def _ask(self) -> None:
        try:
            self._known = {name: end for name, (_, end) in self._stream.bounds().items()}
            self._failed = False
        except MonolithError as error:
            if not self._failed:
                _log.warning("%s: its lag is at least what was known before: %s", self._stream.url, error)
            self._failed = True


class StreamReading:
    """Reads the partitions of a stream that `select` chooses, from `places` on.

    Args:
        stopped: looked at between polls. The read ends when it returns True.
        stops: read up to these places only, and no other partitions.
    """

    def __init__(
        self,
        stream: Stream,
        columns: Sequence[Column],
        options: StreamOptions,
        *,
        places: Mapping[str, Place],
        newest: Mapping[str, int],
        select: Callable[[list[str]], list[str]],
        events: EventTimes,
        dead: DeadLetters,
        stopped: Callable[[], bool],
        clock: Callable[[], float],
        now: Callable[[], float],
        stops: Mapping[str, Place] | None = None,
    ) -> None:
        self._stream, self._columns, self._options = stream, columns, options
        self._select, self._stopped, self._clock, self._now = select, stopped, clock, now
        self._events, self._dead = events, dead
        self._many = options.format in ("arrow", "example_batch")
        self._decoder = MessageDecoder(
            columns,
            format=options.format,
            header=options.header,
            max_record_bytes=options.max_record_bytes,
            finite=not options.allow_nan,
        )
        self._pending: deque[_Run] = deque()
        self._stretches: list[_Stretch] = []
        self._deadline = 0.0
        self._record_bytes = 1024.0
        self._last_record = self._next_refresh = self._next_ends = clock()
        self._next_refresh += options.refresh_secs
        self._gaps: dict[str, int] = {}
        self.late = self.lost = 0
        self.places: dict[str, Place] = dict(places)
        """Where reading continues after the batch that was handed out last."""
        self._ends: dict[str, int] = {}
        self._ends_at = -_OLD_ENDS_SECS
        self._asked_ends = _Ends(stream)
        self._stops = None if stops is None else dict(stops)
        self.reader = stream.reader()
        try:
            self._begin(newest)
        except BaseException:
            self.reader.close()
            raise

    def _begin(self, newest: Mapping[str, int]) -> None:
        mine = self._select(self._stream.partitions()) if self._stops is None else list(self._stops)
        # A partition that was not read yet begins where it would have then. One that was added has no records before.
        fresh = not self.places or self._options.start != END
        starts = self._starts([name for name in mine if name not in self.places]) if fresh else {}
        for name in mine:
            self.places.setdefault(name, starts.get(name, START))
        if self._options.until_end and self._stops is None:
            self._stops = self._bounds(mine)
        # An idle read does not end before what there was when it began, however slowly that comes.
        self._present = {} if self._options.stop_when_idle_secs is None else self._bounds(mine)
        self._fetch: dict[str, Place] = dict(self.places)
        self._partial = {name: place for name, place in self.places.items() if isinstance(place, tuple)}
        self._events.assign(list(self.places), newest)
        self._assign()

    def _starts(self, partitions: list[str]) -> dict[str, Place]:
        """Return where partitions begin that were never read."""
        start = self._options.start
        if start == START or not partitions:
            return dict.fromkeys(partitions, START)
        if isinstance(start, Mapping):
            return {name: start.get(name, START) for name in partitions}
        if start == END:
            return self._bounds(partitions)
        found = self._stream.first_offset_at(self._options.start_timestamp())
        return {name: found[name] for name in partitions}

    def _bounds(self, partitions: list[str]) -> dict[str, Place]:
        """Return the ends of these partitions."""
        bounds = self._stream.bounds()
        return {name: bounds[name][1] for name in partitions}

    def count_between(self, first: int, last: int) -> int:
        """Return how many records there may be between two offsets. Those of Redis are times: there it is one, if any."""
        most = 1 if self._stream.url.startswith("redis") else last
        return max(0, min(last - first, most))

    def close(self) -> None:
        """Release the reader."""
        self.reader.close()

    def batches(self) -> Iterator[Batch]:
        """Yield the batches. `places` is behind each of them when it is handed out."""
        while not self._stopped():
            self._refresh()
            self._fill()
            if self._is_due():
                yield from self._take()
            elif self._has_ended():
                break
            elif not self._pending:
                self._poll()
        yield from self._take()
        if not self._stopped() and self._options.until_end:
            self._dead.require_share_at_end()

    def _is_due(self) -> bool:
        rows = self._decoder.rows
        return rows >= self._options.batch_size or (rows > 0 and not self._pending and self._clock() >= self._deadline)

    def _has_ended(self) -> bool:
        if self._pending:
            return False
        quiet = self._clock() - self._last_record
        idle = self._options.stop_when_idle_secs
        if idle is not None and quiet >= idle:
            waiting = quiet < _QUIET_SECS and any(not self._reached(name, end) for name, end in self._present.items())
            return not waiting
        if self._stops is None:
            return False
        open_ones = [name for name, stop in self._stops.items() if not self._reached(name, stop)]
        if open_ones and quiet >= _QUIET_SECS:
            _log.warning(
                "%s: %s: no records came for %g s up to offset %s: taken as removed",
                self._stream.url, open_ones[0], _QUIET_SECS, self._stops[open_ones[0]],
            )  # fmt: skip
            return True
        return not open_ones

    def _reached(self, partition: str, stop: Place) -> bool:
        fetch, (offset, row) = self._fetch[partition], _as_pair(stop)
        # Nothing is before a start, and nothing before offset 0.
        return (offset <= 0 and not row) or (fetch != "start" and _as_pair(fetch) >= (offset + (row > 0), 0))

    def _refresh(self) -> None:
        """Find partitions that were added. They are read from their first record on."""
        if self._stops is not None or self._clock() < self._next_refresh:
            return
        self._next_refresh = self._clock() + self._options.refresh_secs
        added: list[str] = []
        try:
            added += [name for name in self._select(self._stream.partitions()) if name not in self.places]
            if not added:
                return
            self._fetch.update(dict.fromkeys(added, START))
            self._assign()
        except UnavailableError as error:
            # The partitions that it has are read on as soon as the broker answers again.
            for name in added:
                del self._fetch[name]
            _log.warning("cannot look for more partitions now: %s", error)
            return
        _log.info("%s: reading %d more partitions: %s", self._stream.url, len(added), ", ".join(added))
        self.places.update(dict.fromkeys(added, START))
        self._events.assign(list(self.places))

    def _assign(self) -> None:
        left = {
            name: place[0] if isinstance(place, tuple) else place
            for name, place in self._fetch.items()
            if self._stops is None or (name in self._stops and not self._reached(name, self._stops[name]))
        }
        offsets: dict[str, Offset] = dict(left)
        while True:
            try:
                self.reader.assign(offsets)
                return
            except StreamGapError as error:
                self._skip_gap(error)
                offsets = {**offsets, **{name: START for name in self._gaps if name in offsets}}

    def _skip_gap(self, error: StreamGapError) -> None:
        """Continue at the oldest record of the partition that has the gap, or raise."""
        # The message names the partition, after the URL of some kinds of streams.
        name = next((name for name in self._fetch if f" {name}: " in f" {error}"), "")
        place = self._fetch.get(name)
        if self._options.on_gap == "error" or place is None or place == "start":
            hint = "on_gap='skip' continues at the oldest record and counts what is lost"
            raise StreamGapError(f"{error} ({self._stream.url}; {hint})") from error
        _log.warning("%s: %s; continuing at the oldest record", self._stream.url, error)
        self._gaps[name] = _as_pair(place)[0]
        self._fetch[name] = self.places[name] = START
        self._partial.pop(name, None)

    def _poll(self) -> None:
        most = int(self._options.read_ahead_bytes / self._record_bytes)
        count = max(1, min(most, max(self._options.batch_size, _MOST_RECORDS)))
        try:
            found = self.reader.poll(count, self._timeout())
        except StreamGapError as error:
            self._skip_gap(error)
            self._assign()
            return
        ended = [self._accept(records) for records in found]
        if any(ended):
            # Only now: all that was polled is behind the positions that are assigned.
            self._assign()
        if found:
            self._last_record = self._clock()
        else:
            self._events.advance()
            self._dead.flush()
        if self._clock() >= self._next_ends or not found:
            self._ends, self._ends_at = self.reader.ends(), self._clock()
            self._next_ends = self._ends_at + _ENDS_SECS

    def ends(self) -> dict[str, int]:
        """Return the ends of the partitions, as they were a moment ago. Called by any thread.

        While batches are taken, polling tells them. A trainer that hangs in a step, or that an operator has stopped, takes none.
        """
        known = self._ends
        if self._clock() - self._ends_at <= _OLD_ENDS_SECS:
            return known
        asked = self._asked_ends.ask()
        return {name: max(known.get(name, 0), asked.get(name, 0)) for name in self.places}

    def _timeout(self) -> float:
        now = self._clock()
        until = [now + _POLL_SECS]
        if self._decoder.rows:
            until.append(self._deadline)
        if self._stops is None:
            until.append(self._next_refresh)
        idle = self._options.stop_when_idle_secs
        if idle is not None and self._last_record + idle > now:
            until.append(self._last_record + idle)
        return max(0.0, min(until) - now)

    def _accept(self, records: Records) -> bool:
        """Put records in line. Returns whether they end the partition of a read that has an end."""
        name, size = records.partition, len(records)
        if not size:
            return False
        if name in self._gaps:
            lost = self.count_between(self._gaps.pop(name), records.offsets[0])
            self.lost += lost
            _log.warning("%s: %s: %d records were lost", self._stream.url, name, lost)
        self._record_bytes += (sum(map(len, records.values)) / size + 1 - self._record_bytes) / 4
        last_rows = None
        if self._stops is not None:
            offset, row = _as_pair(self._stops[name])
            size = bisect_left(records.offsets, offset)
            if row and size < len(records) and records.offsets[size] == offset:
                size, last_rows = size + 1, row
        before = self._stops is not None and self._reached(name, self._stops[name])
        self._fetch[name] = records.next_offset
        whole = size - (last_rows is not None)
        run = _Run(records, records.values if whole == len(records) else records.values[:whole], size, last_rows)
        offset, row = self._partial.pop(name, (-1, 0))
        if offset == records.offsets[0]:
            run.row = row
        if size:
            self._pending.append(run)
        return self._stops is not None and not before and self._reached(name, self._stops[name])

    def _fill(self) -> None:
        """Put pending records into the batch until it is full."""
        batch_size = self._options.batch_size
        while self._pending and self._decoder.rows < batch_size:
            run = self._pending[0]
            before = self._decoder.rows
            runs = [run]
            if self._options.format == "arrow" and run.index < len(run.values):
                runs = self._add_tables(batch_size)
            elif self._many:
                self._add_one(run, batch_size)
            else:
                self._add_several(run, batch_size)
            if not before and self._decoder.rows:
                self._deadline = self._clock() + self._options.max_wait_secs
            for run in runs:
                self.places[run.records.partition] = run.place()
                if run.index >= run.size:
                    self._pending.popleft()

    def _add_several(self, run: _Run, max_rows: int) -> None:
        """Add records of one row each."""
        first, before = run.index, self._decoder.rows
        bad = self._decoder.add(run.values, first, max_rows=max_rows)
        run.index = self._decoder.position[0]
        rows = self._decoder.rows - before
        if rows:
            self._stretches.append(_Stretch(run.records, first, 0, rows))
        if bad is not None:
            self._dead.add(run.records, bad.number, bad.reason)

    def _add_tables(self, max_rows: int) -> list[_Run]:
        """Add records of many rows each, of several runs together. Returns the runs that were used.

        Converting 26 columns costs as much for one record as for many, and a poll gets few records of each partition.
        """
        runs: list[tuple[_Run, int, int]] = []
        values: list[bytes] = []
        for run in self._pending:
            if runs and (run.row or run.index >= len(run.values) or len(values) >= max_rows):
                break
            some = run.values[run.index : run.index + max_rows]
            runs.append((run, len(values), len(values) + len(some)))
            values += some
            if run.last_rows is not None:
                break
        bad = self._decoder.add(values, 0, runs[0][0].row, max_rows=max_rows)
        done, row = self._decoder.position
        spans, used = deque(self._decoder.spans), []
        for run, first, end in runs:
            used.append(run)
            shift = run.index - first
            while spans and spans[0][0] < end:
                number, at, rows = spans.popleft()
                if rows:
                    self._stretches.append(_Stretch(run.records, number + shift, at, rows))
            if bad is not None and first <= bad.number < end:
                self._dead.add(run.records, bad.number + shift, bad.reason)
            run.index, run.row = min(done, end) + shift, row if done < end else 0
            if done < end:
                break
        return used

    def _add_one(self, run: _Run, max_rows: int) -> None:
        """Add rows of one record with many."""
        first, row, before = run.index, run.row, self._decoder.rows
        last = run.last_rows if first == run.size - 1 else None
        if last is not None:
            max_rows = min(max_rows, before + last - row)
        bad = self._decoder.add([run.records.values[first]], 0, row, max_rows=max_rows)
        done, run.row = self._decoder.position
        run.index += done
        rows = self._decoder.rows - before
        if rows:
            self._stretches.append(_Stretch(run.records, first, row, rows))
        if bad is not None:
            self._dead.add(run.records, first, bad.reason)
        elif last is not None and row + rows >= last:
            run.index = run.size

    def _take(self) -> Iterator[Batch]:
        """Yield the rows there are, less those whose event time does not let them pass."""
        if not self._decoder.rows:
            return
        batch, stretches = self._decoder.take(), self._stretches
        self._stretches = []
        batch = self._checked(batch, stretches)
        # Before the batch, and with it the position behind the bad records, can get into a checkpoint.
        self._dead.flush()
        if num_rows(batch):
            yield batch

    def _checked(self, batch: Batch, stretches: list[_Stretch]) -> Batch:
        times = self._event_times(batch, stretches)
        limit = self._options.max_future_secs
        future = times > (self._now() + limit) * 1000 if limit is not None else np.zeros(len(times), bool)
        watermark = self._events.watermark
        late = np.zeros(len(times), bool) if watermark is None else (times >= 0) & (times < watermark)
        starts = np.cumsum([0, *(stretch.rows for stretch in stretches)])
        self._observe(np.where(future, -1, times), starts, stretches)
        late_count = int(late.sum())
        self.late += late_count
        self._set_aside(future, starts, stretches, lambda row: f"event time {times[row]} ms is in the future")
        if late_count and self._options.late == "dead-letter":
            self._set_aside(late, starts, stretches, lambda row: f"event time {times[row]} ms is late", bad=False)
        dropped = future | late if self._options.late != "keep" else future
        return select_rows(batch, torch.from_numpy(~dropped)) if dropped.any() else batch

    def _event_times(self, batch: Batch, stretches: list[_Stretch]) -> np.ndarray:
        """Return the event time of each row in milliseconds. Negative: none."""
        if self._options.event_time is not None:
            times = numbers_of(batch, self._options.event_time).numpy().astype(np.int64)
            return np.minimum(times, _LATEST_SECS) * 1000 if self._options.event_time_unit == "s" else times
        parts = [
            np.full(stretch.rows, stretch.records.timestamps[stretch.first], np.int64)
            if self._many
            else np.asarray(stretch.records.timestamps[stretch.first : stretch.first + stretch.rows], np.int64)
            for stretch in stretches
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _observe(self, times: np.ndarray, starts: np.ndarray, stretches: list[_Stretch]) -> None:
        newest: dict[str, int] = {}
        for stretch, newest_time in zip(stretches, np.maximum.reduceat(times, starts[:-1]).tolist(), strict=True):
            name = stretch.records.partition
            newest[name] = max(newest_time, newest.get(name, -1))
        for name, newest_time in newest.items():
            if newest_time >= 0:
                self._events.observe(name, newest_time)

    def _set_aside(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        stretches: list[_Stretch],
        reason: Callable[[int], str],
        *,
        bad: bool = True,
    ) -> None:
        """Write the records of these rows to the dead letters, each record once."""
        found = np.flatnonzero(rows)
        owners = np.searchsorted(starts, found, side="right") - 1
        if self._many:
            owners, firsts = np.unique(owners, return_index=True)
            found = found[firsts]
        if bad:
            records = len(stretches) if self._many else int(starts[-1])
            self._dead.note_good(records - len(found))
        for row, owner in zip(found.tolist(), owners.tolist(), strict=True):
            stretch, inside = stretches[owner], row - int(starts[owner])
            index, row_inside = (stretch.first, stretch.row + inside) if self._many else (stretch.first + inside, None)
            write = self._dead.add if bad else self._dead.write
            write(stretch.records, index, reason(row), row=row_inside)
