"""`ChangeLog`: the writer of the log. The changes since the last commit become one durable segment. `Flusher` says when."""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np

from monolith.durable import sync_to_disk
from monolith.errors import InvalidArgumentError, MonolithError, StorageError
from monolith.log.bounds import HeadWriter, LogHead
from monolith.log.commit import (
    LoggedTables,
    Tables,
    TablesCut,
    Throttle,
    read_ahead,
    remove_unfinished_segments,
    write_segment,
)
from monolith.log.reader import LogReader
from monolith.log.segment_format import SegmentInfo, SegmentMeta
from monolith.process_bound import ProcessBound, WorkerThreads
from monolith.state_bytes import PackedState, State, pack_state
from monolith.table.table_file import FileEntry
from monolith.writer_lock import WriterLock

__all__ = ["ChangeLog", "Flusher"]

TAKEN_OVER = 2**16
"""Numbers that are skipped when a log is taken from a writer that may be alive, because it may be using one of them."""

READ_AHEAD_BYTES = 256 << 20
"""Changed rows that a throttled commit reads at full speed before it writes them."""

Parts = Callable[[], tuple[FileEntry, ...]]
"""Waits until other processes have written the rows they hold. Returns the segments with them."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Commit:
    """The content of a segment, decided at one moment."""

    meta: SegmentMeta
    tables: TablesCut
    state: PackedState | None
    throttle: Throttle
    on_durable: Callable[[SegmentInfo], None] | None = None
    parts: Parts | None = None


class ChangeLog:
    """Writes the changes of `tables` to a folder on a local disk, commit by commit, each with the next sequence number.

    From now on the tables track their changes. A commit takes what they have tracked, and they forget it only when the segment
    is durable. If writing fails, the next commit has it all. Rows from before are not in the log. A snapshot has them.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable
        >>> from monolith.log import ChangeLog, LogReader
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(1, name="user"))
        >>> with tempfile.TemporaryDirectory() as folder, ChangeLog(folder, [table]) as log:
        ...     _ = table.reinitialize([7, 8])
        ...     log.commit(step=1)
        ...     _ = table.erase([7])
        ...     log.commit(step=2)
        ...     [(info.step, info.rows, info.erased) for info in LogReader(folder).segments()]
        1
        2
        [(1, 2, 0), (2, 0, 1)]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tables: Tables,
        *,
        parent: int | None = None,
        optimizer_state: bool = True,
        take_over: bool = False,
        clock: Callable[[], float] = time.time,
        reader: LogReader | None = None,
    ) -> None:
        """Open the log in `folder`, which is created if it does not exist.

        Args:
            folder: On a local disk, because a log needs fsync and rename. One writer at a time.
            tables: In this process. Equal names are shards of one table. A mapping gives names that differ from the tables' own.
            parent: The sequence number the state of `tables` comes from. None is the newest in `folder`, which must be the last
                one that was committed there. 0 is from nothing.
            optimizer_state: False writes float32 values only, which is enough for serving but not for continuing training.
            take_over: Take the log from a writer that still has it open, such as a process that hangs. Its next commit raises
                `FencedError`.
            clock: Returns seconds since 1970.
            reader: Of the same folder. It is given every commit, so it need not read back what was written here.

        Raises:
            LogGapError: With `parent=None`, the last committed segment is missing.
            StorageError: Another writer has the log open, or the folder cannot be used.
        """
        self.on_cut: Callable[[], Callable[[SegmentInfo], None]] | None = None
        """Called right before the tables are cut. What it returns is called when that commit is durable."""
        self._reader = reader or LogReader(folder)
        self.folder = self._reader.folder
        self._tables = LoggedTables(tables, "rows" if optimizer_state else "values")
        self._clock = clock
        self._one_commit = threading.Lock()
        self._bound = ProcessBound(f"the log {self.folder}")
        self._throttle = Throttle(1.0)
        self._thread: WorkerThreads | None = None
        self._next = 0
        self._lock = self._open_folder(take_over)
        try:
            self._head = HeadWriter(self.folder)
            self._continue_from(parent)
            self._next += TAKEN_OVER * self._lock.replaced
        except BaseException:
            self._lock.release()
            raise
        self._tables.track_changes()

    @property
    def sequence(self) -> int:
        """The last sequence number committed here, or the one continued. It is the parent of the next commit."""
        return self._parent

    @property
    def complete(self) -> bool:
        """Whether this line of the log has all rows, because the tables were empty when it began. Else it needs a snapshot."""
        return self._complete

    @property
    def was_taken(self) -> bool:
        """Whether it was taken from a writer that may still run."""
        return self._lock.replaced

    @property
    def busy(self) -> bool:
        """Whether a commit is in progress, so another one would wait."""
        return self._one_commit.locked()

    @property
    def changed(self) -> int:
        """Ids waiting for the next commit."""
        return self._tables.changed

    def add_tables(self, tables: Tables) -> None:
        """Add further tables, which must be empty, from the next commit on. Waits for a commit in progress."""
        self._bound.require()
        with self._one_commit:
            self._tables.add(tables)

    def reopen(self, tables: Tables, *, parent: int | None = None) -> None:
        """Close the log and open it with other tables or parent, without letting another writer in between."""
        self._bound.require()
        with self._one_commit:
            self._tables = LoggedTables(tables, self._tables.kind)
            self._continue_from(parent)
            self._tables.track_changes()

    def changed_since(self, sequence: int, checksum: int, *, limit: int) -> dict[str, np.ndarray] | None:
        """Return the ids by table that this line of the log has changed after the segment with that number and checksum.

        None if it does not lead on from that segment, or if there are more than `limit` changes.
        """
        if not 0 < sequence <= self._parent:
            return None
        found: dict[str, list[np.ndarray]] = {}
        try:
            if self._reader.info(sequence).checksum != checksum:
                return None
            chain = self._reader.chain(self._parent, sequence)
            if sum(info.rows + info.erased for info in chain) > limit:
                return None
            for info in chain:
                with self._reader.read(info.sequence) as segment:
                    for name, ids in segment.changed_ids():
                        found.setdefault(name, []).append(ids)
        except MonolithError:
            return None  # it was abandoned, pruned, damaged or lost
        return {name: np.unique(np.concatenate(ids)) for name, ids in found.items()}

    def require_own(self) -> None:
        """Raise `FencedError` if another process has taken the log over."""
        self._lock.require_own()

    def commit(
        self, *, step: int, source: State = None, event_time: int = 0, dense: Mapping[str, State] | None = None
    ) -> int:
        """Write the changes since the last commit durably. Returns the sequence number of the new segment.

        Call it between steps. The segment has the state of exactly this moment if nobody writes to the tables while they are
        cut, and whole rows in any case. After a `StorageError` nothing is lost, because the next commit has the changes.

        Args:
            step: The global step.
            source: The position in the data that agrees with the tables, as a `state_dict()` returns it.
            event_time: The newest event time trained, seconds since 1970. 0 takes the tables' own.
            dense: Nested state of everything else. With it a run can be restored to this moment.
        """
        self._bound.require()
        self.hurry()
        with self._one_commit:
            return self._write(self._cut(step, source, event_time, dense, Throttle(1.0)))

    def commit_in_background(
        self,
        *,
        step: int,
        source: State = None,
        event_time: int = 0,
        dense: Mapping[str, State] | None = None,
        share: float = 1.0,
        parts: Parts | None = None,
    ) -> Future[int]:
        """Cut the tables now, and read and write their rows on a thread while training continues.

        One at a time: a second call waits for the first to be written. The future returns the sequence number or raises.
        `share` is the share of a processor's time that writing may take. Less slows training less, and takes longer. With less
        than 1, up to 256 MiB of rows are read ahead, because training has to copy an unread row before it changes it. `parts` is
        called on the thread first. The segment names what it returns, and if it raises nothing is written.
        """
        self._bound.require()
        throttle = Throttle(share)
        self.hurry()
        self._one_commit.acquire()
        try:
            cut = replace(self._cut(step, source, event_time, dense, throttle), parts=parts)
            try:
                return self._threads().submit(self._write_and_release, cut)
            except BaseException:
                cut.tables.rollback()
                raise
        except BaseException:
            self._one_commit.release()
            raise

    def hurry(self) -> None:
        """Stop throttling the commit in progress, if there is one, because a caller waits for it."""
        self._throttle.hurry()

    def close(self) -> None:
        """Wait for a commit in progress and let another writer in. Later changes stay uncommitted.

        It does nothing in a forked child, because the log belongs to the parent process.
        """
        if not self._bound.is_here:
            return
        self.hurry()
        if self._thread is not None:
            self._thread.shutdown()
        with self._one_commit:
            try:
                self._head.close()
            finally:
                self._lock.release()

    def __enter__(self) -> ChangeLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ChangeLog({str(self.folder)!r}, sequence={self.sequence}, changed={self.changed})"

    def _open_folder(self, take_over: bool) -> WriterLock:
        try:
            folder = self.folder.absolute()
            new = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            # The log and its parent even if they existed: their creator may have died before syncing their names.
            for above in dict.fromkeys([folder.parent, folder.parent.parent, *(path.parent for path in new)]):
                sync_to_disk(above)
            lock = WriterLock(self.folder, take_over=take_over)
            remove_unfinished_segments(self.folder)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.folder}: cannot be opened as a change log: {error.strerror}") from error
        return lock

    def _continue_from(self, parent: int | None) -> None:
        there = self._reader.sequences()
        newest = there[-1] if there else 0
        if parent is None:
            self._reader.require_committed()
        self._parent = newest if parent is None else _whole("parent", parent, 2**63)
        continued = self._reader.info(self._parent) if self._parent in there else None
        self._parent_checksum = None if continued is None else continued.checksum
        # Not the number of a lost segment either: it may come back.
        committed = 0 if self._head.last is None else self._head.last.sequence
        self._next = max(self._next, newest + 1, committed + 1, self._parent + 1)
        self._complete = self._tables.empty if self._parent == 0 else continued is None or continued.complete

    def _cut(
        self, step: int, source: State, event_time: int, dense: Mapping[str, State] | None, throttle: Throttle
    ) -> _Commit:
        if not self._lock.held:
            raise InvalidArgumentError(f"{self.folder}: the log is closed; open it again to commit")
        self.require_own()
        step, event_time = _whole("step", step, 2**63), _whole("event_time", event_time, 2**32)
        state: dict[str, State] = {} if dense is None else {"dense": dict(dense)}
        if source is not None:
            state["source"] = source
        packed = pack_state(state, "commit") if state else None
        on_durable = None if self.on_cut is None else self.on_cut()
        tables = self._tables.cut()
        try:
            self._throttle = throttle
            meta = self._meta(step, event_time, state, tables)
            return _Commit(meta=meta, tables=tables, state=packed, throttle=throttle, on_durable=on_durable)
        except BaseException:
            tables.rollback()
            raise

    def _meta(self, step: int, event_time: int, state: Mapping[str, State], tables: TablesCut) -> SegmentMeta:
        return SegmentMeta(
            sequence=self._next,
            parent=self._parent,
            parent_checksum=self._parent_checksum,
            step=step,
            time=float(self._clock()),
            event_time=event_time or tables.event_time,
            kind=self._tables.kind,
            complete=self._complete,
            has_dense="dense" in state,
            has_source="source" in state,
            tables=tables.metas,
        )

    def _write(self, commit: _Commit) -> int:
        sequence, meta = commit.meta.sequence, commit.meta
        # Used up even if writing fails: a reader may have seen the file before it was removed.
        self._next = sequence + 1
        try:
            if commit.parts is not None:
                meta = meta.model_copy(update={"parts": commit.parts()})
            changes = commit.tables.changes()
            if commit.throttle.rests:
                changes = read_ahead(changes, READ_AHEAD_BYTES, lambda chunk: chunk.nbytes)
            info = write_segment(self.folder, meta, commit.throttle.paced(changes), commit.state)
            # Only now: a successor that comes later reads this segment, one that came before may have missed it.
            self.require_own()
            # If this fails the segment stays, because the head may already name it. The next commit does not continue it.
            self._head.write(LogHead(sequence, info.checksum))
        except BaseException as error:
            commit.tables.rollback()
            if isinstance(error, MonolithError) or not isinstance(error, Exception):
                raise
            # A successor has removed the unfinished file: that there is one explains more than the error it causes here.
            self.require_own()
            raise StorageError(
                f"{self.folder}: cannot write sequence {sequence}: {error}; the next commit has its changes"
            ) from error
        commit.tables.commit()
        self._reader.remember(info)
        self._parent, self._parent_checksum = sequence, info.checksum
        if commit.on_durable is not None:
            commit.on_durable(info)
        return sequence

    def _write_and_release(self, commit: _Commit) -> int:
        try:
            return self._write(commit)
        finally:
            self._one_commit.release()

    def _threads(self) -> WorkerThreads:
        if self._thread is None:
            self._thread = WorkerThreads(1, thread_name_prefix="monolith-log")
        return self._thread


