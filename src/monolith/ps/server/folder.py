"""The folder of a parameter server: a log of its changes, snapshots and checkpoints, from which it restores itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from monolith.durable import write_durably
from monolith.errors import CorruptFileError, InvalidArgumentError, MonolithError, StorageError
from monolith.log.change_log import ChangeLog
from monolith.process_bound import WorkerThreads
from monolith.ps.protocol.control_messages import SaveBegun
from monolith.ps.server.state import ServerState, is_of_rank
from monolith.state.model_dir import LOG, SERVERS, ModelDir
from monolith.state.restore import prepare_tables
from monolith.state.restore_points import RestorePoint, find_restore_point, restore_point_at
from monolith.state.retention import remove_unreachable
from monolith.state.save import PendingCheckpoint, begin_checkpoint
from monolith.state.snapshot import OpenSnapshot, SnapshotScan, write_snapshot
from monolith.table.table_file import FileEntry

__all__ = ["ServerFolder", "kept_identity"]

_RESTORING = "restoring"
"""A file that exists while the folder does not yet hold what the server was given."""
_RESTORED_TO = "restore_to"
"""A file with the last moment to which the server was reset."""
_FOLLOWED = "followed"
"""A file that exists once a replica has followed the server."""
_LOOK_EVERY = 64
"""Commits between two checks whether a snapshot is due, which reads many files."""

_logger = logging.getLogger(__name__)


class ServerFolder:
    """Keeps `state` in `folder`, a model_dir of its own, and restores it on construction, before the server listens.

    Args:
        folder: on a local disk. Created if it does not exist.
        state: empty, restored here.
        flush_secs: None: the log is written with checkpoints only. Above 0: seconds between commits in the background, which a
            crash loses at most. 0: `acknowledge` returns only when everything so far is durable.
        take_over: take the folder from a process that still holds it, and fence that process.
        restore_to: a `Moment` to go back to, once. None: the newest state. Raises `LogGapError` if that cannot be reached.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept = ServerFolder(Path(folder), ServerState(), flush_secs=0)
        ...     kept.restored, kept.commit()
        ...     kept.close()
        ...     again = ServerFolder(Path(folder), ServerState(), flush_secs=0)
        ...     again.restored
        ...     again.close()
        (0, 1)
        1
    """

    def __init__(
        self,
        folder: Path,
        state: ServerState,
        *,
        flush_secs: float | None = None,
        take_over: bool = False,
        restore_to: str | None = None,
    ) -> None:
        self.folder = folder
        self._home = ModelDir(folder)
        self.restored = 0
        """The number of the log to which the server has restored itself. 0 if there was none."""
        self._state = state
        self._flush_secs = flush_secs
        # One commit, save or restore at a time. Not an RLock: a save begins on one thread and ends on another.
        self._writing = threading.Lock()
        self._moved = threading.Condition()
        self._durable = state.gate.changes
        self._leading = False
        self._commits = 0
        self._marked = (folder / _RESTORING).exists()
        # Whether the log begins with rows that are in no snapshot yet. Then a commit alone cannot be restored from.
        self._rootless = False
        self._scan = SnapshotScan(folder)
        self._closing = threading.Event()
        self._threads = WorkerThreads(2, thread_name_prefix="monolith-ps-folder")
        # The lock comes first: what a predecessor writes after the log was read would be lost.
        # Empty until the server has restored itself.
        self._log = self._home.open_log([], parent=0, take_over=take_over)
        try:
            self._restore_itself(restore_to)
        except BaseException:
            self._log.close()
            raise
        state.tables.on_new = self._log.add_tables
        if self.restored:
            # A server that is restarted again and again would never commit often enough to check.
            self._snapshot_if_due()
        self._flusher: threading.Thread | None = None
        if flush_secs:
            self._flusher = threading.Thread(
                target=self._flush, args=(flush_secs,), name="monolith-ps-log", daemon=True
            )
            self._flusher.start()

    @property
    def sequence(self) -> int:
        """The last number committed."""
        return self._log.sequence

    @property
    def log_folder(self) -> Path:
        """The folder of the segments."""
        return self._log.folder

    @property
    def changed(self) -> int:
        """Ids whose rows are not committed."""
        return self._log.changed

    @property
    def change_log(self) -> ChangeLog:
        """The log of changes."""
        return self._log

    @property
    def is_followed(self) -> bool:
        """Whether replicas have followed this server or an earlier process of it."""
        return (self.folder / _FOLLOWED).exists()

    def note_follower(self) -> None:
        """Remember that replicas follow the server, so that the next process of it publishes its changes from the beginning."""
        if not self.is_followed:
            write_durably(self.folder / _FOLLOWED, b"")

    def require_own(self) -> None:
        """Raise `FencedError` if another process has taken the folder."""
        self._log.require_own()

    def acknowledge(self) -> None:
        """Return when all changes so far may be acknowledged. Raises `FencedError` if they must not be."""
        if self._flush_secs != 0:
            self.require_own()
            return
        version = self._state.gate.changes
        with self._moved:
            # The first thread commits for all that wait.
            self._moved.wait_for(lambda: self._durable >= version or not self._leading)
            if self._durable >= version:
                return
            self._leading = True
        try:
            self.commit()
        finally:
            with self._moved:
                self._leading = False
                self._moved.notify_all()

    def commit(self) -> int:
        """Commit now. Returns the durable sequence number."""
        with self._writing:
            return self._commit()

    def begin_save(self, name: str, *, step: int) -> tuple[SaveBegun, tuple[np.ndarray, ...], Future[FileEntry]]:
        """Begin a checkpoint, whose contents are fixed when this returns.

        Returns the owned buckets, the values of the dense parameters, and a function that waits until the checkpoint is durable
        and returns its manifest.
        """
        self._writing.acquire()
        before = self._state.checkpoint
        try:
            snapshot = self._scan.take()
            with self._state.gate.closed():
                version, begun = self._state.gate.changes, _begun(self._state)
                self._state.checkpoint = name
                dense = tuple(self._state.dense.read(begun.dense))
                pending = begin_checkpoint(
                    self.folder / name,
                    state=self._state.state(),
                    step=step,
                    tables=self._state.tables.all(),
                    log=self._log,
                    snapshot=snapshot,
                    state_in_log=True,
                    buckets=None if begun.ranges is None else list(begun.ranges),
                    model_dir=self._home,
                )
        except BaseException:
            self._state.checkpoint = before
            self._writing.release()
            raise
        assert pending.commit is not None  # there is a log
        pending.commit.add_done_callback(lambda written: self._rows_written(written, version))
        return begun, dense, self._threads.submit(self._finish, pending)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace the rows of the server in a block, which closes the gate itself. They are durable when the block is left.

        If the process dies before, the server is not initialised when it is started again.
        """
        with self._writing:
            self._scan.drop()
            write_durably(self.folder / _RESTORING, b"")
            self._marked = True
            yield
            self._log.reopen(self._state.tables.all(), parent=0)
            self._rootless = not self._log.complete
            self._commit()

    def close(self) -> None:
        """Commit the remaining changes, unless the log is written with checkpoints only, and release the folder."""
        self._closing.set()
        if self._flusher is not None:
            self._flusher.join()
        try:
            if self._flush_secs is not None and self._durable < self._state.gate.changes:
                self.commit()
        except MonolithError as error:
            _logger.error("the last changes could not be written: %s", error)
        finally:
            self._threads.shutdown()
            with self._writing:
                self._scan.drop()
                self._log.close()

    @property
    def model_dir(self) -> Path:
        """The model_dir of the run that the server belongs to. The folder itself if it is not <model_dir>/ps/<number>."""
        return self.folder.parent.parent if self.folder.parent.name == SERVERS else self.folder

    def _restore_itself(self, restore_to: str | None) -> None:
        goes_back = restore_to is not None and _text(self.folder / _RESTORED_TO) != restore_to
        point = restore_point_at(self._home, restore_to) if restore_to and goes_back else _newest(self._home)
        state = {} if point is None else point.state()
        if point is not None and is_of_rank(state):
            _logger.info("%s: is the folder of a rank, whose rows come with the checkpoint of the run", self.folder)
        elif point is not None:
            where = point.checkpoint or f"{self.folder}/{LOG}"
            self._state.declare_saved(state, where)
            # Rows that are in transit to another server are not owned, and must not be lost before it has them.
            report, put_in_place = prepare_tables(point, self._state.tables.all(), owned=False, reset_admission=True)
            self._state.load_state(state, where)
            put_in_place()
            self._log.reopen(self._state.tables.all(), parent=report.parent)
            self.restored = point.sequence
            self._durable = self._state.gate.changes
            tables = self._state.tables.all()
            rows = sum(len(table) for table in tables)
            _logger.info("restored %d rows of %d tables from %s", rows, len(tables), self.folder)
        if self._marked:
            self._state.initialised = False
        if goes_back:
            # Start a new line, which excludes later commits, before the first request.
            sequence = self._log.sequence
            self.commit()
            write_durably(self.folder / _RESTORED_TO, str(restore_to).encode())
            _logger.warning("%s: went back to %s, number %d of the log", self.folder, restore_to, sequence)

    def _commit(self) -> int:
        snapshot = self._write_snapshot() if self._rootless else self._scan.take()
        with self._state.gate.closed():
            version, state = self._state.gate.changes, self._state.state()
            written = self._log.commit_in_background(step=self._state.step, source=state.pop("source"), dense=state)
        sequence = written.result()
        if snapshot is not None:
            snapshot.close(sequence)
            self._rootless = False
            self._threads.submit(self._clean)
        self._committed(version)
        if self._marked and self._state.initialised:
            (self.folder / _RESTORING).unlink()
            self._marked = False
        return sequence

    def _committed(self, version: int) -> None:
        with self._moved:
            self._durable = max(self._durable, version)
            self._moved.notify_all()
        self._commits += 1
        if self._commits % _LOOK_EVERY == 0:
            self._snapshot_if_due()

    def _snapshot_if_due(self) -> None:
        self._scan.begin(
            lambda: self._threads.submit(self._write_snapshot), due=lambda: self._home.needs_snapshot(self._log)
        )

    def _rows_written(self, written: Future[int], version: int) -> None:
        try:
            if written.exception() is None:
                self._committed(version)
        finally:
            self._writing.release()

    def _finish(self, pending: PendingCheckpoint) -> FileEntry:
        pending.finish()
        self._clean()
        assert pending.entry is not None  # it is finished
        return pending.entry

    def _clean(self) -> None:
        """Remove files that are no longer needed, except those of a successor."""
        try:
            self.require_own()
            remove_unreachable(self._home)
        except MonolithError as error:
            _logger.warning("%s: cannot remove files that are no longer needed: %s", self.folder, error)

    def _write_snapshot(self) -> OpenSnapshot:
        return write_snapshot(self._home, self._state.tables.all(), self._log)

    def _flush(self, every: float) -> None:
        while not self._closing.wait(every):
            if self._durable < self._state.gate.changes:
                try:
                    self.commit()
                except MonolithError as error:
                    _logger.warning("the log could not be written, its changes wait for the next commit: %s", error)


