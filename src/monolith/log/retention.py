"""Removing segments that nothing needs any more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from monolith.errors import LogGapError, StorageError
from monolith.log.bounds import add_pruned
from monolith.log.reader import LogReader
from monolith.log.segment_format import segment_name

__all__ = ["prune"]


def prune(
    log: str | os.PathLike[str] | LogReader,
    chains: Iterable[tuple[int, int]],
    *,
    keep: Iterable[int] = (),
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
    if wanted:
        needed |= _newest_line(reader, needed | {since for since, _ in wanted})
    removed = [
        sequence
        for sequence in reader.sequences()
        if sequence < newest
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
