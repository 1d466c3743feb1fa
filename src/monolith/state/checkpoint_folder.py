"""One checkpoint: a folder that is complete and durable once its manifest is there, and nothing before."""

from __future__ import annotations

import logging
import time as clock
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic import JsonValue

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.log import ChangeLog
from monolith.log.commit import Tables
from monolith.state.lineage import LOG
from monolith.state.manifest import (
    MANIFEST,
    Manifest,
    check_sizes,
    read_manifest,
    read_sealed,
)
from monolith.state.paths import absolute_path, base_name, is_absolute, parent_folder
from monolith.state.pending import PendingCheckpoint
from monolith.state.roots import RESTORE_ROOTS, is_allowed
from monolith.state.snapshot import OpenSnapshot, SnapshotManifest, group_tables, write_snapshot
from monolith.state.storage import Folder, StrPath, is_remote, open_folder, safe_name
from monolith.state_bytes import State, pack_state, unpack_state
from monolith.table.table_file import FileEntry
from monolith.urls import checked_location

__all__ = [
    "begin_checkpoint",
    "check_complete",
    "is_complete",
    "part_paths",
    "read_listed",
    "read_state",
    "remove_checkpoint",
    "snapshot_of",
    "write_checkpoint",
]

_log = logging.getLogger(__name__)


def begin_checkpoint(
    path: StrPath,
    *,
    state: Mapping[str, State],
    step: int,
    tables: Tables = (),
    log: ChangeLog | None = None,
    snapshot: OpenSnapshot | None = None,
    event_time: int = 0,
    config: Mapping[str, JsonValue] | None = None,
    parts: Mapping[str, State] | None = None,
    time: float | None = None,
    share: float = 1.0,
    state_in_log: bool = False,
    servers: Callable[[], tuple[FileEntry, ...]] | None = None,
    buckets: Iterable[tuple[int, int]] | None = None,
) -> PendingCheckpoint:
    """Decide what is to be saved, quickly and between two steps; `finish()` of the answer writes it, on any thread.

    Args:
        path: the checkpoint's folder, local or a URL. A complete checkpoint that is there already is replaced: until the new
            one is complete, readers find the old one.
        state: nested tensors, numbers and strings: dense parameters, optimizer, random states, position in the data.
        step: steps made so far.
        tables: in this process; equal names are shards of one table, a mapping gives names that differ from the tables' own.
        log: the log of `tables`, in `log/` beside the checkpoint, which then costs what changed since the last commit.
            Without a log all rows are written, now, while the caller waits.
        snapshot: one that `write_snapshot` has finished; this checkpoint completes it. None uses the newest there is, and writes
            one now if there are rows that neither a snapshot nor the log has.
        event_time: newest event time trained, seconds since 1970; 0 takes the tables' own.
        config: the resolved configuration of the run, for people and for `inspect`.
        parts: further states by name, read again by `read_state(path, name)`.
        time: now, seconds since 1970; None asks the clock.
        share: of a processor's time, for the thread that writes the changed rows; `hurry()` of the answer ends its rests.
        state_in_log: put `state` into the log as well, its `source` as the place in the data: what was committed is then a
            restore point even if the checkpoint is never completed.
        servers: waits for the checkpoints that parameter servers are writing, and answers their manifests.
        buckets: what the tables own, if they are a part of a larger whole.
    """
    states = {"state": state, **(parts or {})}
    _require_names(states)
    _require_beside(path, log)
    groups = group_tables(tables)
    now = clock.time() if time is None else time
    pending = PendingCheckpoint(
        path=str(path),
        manifest=Manifest(
            step=step,
            time=now,
            event_time=event_time,
            config=dict(config or {}),
            files=(),
            buckets=None if buckets is None else tuple(buckets),
        ),
        states={name: pack_state(value, name) for name, value in states.items()},
        snapshot=snapshot,
        servers=servers,
    )
    try:
        pending.take_tables(groups, log, share, dict(state) if state_in_log else None)
    except BaseException:
        pending.abandon()
        raise
    return pending


def write_checkpoint(
    path: StrPath,
    *,
    state: Mapping[str, State],
    step: int,
    tables: Tables = (),
    log: ChangeLog | None = None,
    full: bool = False,
    event_time: int = 0,
    config: Mapping[str, JsonValue] | None = None,
    parts: Mapping[str, State] | None = None,
    time: float | None = None,
) -> Manifest:
    """Write a checkpoint; when this returns it is complete and survives a power cut.

    Other threads may train meanwhile: the rows are those of the moment the log is cut, at the end. `full` writes a new snapshot
    first. The other arguments are those of `begin_checkpoint`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     _ = write_checkpoint(f"{model_dir}/model.ckpt-3", state={"weights": torch.ones(2)}, step=3)
        ...     is_complete(f"{model_dir}/model.ckpt-3"), read_state(f"{model_dir}/model.ckpt-3")
        (True, {'weights': tensor([1., 1.])})
    """
    snapshot = write_snapshot(parent_folder(path), tables, log, time=time) if full and log is not None else None
    pending = begin_checkpoint(
        path,
        state=state,
        step=step,
        tables=tables,
        log=log,
        snapshot=snapshot,
        event_time=event_time,
        config=config,
        parts=parts,
        time=time,
    )
    return pending.finish()


