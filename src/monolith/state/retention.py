"""Which checkpoints stay: the newest few, one every so many hours, those exempt, and those that someone reads."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import replace

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.state.checkpoint_folder import is_complete, remove_checkpoint
from monolith.state.checkpoint_state import (
    INDEX,
    CheckpointState,
    read_checkpoint_state,
    write_checkpoint_state,
)
from monolith.state.in_use import claimed
from monolith.state.manifest import read_manifest
from monolith.state.paths import base_name
from monolith.state.storage import StrPath
from monolith.state.store_assets import remove_assets

__all__ = ["CheckpointHistory", "drop_checkpoint"]

_log = logging.getLogger(__name__)


class CheckpointHistory:
    """The checkpoints a saver has written and not removed, oldest first, and the index file that lists them.

    Args:
        max_to_keep: how many stay; exempt ones do not count. None or 0 keeps all on disk and lists only the newest.
        keep_checkpoint_every_n_hours: of those that would go, one in so many hours stays for good and leaves the list.
        clock: seconds since 1970.

    Example:
        >>> history = CheckpointHistory(max_to_keep=2)
        >>> history.set_last_checkpoints_with_time([("/runs/model.ckpt-1", 0.0)])
        >>> history.last_checkpoints
        ['/runs/model.ckpt-1']
    """

    def __init__(
        self,
        *,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 0:
            raise InvalidArgumentError(f"max_to_keep: expected at least 0, or None, got {max_to_keep}")
        if keep_checkpoint_every_n_hours <= 0:
            raise InvalidArgumentError(
                f"keep_checkpoint_every_n_hours: expected more than 0, got {keep_checkpoint_every_n_hours}"
            )
        self.max_to_keep = max_to_keep or 0
        self._period = keep_checkpoint_every_n_hours * 3600
        self._clock = clock
        self._next_preserved = clock() + self._period
        self._last_preserved = 0.0
        self._entries: list[tuple[str, float]] = []

    @property
    def last_checkpoints(self) -> list[str]:
        """Paths, oldest first."""
        return [path for path, _ in self._entries]

    def set_last_checkpoints_with_time(self, entries: Iterable[tuple[str, float]]) -> None:
        """Take over the history of another saver: paths and times of their saves, oldest first."""
        self._entries = [(str(path), float(saved)) for path, saved in entries]

    def recover(self, paths: Iterable[StrPath]) -> None:
        """Take over those of `paths`, oldest first, that are there and complete, with the times of their saves."""
        found = [str(path) for path in paths if is_complete(path)]
        self._entries = [(path, read_manifest(path).time) for path in found]

    def recover_from_index(self, folder: StrPath, filename: str = INDEX) -> None:
        """Take over what the index of `folder` lists, and when it last kept one for good."""
        state = read_checkpoint_state(folder, filename)
        if state is None:
            return
        self.recover(state.all_model_checkpoint_paths)
        if state.last_preserved_timestamp:
            self._last_preserved = state.last_preserved_timestamp
            self._next_preserved = self._last_preserved + self._period

    def record(
        self,
        path: str,
        folder: StrPath,
        *,
        exempt: Collection[str] = (),
        filename: str = INDEX,
        relative: bool = True,
    ) -> list[str]:
        """Add a complete checkpoint, write the index of `folder`, remove what has to go; what was removed.

        A path that is listed already becomes the newest. One that has to go but is in use stays listed until a later call.
        """
        if self.max_to_keep:
            self._entries = [entry for entry in self._entries if entry[0] != path]
            self._entries.append((path, self._clock()))
        with ExitStack() as claims:
            doomed = self._expired({base_name(name) for name in exempt}, claims)
            # The index first: who reads it must not be sent to a checkpoint that is being removed.
            write_checkpoint_state(folder, self._state(path), filename, relative=relative)
            return [name for name in doomed if _removed(name)]

    def _expired(self, exempt: Collection[str], claims: ExitStack) -> list[str]:
        candidates = [entry for entry in self._entries if base_name(entry[0]) not in exempt]
        doomed = []
        # The newest is never one of them.
        for entry in candidates[: max(0, len(candidates) - self.max_to_keep)] if self.max_to_keep else ():
            path, saved = entry
            if saved > self._next_preserved:
                self._last_preserved = saved
                self._next_preserved += self._period
            elif claims.enter_context(claimed(path)):
                doomed.append(path)
            else:
                _log.info("%s is in use and stays for now", path)
                continue
            self._entries.remove(entry)
        return doomed

    def _state(self, newest: str) -> CheckpointState:
        listed = self._entries or [(newest, self._clock())]
        return CheckpointState(
            model_checkpoint_path=newest,
            all_model_checkpoint_paths=tuple(path for path, _ in listed),
            all_model_checkpoint_timestamps=tuple(saved for _, saved in listed),
            last_preserved_timestamp=self._last_preserved,
        )


def drop_checkpoint(path: str, folder: StrPath) -> None:
    """Take one checkpoint out of the index of `folder` and remove it; the newest, or one in use, is refused."""
    state = read_checkpoint_state(folder)
    if state is not None and base_name(path) == base_name(state.model_checkpoint_path):
        raise InvalidArgumentError(f"{path}: is what the next run starts from; it cannot be removed")
    with claimed(path) as free:
        if not free:
            raise InvalidArgumentError(f"{path}: is in use; try again later")
        if state is not None:
            write_checkpoint_state(folder, _without(state, path))
        remove_checkpoint(path)
        remove_assets(path)


def _without(state: CheckpointState, path: str) -> CheckpointState:
    paths, times = state.all_model_checkpoint_paths, state.all_model_checkpoint_timestamps
    stays = [base_name(name) != base_name(path) for name in paths]
    return replace(
        state,
        all_model_checkpoint_paths=tuple(itertools.compress(paths, stays)),
        all_model_checkpoint_timestamps=tuple(itertools.compress(times, stays)),
    )


def _removed(path: str) -> bool:
    try:
        remove_checkpoint(path)
        remove_assets(path)
    except (StorageError, CorruptFileError) as error:
        # The new checkpoint is safe; what is left of an old one only takes room.
        _log.warning("%s cannot be removed: %s", path, error)
        return False
    return True
