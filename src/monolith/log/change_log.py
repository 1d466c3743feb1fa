"""`ChangeLog`: the writer of the log. What changed since the last commit becomes one durable segment."""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from monolith.durable import sync_to_disk
from monolith.errors import InvalidArgumentError, MonolithError, StorageError
from monolith.log.head import Head, HeadWriter
from monolith.log.log_reader import LogReader
from monolith.log.logged_tables import LoggedTables, TablesCut
from monolith.log.named_tables import Tables
from monolith.log.pace import Pace
from monolith.log.read_first import read_first
from monolith.log.segment_format import SegmentMeta
from monolith.log.segment_writer import remove_unfinished, write_segment
from monolith.log.writer_lock import WriterLock
from monolith.process_bound import ProcessBound, WorkerThreads
from monolith.state_bytes import PackedState, State, pack_state
from monolith.urls import local_path

__all__ = ["ChangeLog"]

TAKEN_OVER = 2**16
"""Numbers left out when a log is taken from a writer that may be alive: what that one is writing has a number among them."""

READ_FIRST_BYTES = 256 << 20
"""Changed rows that a commit beside training reads as fast as it can, before it writes them at its pace."""


@dataclass(frozen=True, kw_only=True)
class _Commit:
    """Everything of one moment that becomes a segment."""

    meta: SegmentMeta
    tables: TablesCut
    state: PackedState | None
    pace: Pace