def _whole(name: str, value: int, limit: int) -> int:
    try:
        whole = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = -1
    if not 0 <= whole < limit:
        raise InvalidArgumentError(
            f"{name}: expected a whole number in [0, 2**{limit.bit_length() - 1}), got {value!r}"
        )
    return whole


_logger = logging.getLogger(__name__)


class Flusher:
    """Commits to `log` in the background every so many seconds or changed rows, when it is polled between steps.

    A failed commit is logged and counted. The next one, which is tried as soon as it is due, has its changes.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(1))
        >>> with tempfile.TemporaryDirectory() as folder, ChangeLog(folder, [table]) as log:
        ...     flusher = Flusher(log, every_secs=None, every_rows=2)
        ...     _ = table.reinitialize([7])
        ...     print(flusher.poll(step=1))
        ...     _ = table.reinitialize([8])
        ...     flusher.poll(step=2).result()
        None
        1
    """

    def __init__(
        self,
        log: ChangeLog,
        *,
        every_secs: float | None = 1.0,
        every_rows: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Commit `every_secs` after the last commit or when `every_rows` ids have changed, whichever is first. None is never."""
        for name, value in (("every_secs", every_secs), ("every_rows", every_rows)):
            if value is not None and not value > 0:
                raise InvalidArgumentError(f"{name}: expected a number above 0, or None, got {value!r}")
        self.log = log
        self.every_secs = every_secs
        self.every_rows = every_rows
        self.failures = 0
        """Commits that failed so far."""
        self._clock = clock
        self._last = clock()
        self._last_step = -1
        self._in_progress: Future[int] | None = None

    def poll(
        self,
        *,
        step: int,
        event_time: int = 0,
        source: Callable[[], State] | None = None,
        dense: Callable[[], Mapping[str, State]] | None = None,
        begin_parts: Callable[[], Parts | None] | None = None,
    ) -> Future[int] | None:
        """Commit if it is due. Returns the commit in progress, or None. `source` and `dense` are called only for a commit.

        If other processes hold the rows, `begin_parts` lets them take what they have now, and returns what waits for it, or None
        if they cannot at the moment. Every later step is then a change.
        """
        self._report_failure()
        if self.log.busy or not self._due(0 if begin_parts is None else int(step != self._last_step)):
            return None
        self._last = self._clock()
        parts = None if begin_parts is None else begin_parts()
        if begin_parts is not None and parts is None:
            return None
        self._last_step = step
        self._in_progress = self.log.commit_in_background(
            step=step,
            event_time=event_time,
            source=None if source is None else source(),
            dense=None if dense is None else dense(),
            parts=parts,
        )
        return self._in_progress

    def _due(self, elsewhere: int) -> bool:
        changed = self.log.changed + elsewhere
        in_time = self.every_secs is not None and self._clock() - self._last >= self.every_secs
        return changed > 0 and (in_time or (self.every_rows is not None and changed >= self.every_rows))

    def _report_failure(self) -> None:
        """Log the failure of the last commit, for which nobody may have waited."""
        if self._in_progress is None or not self._in_progress.done():
            return
        error, self._in_progress = self._in_progress.exception(), None
        if error is not None:
            self.failures += 1
            _logger.warning("the change log could not be written; the next commit will have the changes: %s", error)