def _begun(state: ServerState) -> SaveBegun:
    ranges = state.ranges()
    return SaveBegun(
        ranges=None if ranges is None else tuple((one.start, one.stop) for one in ranges),
        dense=state.dense.declared(),
        moving_dense=state.moving_dense(),
        gave_dense=state.gave_dense(),
    )


def _text(path: Path) -> str | None:
    return path.read_text(errors="replace") if path.exists() else None


def _newest(home: ModelDir) -> RestorePoint | None:
    try:
        return find_restore_point(home)
    except InvalidArgumentError:
        return None  # there is nothing, not even something damaged


IDENTITY = "server"
"""Name of the file. Not in the log: the source of a transfer must recognize the server from its start."""


def kept_identity(folder: Path, otherwise: int) -> int:
    """Return the identity of the server of `folder`. At first it is `otherwise`, which is then durable.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept_identity(Path(folder), 5), kept_identity(Path(folder), 6)
        (5, 5)
    """
    path = folder / IDENTITY
    try:
        if not path.exists():
            write_durably(path, str(otherwise).encode())
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise StorageError(f"{path}: cannot be read or written: {error.strerror}") from error
    if not text.isdecimal() or not 0 < int(text) < 2**63:
        raise CorruptFileError(f"{path}: expected the number of a server, got {text[:40]!r}")
    return int(text)
