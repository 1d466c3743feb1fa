"""`LogReader`: the segments of a folder and how they continue each other. Needs no lock, because segments appear whole."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, MonolithError, StorageError
from monolith.log.bounds import HEAD, add_pruned, read_head, read_pruned
from monolith.log.segment import LogSegment
from monolith.log.segment_format import SegmentInfo, SegmentTable, segment_name, sequence_of
from monolith.urls import local_path

__all__ = ["LogReader", "Verdict", "prune"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of `LogReader.verify` for one segment."""

    sequence: int
    """By the name of its file."""
    error: str | None
    """What is wrong with it. None if nothing is."""


class LogReader:
    """The log in a local folder. It may be written, followed by others and pruned at the same time.

    Every segment names its parent. After a restore to an earlier number the log continues from there, with numbers above all
    that exist. An abandoned line stays readable and is never mixed in.

    A reader remembers the header of each segment as long as its file is the same one.

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
        self._infos: dict[int, tuple[tuple[int, ...], SegmentInfo]] = {}
        self._configs: dict[str, dict[str, Any]] = {}

    def sequences(self) -> list[int]:
        """List the numbers of all segments, in order, by their file names. Empty if there is no folder."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be listed: {error.strerror}") from error
        found = sorted(sequence for name in names if (sequence := sequence_of(name)))
        if len(self._infos) > len(found):
            there = set(found)
            self._infos = {number: known for number, known in [*self._infos.items()] if number in there}
        return found

    @property
    def newest(self) -> int:
        """The highest sequence number. 0 if there is none."""
        return max(self.sequences(), default=0)

    def committed(self) -> int:
        """Return the sequence number of the last commit, whether its segment still exists or not. 0 if there is no head."""
        head = read_head(self.folder)
        return 0 if head is None else head.sequence

    def unknown_end(self) -> str | None:
        """Explain why the loss of the newest segment would go unnoticed. Returns None if it would be noticed.

        The first commit makes the head durable, so a log of several segments without a head has lost it.
        """
        if len(self.sequences()) < 2 or read_head(self.folder) is not None:
            return None
        return f"{self.folder / HEAD} is missing or empty: whether the newest segment is there cannot be verified"

    def require_committed(self, known: Mapping[int, int] | None = None) -> bool:
        """Raise `LogGapError` if the last committed segment is missing, and `CorruptFileError` if it was replaced.

        `known` are checksums by sequence number, of segments that need not be opened because they are verified elsewhere.
        Returns whether there is a head, without which nothing is known about the last segment.
        """
        head = read_head(self.folder)  # before the folder is listed: a writer may add to both
        newest = self.newest
        if head is None or head.sequence < newest:
            return head is not None
        if head.sequence > newest:
            there = f"the newest that is there is {segment_name(newest)}" if newest else "there is no segment at all"
            raise LogGapError(
                f"{self.folder}: segment {head.sequence} ({segment_name(head.sequence)}) was the last one committed and is "
                f"missing; {there}"
            )
        if ((known or {}).get(newest) or self.info(newest).checksum) != head.checksum:
            raise CorruptFileError(
                f"{self.folder / segment_name(newest)}: is not the segment that was committed; files of two runs were mixed"
            )
        return True

    def info(self, sequence: int) -> SegmentInfo:
        """Return the header of segment `sequence`. Raises `LogGapError` if it does not exist."""
        known = self._infos.get(sequence)
        path = self.folder / segment_name(sequence) if known is None else known[1].path
        file = _identity(path)
        if known is not None and known[0] == file != ():
            return known[1]
        with LogSegment(path) as segment:
            tables = tuple(map(self._with_shared_config, segment.info.tables))
            info = dataclasses.replace(segment.info, tables=tables)
        self._infos[sequence] = file, info
        return info

    def remember(self, info: SegmentInfo) -> None:
        """Take the header of a segment that this process has just written."""
        self._infos[info.sequence] = _identity(info.path), info

    def read(self, sequence: int) -> LogSegment:
        """Open segment `sequence`. Raises `LogGapError` if it does not exist."""
        return LogSegment(self.folder / segment_name(sequence))

    def segments(self) -> list[SegmentInfo]:
        """Return the headers of all segments, including those of abandoned lines, in order of their numbers."""
        infos = []
        for sequence in self.sequences():
            try:
                infos.append(self.info(sequence))
            except LogGapError:  # removed by retention since the folder was listed
                continue
        return infos

    def chain(self, to: int, since: int = 0) -> list[SegmentInfo]:
        """Return the segments that lead from `since` (0: from nothing) to `to`, oldest first.

        Raises `LogGapError` if one is missing, or if `to` does not continue `since`.
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
        """Yield segment `to`, its parent, and so on to the beginning. Raises `LogGapError` where one is missing."""
        info = self.info(to)
        yield info
        while info.parent:
            info = self._parent_of(info)
            yield info

    def line(self, to: int | None = None) -> list[SegmentInfo]:
        """Return the segments that lead to `to` (None: the newest), oldest first, as far back as retention has kept them.

        Raises `LogGapError` if one is missing that retention did not remove.
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
        """Return whether nothing before `info` belongs to its line, or retention has removed it."""
        # Without a checksum, the parent was not there when this one was written: the line continues a snapshot.
        return info.parent == 0 or info.parent_checksum is None or info.parent in read_pruned(self.folder)

    def restore_points(self, to: int | None = None) -> list[SegmentInfo]:
        """Return the segments of `line(to)` that hold the dense state, so a run can continue from them."""
        return [info for info in self.line(to) if info.has_dense]

    def follow(
        self, since: int = 0, *, poll: float = 0.5, wait: Callable[[float], object] = time.sleep
    ) -> Iterator[LogSegment]:
        """Yield every segment after `since` on the newest line, and wait for more without end.

        Args:
            since: The last sequence number already known.
            poll: Seconds between two listings of the folder.
            wait: Called with `poll`. A true result, as `threading.Event().wait` returns when it is set, ends the iteration.

        Raises:
            LogGapError: `since` was abandoned, or segments after it are missing. Start again from a snapshot.
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
                # A power cut can take back a segment that was seen before it was durable. Its number is then used again.
                if checksum is not None and info.parent_checksum not in (None, checksum):
                    raise LogGapError(
                        f"{info.path}: continues another segment {since} than the one followed; start from a snapshot"
                    )
                yield LogSegment(info.path)
                since, checksum = info.sequence, info.checksum
            if wait(poll):
                return

    def verify(self) -> Iterator[Verdict]:
        """Read every segment with all its checksums, and yield what is wrong with it and which ones are missing."""
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
                with segment:
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

    def _with_shared_config(self, table: SegmentTable) -> SegmentTable:
        """Configurations are nearly all of what a header holds, and the same in every segment."""
        shared = self._configs.setdefault(json.dumps(table.meta.config), table.meta.config)
        return dataclasses.replace(table, meta=table.meta.model_copy(update={"config": shared}))


def _identity(path: Path) -> tuple[int, ...]:
    """Tell a file from another one that takes its name. Empty if there is none, which `LogSegment` reports."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def prune(
    log: str | os.PathLike[str] | LogReader,
    chains: Iterable[tuple[int, int]],
    *,
    keep: Iterable[int] = (),
    below: int | None = None,
    min_age: float = 0.0,
    clock: Callable[[], float] = time.time,
) -> list[int]:
    """Remove the segments that no chain needs. Returns their numbers.

    A segment stays if it is newer than every chain, or leads from a chain or snapshot to the newest segment, because a run is
    adding to it or a follower is reading it. If a chain is damaged or has a gap, an error is raised and nothing is removed. The
    oldest are removed first, so a process killed midway leaves a log that begins a little later.

    Args:
        log: The folder of the log, or its reader.
        chains: Pairs (since, to). The segments after `since`, which is the number of a snapshot or 0, up to `to` stay. Without
            any chain nothing is removed.
        keep: Further segments that stay.
        below: Segments with this number and above stay.
        min_age: Seconds for which every segment stays after it was written, so followers need not hurry.
        clock: Returns seconds since 1970.

    Example:
        >>> import tempfile
        >>> from monolith.log import ChangeLog
        >>> with tempfile.TemporaryDirectory() as folder, ChangeLog(folder, []) as log:
        ...     _ = [log.commit(step=step) for step in (10, 20, 30, 40)]
        ...     prune(folder, [(2, 3)])
        [1, 2]
    """
    reader = log if isinstance(log, LogReader) else LogReader(log)
    reader.require_committed()
    wanted = list(chains)
    needed = set(keep) | {info.sequence for since, to in wanted for info in reader.chain(to, since)}
    newest = max((to for _, to in wanted), default=0)
    end = newest if below is None else min(newest, below)
    if wanted:
        needed |= _newest_line(reader, needed | {since for since, _ in wanted})
    removed = [
        sequence
        for sequence in reader.sequences()
        if sequence < end
        and sequence not in needed
        and _age(reader.folder / segment_name(sequence), clock()) >= min_age
    ]
    if removed:
        add_pruned(reader.folder, removed)
    for sequence in removed:
        _remove(reader.folder / segment_name(sequence))
    return removed


def _newest_line(reader: LogReader, known: set[int]) -> set[int]:
    """Return what leads from `known` to the newest segment, which is older than some chain if a run has gone back."""
    found: set[int] = set()
    with suppress(LogGapError):  # where the line begins
        for info in reader.back_from(reader.newest):
            if info.sequence in known:
                break
            found.add(info.sequence)
    return found


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be removed: {error.strerror}") from error
