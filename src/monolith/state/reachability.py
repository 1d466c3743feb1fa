"""Removing snapshots and segments that no checkpoint needs any more."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from monolith.errors import CorruptFileError, LogGapError, StorageError
from monolith.log import LogReader, prune
from monolith.log.segment_format import sequence_of
from monolith.state.lineage import LOG, find_lineage
from monolith.state.manifest import MANIFEST, Manifest, read_manifest
from monolith.state.paths import base_name
from monolith.state.snapshot import SNAPSHOTS, SnapshotManifest, read_snapshot
from monolith.state.storage import LocalFolder, StrPath, open_folder

__all__ = ["Removed", "remove_unreachable"]

_log = logging.getLogger(__name__)


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
    """Those of chains with a gap."""


def remove_unreachable(
    model_dir: StrPath, keep: Iterable[StrPath] = (), *, sequence: int | None = None, min_age: float = 0.0
) -> Removed:
    """Remove what neither a checkpoint of `model_dir`, nor one of `keep`, nor the line that the log is on needs.

    A checkpoint counts as soon as it has a manifest. If one of them cannot be read, nothing is removed: who knows what it needs.
    If segments that one of them lists are missing, the others stay, so that it is whole again when they are put back.
    If a segment of the running line is missing it is a `LogGapError`, and nothing is removed.

    Args:
        model_dir: on a local disk; elsewhere a checkpoint has all of its rows in its own folder.
        keep: further checkpoints that use its snapshots and segments.
        sequence: what the running log continues; None: the newest segment there is.
        min_age: seconds for which segments stay in any case, for those who follow the log.
    """
    top = open_folder(model_dir)
    if not isinstance(top, LocalFolder):
        return Removed()
    snapshots = _snapshots(top)
    try:
        manifests = [read_manifest(path) for path in {*_checkpoints(top), *map(str, keep)}]
    except CorruptFileError:
        return Removed()
    needs = _needs(manifests, snapshots, LogReader(top.path / LOG))
    _add_running_line(needs, top, sequence)
    removed = []
    newest = max((manifest.sequence for manifest in manifests), default=0)
    for name, snapshot in snapshots.items():
        # One that is newer than all checkpoints was completed for a checkpoint that is being written.
        if name not in needs.snapshots and snapshot.closed_by <= newest:
            folder = top.inside(SNAPSHOTS)
            folder.inside(name).remove(MANIFEST)
            folder.remove(name)
            removed.append(name)
    segments = prune(top.path / LOG, needs.chains, keep=needs.segments, min_age=min_age)
    return Removed(snapshots=tuple(removed), segments=tuple(segments))


def _checkpoints(top: LocalFolder) -> list[str]:
    names = [name for name in top.names() if name != SNAPSHOTS and not name.startswith(".")]
    return [f"{top}/{name}" for name in names if top.inside(name).size(MANIFEST) is not None]


def _snapshots(top: LocalFolder) -> dict[str, SnapshotManifest]:
    """Those that are complete; the others are being written, or will be removed as unfinished."""
    found = {}
    for name in top.inside(SNAPSHOTS).names():
        try:
            found[name] = read_snapshot(str(top), name)
        except (CorruptFileError, StorageError):
            continue
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


def _add_running_line(needs: _Needs, top: LocalFolder, sequence: int | None) -> None:
    newest = LogReader(top.path / LOG).newest if sequence is None else sequence
    lineage = find_lineage(str(top), newest) if newest else None
    if lineage is not None:
        if lineage.name is not None:
            needs.snapshots.add(lineage.name)
        needs.chains.append((0 if lineage.snapshot is None else lineage.snapshot.sequence, newest))
