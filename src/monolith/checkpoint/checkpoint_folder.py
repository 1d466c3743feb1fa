"""One checkpoint: a folder that is complete and durable once its manifest is there, and nothing before."""

from __future__ import annotations

import contextlib
import secrets
import time as clock
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from monolith.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    check_sizes,
    crc32c,
    read_manifest,
    write_sealed,
)
from monolith.checkpoint.paths import base_name, parent_folder
from monolith.checkpoint.storage import Folder, StrPath, open_folder
from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.state_bytes import PackedState, State, pack_state, unpack_state

__all__ = [
    "PendingCheckpoint",
    "begin_checkpoint",
    "is_complete",
    "read_state",
    "remove_checkpoint",
    "write_checkpoint",
]


@dataclass(frozen=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint whose content is decided but not written yet. `finish` may run on any thread while training goes on."""

    path: str
    step: int
    time: float
    event_time: int
    states: Mapping[str, PackedState]
    config: Mapping[str, JsonValue]

    def finish(self) -> Manifest:
        """Write everything; when this returns the checkpoint is complete and durable."""
        folder = open_folder(self.path)
        generation = _generation(folder)
        stems = {name: f"{name}{generation}" for name in self.states}
        files = [entry for name in self.states for entry in _write_state(folder, stems[name], self.states[name])]
        manifest = Manifest(
            step=self.step,
            time=self.time,
            event_time=self.event_time,
            states=stems,
            files=tuple(files),
            config=dict(self.config),
        )
        write_sealed(folder, manifest)
        _remove_unlisted(folder, manifest)
        return manifest


def begin_checkpoint(
    path: StrPath,
    *,
    state: Mapping[str, State],
    step: int,
    event_time: int = 0,
    config: Mapping[str, JsonValue] | None = None,
    parts: Mapping[str, State] | None = None,
    time: float | None = None,
) -> PendingCheckpoint:
    """Copy what is to be saved, quickly and between two steps; `finish()` of the answer writes it.

    Args:
        path: the checkpoint's folder, local or a URL. A complete checkpoint that is there already is replaced: until the new
            one is complete, readers find the old one.
        state: nested tensors, numbers and strings: dense parameters, optimizer, random states, position in the data.
        step: steps made so far.
        event_time: newest event time trained, seconds since 1970.
        config: the resolved configuration of the run, for people and for `inspect`.
        parts: further states by name, read again by `read_state(path, name)`.
        time: now, seconds since 1970; None asks the clock.
    """
    states = {"state": state, **(parts or {})}
    for name in states:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise InvalidArgumentError(f"parts: expected names of letters, digits, '-' and '_', got {name!r}")
    return PendingCheckpoint(
        path=str(path),
        step=step,
        time=clock.time() if time is None else time,
        event_time=event_time,
        states={name: pack_state(value, name) for name, value in states.items()},
        config=config or {},
    )


def write_checkpoint(
    path: StrPath,
    *,
    state: Mapping[str, State],
    step: int,
    event_time: int = 0,
    config: Mapping[str, JsonValue] | None = None,
    parts: Mapping[str, State] | None = None,
    time: float | None = None,
) -> Manifest:
    """Write a checkpoint; when this returns it is complete and survives a power cut. Arguments as in `begin_checkpoint`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     _ = write_checkpoint(f"{model_dir}/model.ckpt-3", state={"weights": torch.ones(2)}, step=3)
        ...     is_complete(f"{model_dir}/model.ckpt-3"), read_state(f"{model_dir}/model.ckpt-3")
        (True, {'weights': tensor([1., 1.])})
    """
    pending = begin_checkpoint(
        path, state=state, step=step, event_time=event_time, config=config, parts=parts, time=time
    )
    return pending.finish()


def is_complete(path: StrPath) -> bool:
    """Whether there is a checkpoint at `path` with everything its manifest lists; contents are checked when they are read."""
    try:
        check_sizes(open_folder(path), read_manifest(path).files)
    except (CorruptFileError, StorageError):
        return False
    return True


def read_state(path: StrPath, name: str = "state") -> dict[str, State]:
    """The state that was saved under `name`; `CorruptFileError` if a byte of it is not as it was written."""
    manifest, folder = read_manifest(path), open_folder(path)
    if name not in manifest.states:
        known = ", ".join(map(repr, manifest.states))
        raise CorruptFileError(f"{folder}: has no state {name!r}; it has {known}")
    stem = manifest.states[name]
    entries = {entry.name: entry for entry in manifest.files}
    structure, tensors = (_read_file(folder, entries, f"{stem}.{ending}") for ending in ("json", "safetensors"))
    state = unpack_state(structure, tensors, f"{folder}/{stem}")
    if not isinstance(state, dict):
        raise CorruptFileError(f"{folder}/{stem}.json: expected a state with names, got {type(state).__name__}")
    return state


def remove_checkpoint(path: StrPath) -> None:
    """Remove a checkpoint: its manifest first, so that a half-removed one is never taken for a whole one."""
    open_folder(path).remove(MANIFEST)
    open_folder(parent_folder(path)).remove(base_name(path))


def _generation(folder: Folder) -> str:
    """Ends the names of files, so that none of them is a file of a checkpoint that is in the folder already."""
    return f".{secrets.token_hex(4)}" if folder.names() else ""


def _write_state(folder: Folder, stem: str, packed: PackedState) -> list[FileEntry]:
    contents = {f"{stem}.json": packed.structure, f"{stem}.safetensors": packed.tensor_bytes()}
    for name, data in contents.items():
        folder.write(name, data)
    return [FileEntry(name=name, size=len(data), crc32c=crc32c(data)) for name, data in contents.items()]


def _read_file(folder: Folder, entries: Mapping[str, FileEntry], name: str) -> bytes:
    if name not in entries:
        raise CorruptFileError(f"{folder}/{MANIFEST}: does not list {name!r}")
    check_sizes(folder, (entries[name],))
    data = folder.read(name)
    if crc32c(data) != entries[name].crc32c:
        raise CorruptFileError(f"{folder}/{name}: its checksum is wrong; the file was altered")
    return data


def _remove_unlisted(folder: Folder, manifest: Manifest) -> None:
    """What an earlier checkpoint, or an attempt that did not finish, left behind."""
    listed = {MANIFEST, *(entry.name.partition("/")[0] for entry in manifest.files)}
    for name in folder.names():
        if name not in listed:
            # The checkpoint is complete with or without them.
            with contextlib.suppress(StorageError):
                folder.remove(name)
