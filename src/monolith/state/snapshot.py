"""Snapshots: all rows of all tables, in files by range of buckets, written while they train and made exact by the log.

A scan of tables that train shows each row at some moment between its begin and its end. The segments of the log after the last
one committed before the begin hold every row that changed since. Replayed up to a cut made after the end, they give each row the
value it had at that cut. The scan may therefore begin and end anywhere, and training does not wait for it.
"""

from __future__ import annotations

import logging
import threading
import time as clock
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from monolith.errors import MonolithError
from monolith.log import ChangeLog
from monolith.log.commit import Tables
from monolith.state.locks import WriterMark
from monolith.state.manifest import MANIFEST, SnapshotManifest, TableEntry
from monolith.state.model_dir import SNAPSHOTS, ModelDir
from monolith.state.storage import StrPath
from monolith.state.tables import group_tables, write_tables
from monolith.table.table_file import FileEntry

__all__ = ["OpenSnapshot", "SnapshotScan", "write_snapshot"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OpenSnapshot:
    """A snapshot with all rows written, but not yet closed by a cut of the log.

    Pass it to the next `begin_checkpoint`, or `abandon` it.
    """

    model_dir: ModelDir
    name: str
    mark: WriterMark
    sequence: int
    time: float
    files: tuple[FileEntry, ...]
    tables: dict[str, TableEntry]

    def close(self, closed_by: int) -> SnapshotManifest:
        """Complete it. `closed_by` is the number of a segment that was cut after `write_snapshot` had returned."""
        manifest = SnapshotManifest(
            sequence=self.sequence, closed_by=closed_by, time=self.time, files=self.files, tables=self.tables
        )
        self.model_dir.write(f"{SNAPSHOTS}/{self.name}", manifest)
        self.mark.release()
        return manifest

    def abandon(self) -> None:
        """Remove it, unless it was closed."""
        snapshots = self.model_dir.folder.inside(SNAPSHOTS)
        if snapshots.inside(self.name).size(MANIFEST) is None:
            snapshots.remove(self.name)
        self.mark.release()


class SnapshotScan:
    """At most one snapshot of `model_dir` that is written in the background. Several threads may use it.

    Example:
        >>> scan = SnapshotScan("runs/ctr")
        >>> scan.take() is None
        True
    """

    def __init__(self, model_dir: object) -> None:
        self._where = model_dir
        self._lock = threading.Lock()
        self._writing: Future[OpenSnapshot] | None = None

    @property
    def writing(self) -> Future[OpenSnapshot] | None:
        """The snapshot that is being written, or that has ended and was not taken."""
        return self._writing

    def begin(self, write: Callable[[], Future[OpenSnapshot]], *, due: Callable[[], bool]) -> None:
        """Begin one with `write`, unless there is one or `due` says that none is needed."""
        with self._lock:
            if self._writing is None and due():
                self._writing = write()

    def take(self) -> OpenSnapshot | None:
        """Return the snapshot that has ended, once. One that could not be written is logged."""
        with self._lock:
            if self._writing is None or not self._writing.done():
                return None
            ended, self._writing = self._writing, None
        try:
            return ended.result()
        except MonolithError as error:
            _logger.warning("%s: a snapshot could not be written, the next one will be: %s", self._where, error)
            return None

    def drop(self) -> None:
        """Wait for the one that is being written, and remove it."""
        with self._lock:
            dropped, self._writing = self._writing, None
        if dropped is not None and dropped.exception() is None:
            dropped.result().abandon()


def write_snapshot(
    model_dir: StrPath | ModelDir, tables: Tables, log: ChangeLog, *, time: float | None = None
) -> OpenSnapshot:
    """Write all rows of `tables` into a new folder of `<model_dir>/snapshots`, on any thread, while others train and commit.

    `log` is the log of these tables in `<model_dir>/log`. `time` is now in seconds since 1970, by default from the clock.
    """
    home, groups = ModelDir.of(model_dir), group_tables(tables)
    sequence, began = log.sequence, clock.time() if time is None else time
    # Several snapshots may begin after the same segment: on other lines, or because nothing was committed meanwhile.
    taken, name, number = set(home.snapshots()), f"{sequence:020d}", 1
    while name in taken:
        name, number = f"{sequence:020d}-{number}", number + 1
    snapshots = home.folder.inside(SNAPSHOTS)
    mark = WriterMark(snapshots.inside(name))
    try:
        files, entries = write_tables(snapshots.inside(name), "tables", groups)
    except BaseException:
        snapshots.remove(name)
        mark.release()
        raise
    return OpenSnapshot(
        model_dir=home, name=name, mark=mark, sequence=sequence, time=began, files=tuple(files), tables=entries
    )
