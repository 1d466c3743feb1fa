"""Retention: which checkpoints, snapshots and segments stay, and the removal of the others."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, StorageError
from monolith.log import LogReader
from monolith.log.reader import prune
from monolith.log.segment_format import sequence_of
from monolith.state.index import CHECKPOINT_INDEX, CheckpointState, read_checkpoint_state, write_checkpoint_state
from monolith.state.locks import claimed
from monolith.state.manifest import MANIFEST, Manifest, SnapshotManifest
from monolith.state.model_dir import SERVERS, SNAPSHOTS, ModelDir, remove_assets, remove_checkpoint
from monolith.state.paths import base_name, is_absolute, parent_folder
from monolith.state.restore_points import BASENAME
from monolith.state.storage import StrPath

__all__ = ["CheckpointHistory", "Removed", "drop_checkpoint", "remove_orphans", "remove_unreachable"]

_log = logging.getLogger(__name__)


class CheckpointHistory:
    """The checkpoints a saver has written and not removed, oldest first, and the index file that lists them.

    The newest few stay, one every so many hours, those that are exempt, and those that are being read.

    Args:
        max_to_keep: How many stay. Exempt ones do not count. None or 0 keeps all on disk and lists only the newest.
        keep_checkpoint_every_n_hours: Of those that would be removed, one in so many hours stays for good and leaves the list.
        clock: Returns seconds since 1970.
        model_dir: The one with the checkpoints, if the caller holds it.

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
        model_dir: ModelDir | None = None,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 0:
            raise InvalidArgumentError(f"max_to_keep: expected at least 0, or None, got {max_to_keep}")
        if keep_checkpoint_every_n_hours <= 0:
            raise InvalidArgumentError(
                f"keep_checkpoint_every_n_hours: expected more than 0, got {keep_checkpoint_every_n_hours}"
            )
        self.max_to_keep = max_to_keep or 0
        self._period = keep_checkpoint_every_n_hours * 3600
        self._clock, self._model_dir = clock, model_dir
        self._next_preserved = clock() + self._period
        self._last_preserved = 0.0
        self._entries: list[tuple[str, float]] = []

    @property
    def last_checkpoints(self) -> list[str]:
        """Paths, oldest first."""
        return [path for path, _ in self._entries]

    def set_last_checkpoints_with_time(self, entries: Iterable[tuple[str, float]]) -> None:
        """Take over the history of another saver, as paths and times of their saves, oldest first."""
        self._entries = [(str(path), float(saved)) for path, saved in entries]

    def recover(self, paths: Iterable[StrPath]) -> None:
        """Take over those of `paths`, oldest first, that exist and are complete, with the times of their saves."""
        self._entries = []
        for path in map(str, paths):
            with contextlib.suppress(CorruptFileError, StorageError):
                self._entries.append((path, self._home_of(path).check(base_name(path)).time))

    def recover_from_index(self, folder: StrPath | ModelDir, filename: str = CHECKPOINT_INDEX) -> None:
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
        folder: StrPath | ModelDir,
        *,
        exempt: Collection[str] = (),
        filename: str = CHECKPOINT_INDEX,
        relative: bool = True,
    ) -> list[str]:
        """Add a complete checkpoint, write the index of `folder`, and remove expired checkpoints. Returns their paths.

        A path that is listed already becomes the newest. An expired one that is being read stays listed until a later call.
        """
        if self.max_to_keep:
            self._entries = [entry for entry in self._entries if entry[0] != path]
            self._entries.append((path, self._clock()))
        with ExitStack() as claims:
            doomed = self._expired({base_name(name) for name in exempt}, claims)
            # The index first: it must not send readers to a checkpoint that is being removed.
            write_checkpoint_state(folder, self._state(path), filename, relative=relative)
            return [name for name in doomed if self._removed(name)]

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
                _log.info("%s is being read and stays for now", path)
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

    def _removed(self, path: str) -> bool:
        try:
            self._home_of(path).remove(base_name(path))
            remove_assets(path)
        except (StorageError, CorruptFileError) as error:
            # The new checkpoint is safe, and what is left of an old one only takes space.
            _log.warning("%s cannot be removed: %s", path, error)
            return False
        return True

    def _home_of(self, path: str) -> ModelDir:
        return ModelDir.around(path) if self._model_dir is None else self._model_dir.home_of(path)


def drop_checkpoint(path: str, folder: StrPath | ModelDir) -> None:
    """Take one checkpoint out of the index of `folder` and remove it. The newest, or one that is being read, is refused."""
    state = read_checkpoint_state(folder)
    if state is not None and base_name(path) == base_name(state.model_checkpoint_path):
        raise InvalidArgumentError(f"{path}: is what the next run starts from; it cannot be removed")
    with claimed(path) as free:
        if not free:
            raise InvalidArgumentError(f"{path}: is in use; try again later")
        if state is not None:
            write_checkpoint_state(folder, _without(state, path))
        ModelDir.of(folder).home_of(path).remove(base_name(path))
        remove_assets(path)


