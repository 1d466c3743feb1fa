"""`LogReader`: the segments of a folder, and which of them lead to which. Needs no lock: segments appear whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, MonolithError, StorageError
from monolith.log.head import HEAD, read_head
from monolith.log.info_cache import segment_info
from monolith.log.pruned import read_pruned
from monolith.log.segment import LogSegment
from monolith.log.segment_info import SegmentInfo, segment_name, sequence_of
from monolith.urls import local_path

__all__ = ["LogReader", "Verdict"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `LogReader.verify` found out about one segment."""

    sequence: int
    """Of its file's name."""
    error: str | None
    """What is wrong with it; None: nothing."""


class LogReader:
    """The log in a local folder, also while it is being written, followed by others and pruned.

    Every segment names its parent. After a restore to an earlier number the log goes on from there, with numbers above all
    that exist; what was abandoned stays readable and is never mixed in.

    Example:
        >>> import tempfile
        >>> from monolith.log import ChangeLog, LogReader
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ChangeLog(folder, []) as log:
        ...         _ = [log.commit(step=step) for step in (10, 20, 30)]
        ...     with ChangeLog(folder, [], parent=1) as log:  # as if restored to step 10
        ...         _ = log.commit(step=11)
        ...     reader = LogReader(folder)
        ...     [info.sequence for info in reader.segments()], [info.sequence for info in reader.chain(4)]
        ([1, 2, 3, 4], [1, 4])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(local_path(folder, "folder"))

    def sequences(self) -> list[int]:
        """The numbers of all segments, in order, by their names alone; none if there is no folder."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be listed: {error.strerror}") from error
        return sorted(found for name in names if (found := sequence_of(name)))

    @property
    def newest(self) -> int:
        """The highest sequence number; 0 if there is none."""
        return max(self.sequences(), default=0)

    def committed(self) -> int:
        """The sequence number of the last commit, whether its segment is still there or not. 0 if nothing says so."""
        head = read_head(self.folder)
        return 0 if head is None else head.sequence

    def unknown_end(self) -> str | None:
        """Why a lost newest segment would go unnoticed, if it would.

        The first commit makes the head durable, so that a log of several segments without one has lost it.
        """
        if len(self.sequences()) < 2 or read_head(self.folder) is not None:
            return None
        return f"{self.folder / HEAD} is missing or empty: nobody can tell whether the newest segment is there"

    def require_committed(self) -> None:
        """Raise `LogGapError` if the last segment that was committed is missing, and `CorruptFileError` if it was replaced."""
        head = read_head(self.folder)  # before the folder is listed: a writer may add to both
        newest = self.newest
        if head is None or head.sequence < newest:
            return
        if head.sequence > newest:
            there = f"the newest that is there is {segment_name(newest)}" if newest else "there is no segment at all"
            raise LogGapError(
                f"{self.folder}: segment {head.sequence} ({segment_name(head.sequence)}) was the last one committed and is "
                f"missing; {there}"
            )
        if self.info(newest).checksum != head.checksum:
            raise CorruptFileError(
                f"{self.folder / segment_name(newest)}: is not the segment that was committed; files of two runs were mixed"
            )

    def info(self, sequence: int) -> SegmentInfo:
        """What segment `sequence` says of itself; `LogGapError` if it is not there."""
        return segment_info(self.folder / segment_name(sequence))

    def read(self, sequence: int) -> LogSegment:
        """Segment `sequence`; `LogGapError` if it is not there."""
        return LogSegment(self.folder / segment_name(sequence))

    def segments(self) -> list[SegmentInfo]:
        """All segments, those of abandoned lines too, in order of their numbers."""
        infos = []
        for sequence in self.sequences():
            try:
                infos.append(self.info(sequence))
            except LogGapError:  # removed by retention since the folder was listed
                continue
        return infos

    def chain(self, to: int, since: int = 0) -> list[SegmentInfo]:
        """The segments that lead from `since` (0: from nothing) to `to`, oldest first.

        `LogGapError` if one is missing, or if `to` does not continue `since`.
        """
        if not 0 <= since <= to:
            raise InvalidArgumentError(f"since: expected a sequence number in [0, to = {to}], got {since}")
        found: list[SegmentInfo] = []
        if to > since:
            for info in self.back_from(to):
                found.append(info)
                if info.parent <= since:
                    break
        if found and found[-1].parent != since:
            raise LogGapError(
                f"{self.folder}: sequence {to} does not continue {since}, which was abandoned for {found[-1].parent}; "
                "start from a snapshot or checkpoint"
            )
        return found[::-1]

    def back_from(self, to: int) -> Iterator[SegmentInfo]:
        """Segment `to`, its parent, and so on to the beginning; `LogGapError` where one is missing."""
        info = self.info(to)
        yield info
        while info.parent:
            info = self._parent_of(info)
            yield info

    def line(self, to: int | None = None) -> list[SegmentInfo]:
        """The segments that lead to `to` (None: the newest), oldest first, as far back as retention has kept them.

        `LogGapError` if one is missing that retention did not remove.
        """
        if to is None:
            self.require_committed()
        found: list[SegmentInfo] = []
        sequence = self.newest if to is None else to
        if sequence == 0:
            return found
        try:
            found.extend(self.back_from(sequence))
        except LogGapError:
            if not found or not self.begins_with(found[-1]):
                raise
        return found[::-1]

    def begins_with(self, info: SegmentInfo) -> bool:
        """Whether nothing before `info` belongs to its line, or it was removed by retention."""
        # Without a checksum, the parent was not there when this one was written: the line continues a snapshot.
        return info.parent == 0 or info.parent_checksum is None or info.parent in read_pruned(self.folder)

    def restore_points(self, to: int | None = None) -> list[SegmentInfo]:
        """The segments of `line(to)` that hold the dense state, so that a run can go on from there."""
        return [info for info in self.line(to) if info.has_dense]

    def follow(
        self, since: int = 0, *, poll: float = 0.5, wait: Callable[[float], object] = time.sleep
    ) -> Iterator[LogSegment]:
        """Every segment after `since` on the newest line, waiting for more without end.

        Args:
            since: the last sequence number already known.
            poll: seconds between two looks at the folder.
            wait: called with `poll`; a true answer, as `threading.Event().wait` gives when it is set, ends the iteration.

        `LogGapError` when `since` was abandoned or the segments after it are missing: start again from a snapshot.
        """
        checksum: int | None = None
        while True:
            self.require_committed()
            newest = self.newest
            if newest < since:
                raise LogGapError(
                    f"{self.folder}: segment {since} ({segment_name(since)}), the last one followed, is missing, and so is "
                    "everything after it; start from a snapshot"
                )
            for info in self.chain(newest, since) if newest > since else ():
                # A power cut can take back a segment that was seen before it was durable; its number then comes again.
                if checksum is not None and info.parent_checksum not in (None, checksum):
                    raise LogGapError(
                        f"{info.path}: continues another segment {since} than the one followed; start from a snapshot"
                    )
                yield LogSegment(info.path)
                since, checksum = info.sequence, info.checksum
            if wait(poll):
                return

    def verify(self) -> Iterator[Verdict]:
        """Read every segment wholly, checksums and all, and tell what is wrong with it and which ones are missing."""
        try:
            self.require_committed()
            if (unknown := self.unknown_end()) is not None:
                yield Verdict(sequence=self.newest, error=unknown)
        except LogGapError as found:
            yield Verdict(sequence=self.committed(), error=str(found))
        except MonolithError as found:
            yield Verdict(sequence=self.newest, error=str(found))
        for sequence in self.sequences():
            try:
                segment = self.read(sequence)
            except LogGapError:
                continue  # removed since the folder was listed
            except MonolithError as found:
                yield Verdict(sequence=sequence, error=str(found))
            else:
                yield Verdict(sequence=sequence, error=self._fault(segment))

    def _fault(self, segment: LogSegment) -> str | None:
        try:
            segment.check()
            if segment.info.parent:
                self._parent_of(segment.info)
        except LogGapError as error:
            return None if self.begins_with(segment.info) else str(error)
        except MonolithError as error:
            return str(error)
        return None

    def _parent_of(self, child: SegmentInfo) -> SegmentInfo:
        try:
            parent = self.info(child.parent)
        except LogGapError:
            raise LogGapError(
                f"{self.folder}: segment {child.parent} ({segment_name(child.parent)}), which {child.name} continues, is missing"
            ) from None
        if child.parent_checksum is not None and child.parent_checksum != parent.checksum:
            raise CorruptFileError(
                f"{child.path}: continues another segment {parent.sequence} than the one in this folder; files of two runs "
                "were mixed"
            )
        return parent