def check_complete(path: StrPath) -> Manifest:
    """The manifest of a checkpoint of which everything is there, by name and size; contents are checked when they are read."""
    manifest, model_dir = read_manifest(path), open_folder(parent_folder(path))
    check_sizes(open_folder(path), manifest.files)
    check_sizes(model_dir, manifest.segments)
    if manifest.snapshot is not None:
        folder, snapshot = snapshot_of(manifest.snapshot, model_dir)
        check_sizes(folder, snapshot.files)
    for part in part_paths(manifest, path):
        check_complete(part)
    return manifest


def is_complete(path: StrPath) -> bool:
    """Whether there is a checkpoint at `path` with everything its manifest lists."""
    try:
        check_complete(path)
    except (CorruptFileError, StorageError):
        return False
    return True


def snapshot_of(entry: FileEntry, model_dir: Folder) -> tuple[Folder, SnapshotManifest]:
    """The snapshot whose manifest a checkpoint names, and its folder; it must be that one and no other."""
    read_listed(model_dir, (entry,), entry.name)
    folder = model_dir.inside(parent_folder(entry.name))
    return folder, read_sealed(folder, SnapshotManifest)


def read_state(path: StrPath, name: str = "state") -> dict[str, State]:
    """The state that was saved under `name`; `CorruptFileError` if a byte of it is not as it was written."""
    manifest, folder = read_manifest(path), open_folder(path)
    if name not in manifest.states:
        known = ", ".join(map(repr, manifest.states))
        raise CorruptFileError(f"{folder}: has no state {name!r}; it has {known}")
    stem = manifest.states[name]
    structure, tensors = (read_listed(folder, manifest.files, f"{stem}.{end}") for end in ("json", "safetensors"))
    state = unpack_state(structure, tensors, f"{folder}/{stem}")
    if not isinstance(state, dict):
        raise CorruptFileError(f"{folder}/{stem}.json: expected a state with names, got {type(state).__name__}")
    return state


def read_listed(folder: Folder, files: Iterable[FileEntry], name: str) -> bytes:
    """The bytes of file `name`, which must be one of `files` and as it was written."""
    entry = next((entry for entry in files if entry.name == name), None)
    if entry is None:
        raise CorruptFileError(f"{folder}/{MANIFEST}: does not list {name!r}")
    check_sizes(folder, (entry,))
    data = folder.read(safe_name(name, folder))
    if FileEntry.of(name, data) != entry:
        raise CorruptFileError(f"{folder}/{name}: its checksum is wrong; the file was altered")
    return data


def part_paths(manifest: Manifest, path: StrPath) -> list[str]:
    """Return the paths of the checkpoints that servers have written for the one at `path`, after checking each against its entry.

    `CorruptFileError` if one is missing, is not the one listed, or lies neither below the model_dir nor below `restore_roots`.
    """
    paths = []
    for part, entry in zip(_named_parts(manifest, path), manifest.parts, strict=True):
        read_listed(open_folder(part), (entry.model_copy(update={"name": MANIFEST}),), MANIFEST)
        if read_manifest(part).parts:
            raise CorruptFileError(f"{part}: is a part of {path} and has parts itself")
        paths.append(part)
    return paths


def _named_parts(manifest: Manifest, path: StrPath) -> list[str]:
    """The folders that a manifest names. None of them is opened before all of them have been checked."""
    model_dir, parts = parent_folder(path), []
    for entry in manifest.parts:
        try:
            part = checked_location(parent_folder(absolute_path(entry.name, model_dir)))
        except InvalidArgumentError as error:
            raise CorruptFileError(f"{path}/{MANIFEST}: names a part {entry.name!r}: {error}") from None
        if is_absolute(entry.name) and not is_allowed(part, model_dir):
            raise CorruptFileError(
                f"{path}/{MANIFEST}: names a part outside of {model_dir}, {part!r}; if a parameter server keeps its folder "
                f"there, allow it with {RESTORE_ROOTS}={parent_folder(part)}"
            )
        parts.append(part)
    return parts


def remove_checkpoint(path: StrPath) -> None:
    """Remove a checkpoint: its manifest first, so that a half-removed one is never taken for a whole one.

    What servers have written for it goes too.
    """
    parts: list[str] = []
    if open_folder(path).size(MANIFEST) is not None:
        try:
            parts = _named_parts(read_manifest(path), path)
        except CorruptFileError as error:
            _log.warning("the parts of %s on servers are not removed: %s", path, error)
    open_folder(path).remove(MANIFEST)
    for part in parts:
        open_folder(part).remove(MANIFEST)
        open_folder(parent_folder(part)).remove(base_name(part))
    open_folder(parent_folder(path)).remove(base_name(path))


def _require_names(states: Iterable[str]) -> None:
    for name in states:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise InvalidArgumentError(f"parts: expected names of letters, digits, '-' and '_', got {name!r}")


def _require_beside(path: StrPath, log: ChangeLog | None) -> None:
    if log is None:
        return
    expected = Path(parent_folder(path)) / LOG
    if is_remote(path) or log.folder.resolve() != expected.resolve():
        raise InvalidArgumentError(
            f"log: expected the one in {expected}, beside the checkpoint, got {log.folder}; without a log all rows are saved"
        )
