"""`FolderReader`: reads partitions of a folder stream, written by this or another process."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from monolith.errors import CorruptFileError, InvalidArgumentError, StreamGapError
from monolith.process_bound import ProcessBound
from monolith.streams.folder.format import BATCH_HEADER, SEGMENT_HEADER, BatchHeader, Columns, decode_batch
from monolith.streams.folder.segments import (
    LAST_OFFSET,
    SegmentFile,
    SegmentList,
    SegmentRemovedError,
    highest_offset,
    partition_bounds,
    segment_of,
)
from monolith.streams.folder.wakeup import Wakeup
from monolith.streams.stream import END, START, Offset, Records

__all__ = ["FolderReader", "first_offset_at", "last_records"]

_logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
# So long a batch may look damaged because it is just being written.
_PATIENCE_SECS = 0.2


class FolderReader:
    """Reads some partitions of a folder stream. Made by `FolderStream.reader`. Used by one thread, except for `wake`.

    Example:
        >>> import tempfile
        >>> from monolith.streams import open_stream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stream = open_stream(f"{folder}/events", partitions=1)
        ...     with stream.writer() as writer, stream.reader() as reader:
        ...         writer.append(b"hello")
        ...         writer.flush()
        ...         reader.assign({"events/0": "start"})
        ...         [(records.partition, records.values) for records in reader.poll(10, timeout=60)]
        [('events/0', [b'hello'])]
    """

    def __init__(self, folders: Callable[[], Mapping[str, Path]]) -> None:
        self._find_folders = folders
        self._cursors: list[_Cursor] = []
        self._wakeup = Wakeup([])
        self._bound = ProcessBound("the reader of a stream")
        self._closed = False

    def assign(self, positions: Mapping[str, Offset]) -> None:
        """As of every reader."""
        self._require_open("assign")
        folders = self._find_folders()
        unknown = sorted(set(positions) - set(folders))
        if unknown:
            raise InvalidArgumentError(f"positions: expected some of {', '.join(folders)}, got {unknown[0]!r}")
        cursors = [_Cursor(name, folders[name], offset) for name, offset in positions.items()]
        # Watched before the first look, so no change is missed between the two.
        wakeup, self._wakeup = self._wakeup, Wakeup(cursor.folder for cursor in cursors)
        if wakeup.was_called():
            self._wakeup.wake()
        wakeup.close()
        for cursor in cursors:
            cursor.seek()
        self._cursors = cursors

    def poll(self, max_records: int, timeout: float) -> list[Records]:
        """As of every reader."""
        self._bound.require()
        self._require_open("poll")
        if max_records < 1:
            raise InvalidArgumentError(f"max_records: expected 1 or more, got {max_records}")
        deadline = time.monotonic() + timeout
        while not (found := self._collect(max_records)):
            left = deadline - time.monotonic()
            if left <= 0 or self._wakeup.wait(left):
                return []
        return found

    def ends(self) -> dict[str, int]:
        """As of every reader. These are up to date."""
        return {cursor.name: cursor.end() for cursor in self._cursors}

    def commit(self, positions: Mapping[str, int]) -> None:
        """Do nothing: nobody monitors a folder."""

    def wake(self) -> None:
        """As of every reader."""
        self._wakeup.wake()

    def close(self) -> None:
        """As of every reader. Calling it twice is harmless."""
        self._closed = True
        for cursor in self._cursors:
            cursor.close()
        self._cursors = []
        self._wakeup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise InvalidArgumentError(f"{what}: the reader is closed")

    def _collect(self, max_records: int) -> list[Records]:
        """Return what is there, with a fair share for each partition that has records."""
        found: dict[str, list[Columns]] = {}
        left, ready = max_records, self._cursors
        while ready and left > 0:
            share = -(-left // len(ready))
            still_ready = []
            for cursor in ready:
                if left <= 0:
                    break
                columns = cursor.take(min(share, left))
                if columns is not None:
                    found.setdefault(cursor.name, []).append(columns)
                    left -= len(columns.values)
                    still_ready.append(cursor)
            ready = still_ready
        # The next poll begins with another partition.
        self._cursors = self._cursors[1:] + self._cursors[:1]
        return [_joined(name, parts) for name, parts in found.items()]


class _Cursor:
    """A position in one partition."""

    def __init__(self, name: str, folder: Path, offset: Offset) -> None:
        self.name, self.folder = name, folder
        self._segments = SegmentList(folder)
        self._segment: SegmentFile | None = None
        self._wanted = offset
        self._offset, self._position = 0, SEGMENT_HEADER
        self._ready: list[Columns] = []
        self._suspect = (-1, 0.0)
        self._end = _End(folder)

    def seek(self) -> None:
        """Find the first record wanted. Raises `StreamGapError` if there is none such."""
        if self._wanted == END:
            self._offset = partition_bounds(self._segments)[1]
        elif self._wanted == START:
            bases = self._segments.bases()
            self._offset = bases[0] if bases else 0
        else:
            self._offset = self._wanted
        if self._offset < 0:
            raise InvalidArgumentError(f"positions: {self.name}: expected an offset of 0 or more, got {self._offset}")
        self._open()
        if self._segment is None and self._offset > 0:
            self._refuse_unwritten(0)

    def take(self, limit: int) -> Columns | None:
        """Return at most `limit` records, and move behind them. None if there are none yet."""
        if not self._ready and not self._load():
            return None
        columns = self._ready[0]
        count = len(columns.values)
        if count <= limit:
            self._ready.pop(0)
        else:
            columns, self._ready[0] = columns.part(0, limit), columns.part(limit, count)
        return columns

    def end(self) -> int:
        """Return the offset of the next record that will be written."""
        return max(self._offset, self._end.find())

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._end.close()

    def _open(self) -> None:
        """Open the segment of the offset and go to the batch that has it."""
        segment = segment_of(self._segments, self._offset, self.name)
        if segment is None:
            return
        self._segment, self._position = segment, SEGMENT_HEADER
        end, closed = segment.base, False
        for at, header in segment.walk(segment.place_of(self._offset)):
            if header.end_offset > self._offset:
                self._position = at
                return
            self._position, end, closed = at + header.size, header.end_offset, header.closed
        if self._offset > end and segment.base == self._segments.bases()[-1]:
            # After a power cut the reader may have seen records that are lost, and whose offsets no other records get.
            cut = segment.may_have_lost_its_end and not closed and self._offset <= highest_offset(segment)
            if not cut:
                self._refuse_unwritten(end)

    def _refuse_unwritten(self, end: int) -> NoReturn:
        raise StreamGapError(
            f"{self.name}: has never had a record {self._offset:,}: its next one is {end:,}. Was the stream removed and made "
            f"again, or is the position one of another stream?"
        )

    def _load(self) -> bool:
        """Read what is there behind the position. Returns False if that is nothing."""
        if self._segment is None:
            self._open()
            if self._segment is None:
                return False
        while not self._parse():
            later = [base for base in self._segments.bases() if base > self._segment.base]
            if not later:
                self._judge_tail()
                return False
            # There is a later segment, so what this one has now is all of it.
            if self._parse():
                return True
            self._leave(later[0])
        return True

    def _leave(self, base: int) -> None:
        """Go on with the segment `base`, after the last batch of this one."""
        old = self._segment
        assert old is not None
        if old.size() > self._position:
            raise self._damaged("although a later segment exists")
        try:
            new = SegmentFile(self.folder, base)
        except SegmentRemovedError:
            found = segment_of(SegmentList(self.folder), self._offset, self.name)
            if found is None:
                self._refuse_unwritten(0)
            new = found
        if new.header.previous_end > self._offset:
            raise StreamGapError(
                f"{self.name}: records {self._offset:,} to {new.header.previous_end - 1:,} were removed by retention before they "
                f"were read; start at {new.base:,}, or give the stream a larger retention"
            )
        old.close()
        self._segment, self._position = new, SEGMENT_HEADER
        self._offset = max(self._offset, new.base)

    def _parse(self) -> bool:
        """Read a chunk, and keep the records of the batches that it has."""
        segment = self._segment
        assert segment is not None
        data, at = segment.read(self._position, _CHUNK), 0
        header = BatchHeader.unpack(data)
        if header is not None and header.size > len(data):
            data = segment.read(self._position, header.size)
        while header is not None and header.body_is_sound(data, at):
            if header.count:
                where = f"{segment.path}: batch at byte {self._position}"
                columns = decode_batch(header, data, at, where)
                if header.first_offset < self._offset:
                    columns = columns.part(min(self._offset - header.first_offset, header.count), header.count)
                if columns.values:
                    self._ready.append(columns)
                self._offset = max(self._offset, header.end_offset)
            at += header.size
            self._position += header.size
            header = BatchHeader.unpack(data, at)
        return bool(self._ready)

    def _judge_tail(self) -> None:
        """Raise `CorruptFileError` if what is behind the position is not a batch that is being written, or was cut short."""
        segment = self._segment
        assert segment is not None
        left = segment.size() - self._position
        header = segment.batch_at(self._position)
        if left < BATCH_HEADER or (header is not None and header.size > left):
            self._suspect = (-1, 0.0)
            return
        now = time.monotonic()
        if self._suspect[0] != self._position:
            self._suspect = (self._position, now)
            if segment.may_have_lost_its_end:
                _logger.warning(
                    "%s: what is behind byte %d was not written to the end before the system stopped; waiting for the next "
                    "writer, which cuts it off",
                    segment.path,
                    self._position,
                )
        elif now - self._suspect[1] > _PATIENCE_SECS and not segment.may_have_lost_its_end:
            raise self._damaged("although its writer has gone on")

    def _damaged(self, why: str) -> CorruptFileError:
        assert self._segment is not None
        return CorruptFileError(
            f"{self._segment.path}: the batch at byte {self._position}, of record {self._offset:,} of {self.name}, has a wrong "
            f"checksum {why}; the file is damaged. Restore it, or assign a position behind it"
        )


class _End:
    """Follows the end of a partition by the headers of its batches."""

    def __init__(self, folder: Path) -> None:
        self._segments = SegmentList(folder)
        self._segment: SegmentFile | None = None
        self._position, self._offset = SEGMENT_HEADER, 0

    def find(self) -> int:
        bases = self._segments.bases()
        if bases and (self._segment is None or self._segment.base != bases[-1]):
            self.close()
            try:
                self._segment = SegmentFile(self._segments.folder, bases[-1])
            except SegmentRemovedError:
                return self._offset
            self._position, self._offset = self._segment.place_of(LAST_OFFSET), bases[-1]
        if self._segment is not None:
            for at, header in self._segment.walk(self._position):
                self._position, self._offset = at + header.size, header.end_offset
        return self._offset

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


def last_records(name: str, folder: Path) -> Records | None:
    """Return the last record of a partition."""
    segments = SegmentList(folder)
    for base in reversed(segments.bases()):
        try:
            segment = SegmentFile(folder, base)
        except SegmentRemovedError:
            return None
        # The last one may not be whole yet, or never will be, and be the only one behind the place that the index knows.
        for begin in (segment.place_of(LAST_OFFSET), SEGMENT_HEADER):
            newest = deque(((at, header) for at, header in segment.walk(begin) if header.count), maxlen=2)
            for at, header in reversed(newest):
                data = segment.read(at, header.size)
                if header.body_is_sound(data):
                    columns = decode_batch(header, data, 0, f"{segment.path}: batch at byte {at}")
                    return _joined(name, [columns.part(header.count - 1, header.count)])
    return None


def first_offset_at(folder: Path, timestamp: int) -> int:
    """Return the offset of the first record of a partition at or after `timestamp`, or the end of the partition."""
    segments = SegmentList(folder)
    for base in segments.bases():
        try:
            segment = SegmentFile(folder, base)
        except SegmentRemovedError:
            continue
        for at, header in segment.walk(segment.place_before(timestamp)):
            if header.count and header.max_timestamp >= timestamp:
                data = segment.read(at, header.size)
                if header.body_is_sound(data):
                    columns = decode_batch(header, data, 0, f"{segment.path}: batch at byte {at}")
                    for number, own in enumerate(columns.timestamps):
                        if own >= timestamp:
                            return header.first_offset + number
    return partition_bounds(segments)[1]


def _joined(name: str, parts: list[Columns]) -> Records:
    first, last = parts[0], parts[-1]
    next_offset = last.first_offset + len(last.values)
    if len(parts) == 1:
        return Records(
            partition=name,
            offsets=range(first.first_offset, next_offset),
            next_offset=next_offset,
            timestamps=first.timestamps,
            keys=first.keys,
            values=first.values,
            headers=first.headers,
        )
    offsets: list[int] = []
    timestamps: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes] = []
    headers = None if all(part.headers is None for part in parts) else list[tuple[tuple[str, bytes], ...]]()
    for part in parts:
        count = len(part.values)
        offsets.extend(range(part.first_offset, part.first_offset + count))
        timestamps += part.timestamps
        keys += part.keys
        values += part.values
        if headers is not None:
            headers += part.headers or [()] * count
    return Records(
        partition=name,
        offsets=offsets,
        next_offset=next_offset,
        timestamps=timestamps,
        keys=keys,
        values=values,
        headers=headers,
    )
