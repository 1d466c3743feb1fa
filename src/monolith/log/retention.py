"""Removing segments that nothing needs any more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from monolith.errors import LogGapError, StorageError
from monolith.log.log_reader import LogReader
from monolith.log.pruned import add_pruned
from monolith.log.segment_info import segment_name

__all__ = ["prune"]


def prune(
    folder: str | os.PathLike[str],
    chains: Iterable[tuple[int, int]],
    *,
    keep: Iterable[int] = (),
    min_age: float = 0.0,
    clock: Callable[[], float] = time.time,
) -> list[int]:
    """Remove the segments that no chain needs, and return their numbers.

    What is newer than every chain stays always, and so does what leads from a chain or snapshot to the newest segment: a run is
    adding to it, or a follower is reading it. A chain that is damaged or has a hole is an error, and then nothing is removed.
    The oldest go first, so that being killed midway leaves a log that begins a little later.

    Args:
        folder: the log's.
        chains: pairs (since, to): the segments after `since`, where a snapshot is or 0, up to `to` must stay. None: nothing is
            removed.
        keep: further segments that must stay.
        min_age: seconds since a segment was written for which it stays in any case, so that followers need not hurry.
        clock: seconds since 1970.

    Example:
        >>> import tempfile
        >>> from monolith.log import ChangeLog
        >>> with tempfile.TemporaryDirectory() as folder, ChangeLog(folder, []) as log:
        ...     _ = [log.commit(step=step) for step in (10, 20, 30, 40)]
        ...     prune(folder, [(2, 3)])
        [1, 2]
    """
    reader = LogReader(folder)
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
    """What leads from `known` to the newest segment. It need not be newer than all chains: a run may have gone back."""
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
        raise StorageError(f"{path}: cannot be looked at: {error.strerror}") from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be removed: {error.strerror}") from error