class ChangeLog:
    """Writes the changes of `tables` to a folder on a local disk, commit by commit, each with the next sequence number.

    From now on the tables remember what changes. A commit takes what they remember, and they forget it only when the segment
    is durable: if writing fails, the next commit has it all. Rows from before are not in the log; a snapshot has them.

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
    ) -> None:
        """Open the log in `folder`, which is created if need be.

        Args:
            folder: on a local disk: a log needs fsync and rename. One writer at a time.
            tables: in this process. Equal names are shards of one table; a mapping gives names that differ from the tables' own.
            parent: the sequence number the state of `tables` comes from; None: the newest in `folder`, which must be the last
                one that was committed there, or it is a `LogGapError`; 0: from nothing.
            optimizer_state: False writes float32 values only, enough for serving and not for going on with training.
            take_over: take the log from a writer that still has it open, such as a process that hangs: its next commit raises
                `FencedError`.
            clock: seconds since 1970.
        """
        self.folder = Path(local_path(folder, "folder"))
        self._tables = LoggedTables(tables, "rows" if optimizer_state else "values")
        self._clock = clock
        self._one_commit = threading.Lock()
        self._bound = ProcessBound(f"the log {self.folder}")
        self._pace = Pace(1.0)
        self._thread: WorkerThreads | None = None
        self._next = 0
        self._lock = self._open_folder(take_over)
        try:
            self._head = HeadWriter(self.folder)
            self._continue_from(parent)
            self._next += TAKEN_OVER * take_over
        except BaseException:
            self._lock.release()
            raise
        self._tables.track_changes()

    @property
    def sequence(self) -> int:
        """The last sequence number committed here, or the one continued: the parent of the next commit."""
        return self._parent

    @property
    def complete(self) -> bool:
        """Whether this line of the log alone leads to the tables: they were empty when it began. Else it needs a snapshot."""
        return self._complete

    @property
    def busy(self) -> bool:
        """Whether a commit is under way, so that another one would wait."""
        return self._one_commit.locked()

    @property
    def changed(self) -> int:
        """Ids waiting for the next commit."""
        return self._tables.changed

    def add_tables(self, tables: Tables) -> None:
        """Let further tables, which must be empty, belong to the log from the next commit on; waits for one under way."""
        self._bound.require()
        with self._one_commit:
            self._tables.add(tables)

    def reopen(self, tables: Tables, *, parent: int | None = None) -> None:
        """Like closing the log and opening it with other tables or parent, but no other writer can come between."""
        self._bound.require()
        with self._one_commit:
            self._tables = LoggedTables(tables, self._tables.kind)
            self._continue_from(parent)
            self._tables.track_changes()

    def require_own(self) -> None:
        """Raise `FencedError` if another process has taken the log over."""
        self._lock.require_own()

    def commit(
        self, *, step: int, source: State = None, event_time: int = 0, dense: Mapping[str, State] | None = None
    ) -> int:
        """Write what changed since the last commit and return its sequence number; it is durable then.

        Call it between steps: the segment is the state of this moment exactly if nobody writes to the tables while they are cut,
        and of whole rows in any case. On `StorageError` nothing is lost: the next commit has it.

        Args:
            step: the global step.
            source: the place in the data that agrees with the tables, as a `state_dict()` gives it.
            event_time: newest event time trained, seconds since 1970; 0 takes the tables' own.
            dense: nested state of everything else; with it a run can be restored to this moment.
        """
        self._bound.require()
        self.hurry()
        with self._one_commit:
            return self._write(self._cut(step, source, event_time, dense, Pace(1.0)))

    def commit_in_background(
        self,
        *,
        step: int,
        source: State = None,
        event_time: int = 0,
        dense: Mapping[str, State] | None = None,
        share: float = 1.0,
    ) -> Future[int]:
        """Like `commit`, but only the cut is made now; the rows are read and written on a thread while training goes on.

        One at a time: a second call waits for the first to be written. The result has the sequence number or the error.
        `share` is the part of a processor's time that writing takes: less slows training less, and takes longer. With less
        than 1, rows are read first, up to 256 MiB of them, for training has to copy what is unread before it changes it.
        """
        self._bound.require()
        pace = Pace(share)
        self.hurry()
        self._one_commit.acquire()
        try:
            cut = self._cut(step, source, event_time, dense, pace)
            try:
                return self._threads().submit(self._write_and_release, cut)
            except BaseException:
                cut.tables.rollback()
                raise
        except BaseException:
            self._one_commit.release()
            raise

    def hurry(self) -> None:
        """Let the commit under way, if there is one, take all of a processor: somebody waits for it."""
        self._pace.hurry()

    def close(self) -> None:
        """Wait for a commit under way and let another writer in. What changed since stays uncommitted.

        In a forked child it does nothing: the log is its parent's.
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
            # The log and the folder it is in even if they were there: who made them may have died before syncing their names.
            for above in dict.fromkeys([folder.parent, folder.parent.parent, *(path.parent for path in new)]):
                sync_to_disk(above)
            lock = WriterLock(self.folder, take_over=take_over)
            remove_unfinished(self.folder)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{self.folder}: cannot be opened as a change log: {error.strerror}") from error
        return lock

    def _continue_from(self, parent: int | None) -> None:
        reader = LogReader(self.folder)
        committed = reader.committed()
        there = reader.sequences()
        newest = there[-1] if there else 0
        if parent is None:
            reader.require_committed()
        self._parent = newest if parent is None else _whole("parent", parent, 2**63)
        continued = reader.info(self._parent) if self._parent in there else None
        self._parent_checksum = None if continued is None else continued.checksum
        # Not a number of a segment that was lost either: it may come back.
        self._next = max(self._next, newest + 1, committed + 1, self._parent + 1)
        self._complete = self._tables.empty if self._parent == 0 else continued is None or continued.complete

    def _cut(self, step: int, source: State, event_time: int, dense: Mapping[str, State] | None, pace: Pace) -> _Commit:
        if not self._lock.held:
            raise InvalidArgumentError(f"{self.folder}: this log is closed; open it again to commit")
        self.require_own()
        step, event_time = _whole("step", step, 2**63), _whole("event_time", event_time, 2**32)
        state: dict[str, State] = {} if dense is None else {"dense": dict(dense)}
        if source is not None:
            state["source"] = source
        packed = pack_state(state, "commit") if state else None
        tables = self._tables.cut()
        try:
            self._pace = pace
            return _Commit(meta=self._meta(step, event_time, state, tables), tables=tables, state=packed, pace=pace)
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
        sequence = commit.meta.sequence
        # Used up even if writing fails: a reader may have seen the file before it was removed.
        self._next = sequence + 1
        try:
            changes = commit.tables.changes()
            if commit.pace.rests:
                changes = read_first(changes, READ_FIRST_BYTES, lambda piece: piece.nbytes)
            info = write_segment(self.folder, commit.meta, commit.pace.spread(changes), commit.state)
            # Only now: a successor that comes later reads this segment, one that came before may not have.
            self.require_own()
            # If this fails the segment stays: the head may name it already. The next commit does not continue it.
            self._head.write(Head(sequence, info.checksum))
        except BaseException as error:
            commit.tables.rollback()
            if isinstance(error, MonolithError) or not isinstance(error, Exception):
                raise
            # A successor has removed what was not finished: that it is there says more than how that shows here.
            self.require_own()
            raise StorageError(
                f"{self.folder}: cannot write sequence {sequence}: {error}; the next commit has its changes"
            ) from error
        commit.tables.commit()
        self._parent, self._parent_checksum = sequence, info.checksum
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
