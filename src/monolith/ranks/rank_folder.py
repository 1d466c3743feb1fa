"""The folder of a rank: a log of the changes of its rows, snapshots, and its parts of the run's checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, wait

from monolith.errors import MonolithError
from monolith.log import ChangeLog
from monolith.process_bound import WorkerThreads
from monolith.state.manifest import MANIFEST
from monolith.state.model_dir import LOG, SERVERS, ModelDir
from monolith.state.retention import remove_unreachable
from monolith.state.save import PendingCheckpoint, begin_checkpoint
from monolith.state.snapshot import OpenSnapshot, SnapshotScan, write_snapshot
from monolith.state_bytes import State
from monolith.table import EmbeddingTable, bucket_ranges
from monolith.table.table_file import FileEntry

__all__ = ["RankFolder", "rank_source"]

_LOOK_EVERY = 64
"""Commits between two checks whether a snapshot is due, which reads many files."""

_logger = logging.getLogger(__name__)


def rank_source(rank: int, ranks: int) -> dict[str, State]:
    """Return what a rank writes about its rows: which rank of how many it is, and the buckets that it owns.

    Example:
        >>> rank_source(1, 2)
        {'rank': 1, 'ranks': 2, 'buckets': [[2048, 4096]]}
    """
    owned = bucket_ranges(ranks)[rank]
    return {"rank": rank, "ranks": ranks, "buckets": [[owned.start, owned.stop]]}


class RankFolder:
    """Writes the rows of one rank to `<model_dir>/ps/<rank>`, when the chief asks all ranks to.

    Every commit is made between two steps. On a store without a log, a checkpoint has all rows, written while training waits.

    Args:
        model_dir: that of the run.
        tables: the rows of this rank.
        rank: this one.
        ranks: how many there are.
        parent: the number in the log of the folder that the rows come from, or 0.

    Example:
        >>> import tempfile
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(1))
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     folder = RankFolder(model_dir, {"test": table}, rank=0, ranks=2)
        ...     _ = table.reinitialize([7])
        ...     folder.ready(), folder.begin_cut(step=3).result().name
        ...     folder.close()
        (True, 'ps/0/log/00000000000000000001.segment')
    """

    def __init__(
        self, model_dir: str, tables: Mapping[str, EmbeddingTable], *, rank: int, ranks: int, parent: int = 0
    ) -> None:
        self.model_dir = model_dir
        self._inside = f"{SERVERS}/{rank}"
        self._home = ModelDir(f"{model_dir.rstrip('/')}/{self._inside}")
        self._tables = dict(tables)
        self._source, self._owned = rank_source(rank, ranks), bucket_ranges(ranks)[rank]
        self._threads = WorkerThreads(2, thread_name_prefix="monolith-rank-folder")
        self._log: ChangeLog | None = None
        self._scan = SnapshotScan(self._home)
        self._writing: Future[FileEntry] | None = None
        self._commits = 0
        # Whether the log begins with rows that are in no snapshot yet. Then a commit alone cannot be restored from.
        self._rootless = False
        if self._home.keeps_log:
            # The chief holds the log of the run, so whoever still holds this one belongs to a run that has ended.
            self._log = self._home.open_log(self._tables, parent=parent, take_over=True)
            if self._log.was_taken:
                _logger.warning("%s: was taken from a process that still runs, which cannot write any more", self._home)
            self._opened(parent)

    @property
    def path(self) -> str:
        """The folder."""
        return self._home.path

    @property
    def sequence(self) -> int:
        """The last number committed. 0 without a log."""
        return 0 if self._log is None else self._log.sequence

    @property
    def log_folder(self) -> str:
        """The folder of the segments. "" without a log."""
        return "" if self._log is None else str(self._log.folder)

    def ready(self) -> bool:
        """Return whether a cut can be made now without waiting. A snapshot that it needs is begun here."""
        if self._log is None or (self._writing is not None and not self._writing.done()):
            return False
        if not self._rootless:
            return True
        writing = self._scan.writing
        if writing is not None and writing.done() and writing.exception() is not None:
            self._scan.take()
        self._snapshot_if_due()
        return writing is not None and writing is self._scan.writing and writing.done()

    def begin_cut(self, *, step: int) -> Future[FileEntry]:
        """Commit the rows as they are now, if the folder is `ready`. The future returns the segment, seen from the model_dir."""
        assert self._log is not None
        snapshot = self._scan.take()
        try:
            commit = self._log.commit_in_background(step=step, source=self._source, dense={})
        except BaseException:
            if snapshot is not None:
                snapshot.abandon()
            raise
        self._writing = self._threads.submit(self._finish_cut, self._log, commit, snapshot)
        return self._writing

    def begin_save(self, name: str, *, step: int) -> Future[FileEntry]:
        """Take the rows as they are now into a checkpoint. The future returns its manifest, named as seen from the model_dir.

        Waits for what is being written.
        """
        if self._writing is not None:
            wait([self._writing])
        if self._rootless:
            self._snapshot_if_due()
            if (writing := self._scan.writing) is not None:
                wait([writing])
        pending = begin_checkpoint(
            f"{self._home}/{name}",
            state={"source": self._source},
            step=step,
            tables=self._tables,
            log=self._log,
            snapshot=self._scan.take(),
            state_in_log=self._log is not None,
            buckets=[(self._owned.start, self._owned.stop)],
            model_dir=self._home,
        )
        self._writing = self._threads.submit(self._finish_save, pending)
        return self._writing

    def reopen(self, *, parent: int) -> None:
        """Continue with rows that were replaced, and come from number `parent` of the log or, if it is 0, from elsewhere."""
        if self._writing is not None:
            wait([self._writing])
        self._scan.drop()
        if self._log is not None:
            self._log.reopen(self._tables, parent=parent)
            self._opened(parent)

    def close(self) -> None:
        """Wait for what is being written and release the folder. Later changes are in no log."""
        self._threads.shutdown()
        self._scan.drop()
        if self._log is not None:
            self._log.close()

    def _opened(self, parent: int) -> None:
        assert self._log is not None
        self._rootless = parent == 0 and not self._log.complete
        if self._rootless or parent:
            # Ranks that are restarted again and again would never commit often enough to check.
            self._threads.submit(self._snapshot_if_due)

    def _finish_cut(self, log: ChangeLog, commit: Future[int], snapshot: OpenSnapshot | None) -> FileEntry:
        try:
            sequence = commit.result()
            if snapshot is not None:
                snapshot.close(sequence)
                self._rootless = False
        except BaseException:
            if snapshot is not None:
                snapshot.abandon()
            raise
        if snapshot is not None:
            self._threads.submit(self._clean)
        self._commits += 1
        if self._commits % _LOOK_EVERY == 0:
            self._threads.submit(self._snapshot_if_due)
        return self._home.log.info(sequence).entry(f"{self._inside}/{LOG}")

    def _finish_save(self, pending: PendingCheckpoint) -> FileEntry:
        pending.finish()
        self._rootless = False
        self._clean()
        self._snapshot_if_due()
        assert pending.entry is not None  # it is finished
        return pending.entry.model_copy(update={"name": f"{self._inside}/{pending.name}/{MANIFEST}"})

    def _snapshot_if_due(self) -> None:
        log = self._log
        if log is not None:
            self._scan.begin(
                lambda: self._threads.submit(write_snapshot, self._home, self._tables, log),
                due=lambda: self._rootless or self._home.needs_snapshot(log),
            )

    def _clean(self) -> None:
        """Remove files that are no longer needed, except those of a successor."""
        try:
            if self._log is not None:
                self._log.require_own()
            remove_unreachable(self._home)
        except MonolithError as error:
            _logger.warning("%s: cannot remove files that are no longer needed: %s", self._home, error)