def _without(state: CheckpointState, path: str) -> CheckpointState:
    paths, times = state.all_model_checkpoint_paths, state.all_model_checkpoint_timestamps
    stays = [base_name(name) != base_name(path) for name in paths]
    return replace(
        state,
        all_model_checkpoint_paths=tuple(itertools.compress(paths, stays)),
        all_model_checkpoint_timestamps=tuple(itertools.compress(times, stays)),
    )


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What `remove_unreachable` removed."""

    snapshots: tuple[str, ...] = ()
    """Names."""
    segments: tuple[int, ...] = ()
    """Sequence numbers."""


@dataclass
class _Needs:
    snapshots: set[str] = field(default_factory=set)
    chains: list[tuple[int, int]] = field(default_factory=list)
    segments: set[int] = field(default_factory=set)
    """The segments of chains with a gap."""


def remove_unreachable(
    model_dir: StrPath | ModelDir, keep: Iterable[StrPath] = (), *, sequence: int | None = None, min_age: float = 0.0
) -> Removed:
    """Remove the snapshots and segments that no checkpoint of `model_dir` or `keep` needs, nor the current line of the log.

    A checkpoint counts as soon as it has a manifest. If one cannot be read, nothing is removed, because its needs are unknown. If
    segments that one lists are missing, its other segments stay, so it is whole again when they are put back. In the folder of a
    rank or server, everything that leads to the last cut of its run stays too, and everything after that.

    Args:
        model_dir: On a local disk. Elsewhere a checkpoint has all of its rows in its own folder.
        keep: Further checkpoints that use its snapshots and segments.
        sequence: What the running log continues. None is the newest segment.
        min_age: Seconds for which every segment stays, for processes that follow the log.

    Raises:
        LogGapError: A segment of the current line is missing. Nothing is removed.
    """
    home = ModelDir.of(model_dir)
    if not home.keeps_log:
        return Removed()
    snapshots = _complete_snapshots(home)
    try:
        manifests = [home.manifest(name) for name in home.checkpoints()]
        manifests += [home.home_of(path).manifest(base_name(path)) for path in map(str, keep)]
        cut = _last_cut(home)
    except CorruptFileError:
        return Removed()
    needs = _needs(manifests, snapshots, home.log)
    current = home.log.newest if sequence is None else sequence
    for wanted in {current, cut} - {0}:
        lineage = home.lineage(wanted)
        if lineage is not None:
            needs.snapshots |= set() if lineage.name is None else {lineage.name}
            needs.chains.append((lineage.since, wanted))
    removed = []
    newest = max((manifest.sequence for manifest in manifests), default=0)
    for name, snapshot in snapshots.items():
        # One that is newer than all checkpoints was completed for a checkpoint that is being written.
        if name not in needs.snapshots and snapshot.closed_by <= newest:
            folder = home.inside(SNAPSHOTS)
            folder.inside(name).remove(MANIFEST)
            folder.remove(name)
            removed.append(name)
    # A cut that other ranks have not written yet will name a segment after that of the last one.
    segments = prune(home.log, needs.chains, keep=needs.segments, below=cut or None, min_age=min_age)
    return Removed(snapshots=tuple(removed), segments=tuple(segments))


def _last_cut(home: ModelDir) -> int:
    """Return the number in the log of `home` that a run of ranks would continue from, because its newest state is a cut.

    0 if `home` is not <model_dir>/ps/<number>, or if the run has nothing newer than a checkpoint there.
    """
    if base_name(parent_folder(home.path)) != SERVERS:
        return 0
    run = ModelDir(parent_folder(parent_folder(home.path)))
    saved = {run.manifest(name).sequence for name in run.checkpoints()}
    for sequence in reversed(run.log.sequences()):
        if sequence in saved:
            return 0
        with contextlib.suppress(LogGapError):  # removed since the folder was listed
            if parts := run.log.info(sequence).parts:
                own = {parent_folder(parent_folder(entry.name)): base_name(entry.name) for entry in parts}
                return sequence_of(own.get(f"{SERVERS}/{base_name(home.path)}", "")) or 0
    return 0


def _complete_snapshots(home: ModelDir) -> dict[str, SnapshotManifest]:
    """Return the complete snapshots. The others are being written, or will be removed as unfinished."""
    found = {}
    for name in home.snapshots():
        with contextlib.suppress(CorruptFileError, StorageError):
            found[name] = home.snapshot(name)
    return found


def _needs(manifests: Iterable[Manifest], snapshots: Mapping[str, SnapshotManifest], reader: LogReader) -> _Needs:
    needs = _Needs()
    for manifest in manifests:
        since = 0
        if manifest.snapshot is not None:
            name = manifest.snapshot.name.split("/")[1]
            needs.snapshots.add(name)
            since = snapshots[name].sequence if name in snapshots else manifest.sequence
        if not manifest.sequence:
            continue
        try:
            reader.chain(manifest.sequence, since)
            needs.chains.append((since, manifest.sequence))
        except LogGapError as error:
            _log.warning("the checkpoint of step %d cannot be restored: %s", manifest.step, error)
            listed = (sequence_of(base_name(entry.name)) for entry in manifest.segments)
            needs.segments.update(sequence for sequence in listed if sequence is not None)
    return needs


def remove_orphans(model_dir: ModelDir, manifest: Manifest) -> None:
    """Remove checkpoints of servers and ranks whose run's checkpoint does not exist, because its writer or remover died.

    `manifest` is that of the newest checkpoint, whose parts tell the folders, besides those below `ps/`. Call it only while no
    other checkpoint is being written. What is outside of the model_dir is left alone.
    """
    top = model_dir.folder
    folders = {parent_folder(parent_folder(entry.name)) for entry in manifest.parts if not is_absolute(entry.name)}
    if folders:
        # Those of ranks that are no longer there as well.
        folders |= {f"{SERVERS}/{name}" for name in top.inside(SERVERS).names()}
    for folder in folders:
        for name in top.inside(folder).names():
            if name.startswith(f"{BASENAME}-") and top.inside(name).size(MANIFEST) is None:
                # Left behind it only takes space.
                with contextlib.suppress(StorageError, CorruptFileError):
                    remove_checkpoint(f"{top}/{folder}/{name}")
