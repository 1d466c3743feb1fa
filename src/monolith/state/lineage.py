"""Which snapshot and which segments of the log lead to a state."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from monolith.errors import CorruptFileError, LogGapError, StorageError
from monolith.log import ChangeLog, LogReader, SegmentInfo
from monolith.state.manifest import MANIFEST, check_sizes
from monolith.state.snapshot import SNAPSHOTS, SnapshotManifest, local_folder, read_snapshot
from monolith.state.storage import LocalFolder, StrPath
from monolith.table.table_file import FileEntry

__all__ = ["LOG", "Lineage", "find_lineage", "needs_snapshot"]

LOG = "log"
"""The folder of the model_dir that has the segments."""
SNAPSHOT_BYTES = 64 * 2**20
SNAPSHOT_SEGMENTS = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """A snapshot, or nothing, and the segments that lead on from it."""

    name: str | None
    """Of the snapshot."""
    snapshot: SnapshotManifest | None
    segments: tuple[SegmentInfo, ...]

    def snapshot_entry(self, model_dir: LocalFolder) -> FileEntry | None:
        """The snapshot's manifest, as a checkpoint's manifest names it."""
        if self.name is None:
            return None
        name = f"{SNAPSHOTS}/{self.name}/{MANIFEST}"
        return FileEntry.of(name, model_dir.read(name))

    def segment_entries(self) -> tuple[FileEntry, ...]:
        """The segments, as a checkpoint's manifest names them."""
        return tuple(
            FileEntry(name=f"{LOG}/{info.name}", size=info.size, checksum=f"crc32c:{info.checksum:08x}")
            for info in self.segments
        )


def find_lineage(model_dir: StrPath, sequence: int) -> Lineage | None:
    """The shortest way to the state at `sequence`: from the newest snapshot on its line, or from where the log began.

    Returns:
        None if the tables had rows before the log began and no snapshot has them yet.

    Raises:
        LogGapError: A segment or snapshot on the way is missing. The message names it.
    """
    top = local_folder(model_dir)
    reader = LogReader(top.path / LOG)
    damaged: list[str] = []
    for name in sorted(top.inside(SNAPSHOTS).names(), reverse=True):
        found = _through(top, reader, name, sequence, damaged)
        if found is not None:
            return found
    try:
        segments = reader.chain(sequence)
    except LogGapError as error:
        raise LogGapError("; ".join([str(error), *damaged])) from None
    if segments and not segments[0].complete:
        return None  # there were rows before the log began
    return Lineage(name=None, snapshot=None, segments=tuple(segments))


def needs_snapshot(model_dir: StrPath, log: ChangeLog, *, ratio: float = 1.0, at_least: int = SNAPSHOT_BYTES) -> bool:
    """Whether the next checkpoint should come with a snapshot of its own.

    So it is when nothing else leads there, because tables had rows before the log began or a segment was lost; and when a restore
    would have to replay thousands of segments, or more than `at_least` bytes and more than `ratio` times those of the last
    snapshot.
    """
    try:
        lineage = find_lineage(model_dir, log.sequence)
    except LogGapError as error:
        _log.warning("%s; the next checkpoint writes a snapshot of all rows, which does not need that segment", error)
        return True
    if lineage is None or (lineage.snapshot is None and not log.complete):
        return True
    replayed = sum(info.size for info in lineage.segments)
    snapshot = 0 if lineage.snapshot is None else lineage.snapshot.size
    return replayed > max(at_least, ratio * snapshot) or len(lineage.segments) > SNAPSHOT_SEGMENTS


def _through(top: LocalFolder, reader: LogReader, name: str, sequence: int, damaged: list[str]) -> Lineage | None:
    """The way through snapshot `name`, or None if it is not on the way. Why it cannot be read is added to `damaged`."""
    try:
        snapshot = read_snapshot(str(top), name)
        if not snapshot.sequence < snapshot.closed_by <= sequence:
            return None
        check_sizes(top.inside(f"{SNAPSHOTS}/{name}"), snapshot.files)
        segments = reader.chain(sequence, snapshot.sequence)
    except LogGapError:
        return None  # of another line, or behind a gap: an older one may do
    except (CorruptFileError, StorageError) as error:
        damaged.append(str(error))  # or unfinished
        return None
    # A snapshot that was closed on another line holds changes of that line.
    if snapshot.closed_by not in (info.sequence for info in segments):
        return None
    return Lineage(name=name, snapshot=snapshot, segments=tuple(segments))
