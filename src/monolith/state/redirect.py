"""Which checkpoint a run starts from. Everyone who wants to know asks `get_checkpoint_state`.

Normally it is the newest of the model_dir. Two wishes change that: `restore_dir`, start from another run's checkpoint, and
`restore_ckpt`, start from an older one. A training run follows them once, at its first start; the file `restore_ckpt` in the
model_dir says that it has, so that a restart continues with what was trained since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.state.checkpoint_state import (
    INDEX,
    MONOLITH_INDEX,
    CheckpointState,
    MonolithCheckpointState,
    checkpoint_exists,
    get_monolith_checkpoint_state,
    read_checkpoint_state,
    with_exempt,
    write_checkpoint_state,
    write_monolith_checkpoint_state,
)
from monolith.state.paths import base_name, parent_folder
from monolith.state.storage import StrPath, open_folder

__all__ = [
    "RESTORE_MARKER",
    "adopt_restore_dir",
    "get_checkpoint_state",
    "restore_marker",
    "warn_if_ignored",
]

RESTORE_MARKER = "restore_ckpt"
"""File that says that `restore_ckpt` or `restore_dir` has been followed."""

Sleep = Callable[[float], None]
_log = logging.getLogger(__name__)


def get_checkpoint_state(
    folder: StrPath,
    *,
    restore_ckpt: str | None = None,
    training: bool = False,
    filename: str = INDEX,
    attempts: int = 5,
    sleep: Sleep = time.sleep,
) -> CheckpointState | None:
    """The index of `folder`, None if there is none, with the checkpoint to start from as its `model_checkpoint_path`.

    An index that cannot be read is read again, up to `attempts` times: it may be just being replaced.

    `restore_ckpt` is the name of a checkpoint in `folder`; its folder, if it has one, does not count. When not `training` it
    becomes the one to start from. When `training`, it does so the first time only: the index is rewritten and the marker file
    left, and with the marker there, the index is taken as it is. A name that the index does not list changes nothing and is
    logged. Other indexes than "checkpoint" are never redirected.

    Example:
        >>> write_checkpoint_state("memory://redirect", CheckpointState(
        ...     model_checkpoint_path="memory://redirect/model.ckpt-60",
        ...     all_model_checkpoint_paths=("memory://redirect/model.ckpt-30", "memory://redirect/model.ckpt-60")))
        >>> get_checkpoint_state("memory://redirect", restore_ckpt="model.ckpt-30").model_checkpoint_path
        'memory://redirect/model.ckpt-30'
    """
    state = _read_patiently(folder, filename, attempts, sleep)
    if state is None or restore_ckpt is None or filename != INDEX:
        return state
    if training and (followed := restore_marker(folder)) is not None:
        warn_if_ignored(restore_ckpt, followed, folder)
        return state
    chosen = _listed(state, restore_ckpt)
    if chosen is None:
        _log.warning("restore_ckpt %r is not listed in %s/%s; the newest is used", restore_ckpt, folder, filename)
        return state
    if chosen == state.model_checkpoint_path:
        _log.info("restore_ckpt %r is the newest checkpoint of %s anyway", restore_ckpt, folder)
    redirected = replace(state, model_checkpoint_path=chosen)
    if training:
        # The marker last: killed in between, the same is done again.
        write_checkpoint_state(folder, redirected)
        _mark(folder, restore_ckpt)
    return redirected


def restore_marker(model_dir: StrPath) -> str | None:
    """Return the checkpoint that a training run of `model_dir` went back to or adopted, by the name it was given. None if none.

    Example:
        >>> restore_marker("memory://no-run")
    """
    place = open_folder(model_dir)
    return None if place.size(RESTORE_MARKER) is None else place.read(RESTORE_MARKER).decode(errors="replace")


def warn_if_ignored(restore_ckpt: str, followed: str, model_dir: StrPath) -> None:
    """Log that `restore_ckpt` has no effect if the run has already gone back to another one.

    Example:
        >>> warn_if_ignored("model.ckpt-30", "model.ckpt-30", "runs/ctr")
    """
    if base_name(restore_ckpt) != base_name(followed):
        _log.warning(
            "restore_ckpt %r is ignored: %s has already gone back to %r, which it does only once; remove the file %s/%s to go "
            "back again",
            restore_ckpt,
            model_dir,
            followed,
            str(model_dir).rstrip("/"),
            RESTORE_MARKER,
        )


def adopt_restore_dir(restore_dir: StrPath, model_dir: StrPath, *, restore_ckpt: str | None = None) -> str | None:
    """Let `model_dir` start from a checkpoint of `restore_dir`. Returns its path, or None if nothing was adopted.

    A `model_dir` that has an index keeps it, and `restore_dir` is then not read: it may have been removed. The exception is an
    index whose checkpoint was adopted from elsewhere and no longer exists. A `restore_dir` without a checkpoint is logged.

    The checkpoint is the one named `restore_ckpt`, if it is listed there, else the newest. It stays where it is: the new index
    names it by its full path, and it becomes exempt from removal. Only one process, the chief, may call this. The others wait
    until it has restored (`WorkerSyncHook`).
    """
    own = _own_index(model_dir)
    known = get_monolith_checkpoint_state(model_dir) or MonolithCheckpointState()
    if own is not None:
        if not _has(model_dir, MONOLITH_INDEX):
            # A chief was killed before it wrote the last file.
            write_monolith_checkpoint_state(model_dir, with_exempt(known, *_outside(own, model_dir)))
        return None
    state = _read_patiently(restore_dir, INDEX, 5, time.sleep)
    if state is None:
        _log.warning("restore_dir %s has no checkpoint; %s starts without one", restore_dir, model_dir)
        write_monolith_checkpoint_state(model_dir, known)
        return None
    chosen = state.model_checkpoint_path if restore_ckpt is None else _listed(state, restore_ckpt)
    if chosen is None:
        _log.warning("restore_ckpt %r is not listed in %s; its newest is used", restore_ckpt, restore_dir)
        chosen = state.model_checkpoint_path
    write_checkpoint_state(
        model_dir, CheckpointState(model_checkpoint_path=chosen, all_model_checkpoint_paths=(chosen,))
    )
    _mark(model_dir, restore_ckpt or base_name(chosen))
    write_monolith_checkpoint_state(model_dir, with_exempt(known, chosen))
    return chosen


def _read_patiently(folder: StrPath, filename: str, attempts: int, sleep: Sleep) -> CheckpointState | None:
    for attempt in range(attempts):
        try:
            return read_checkpoint_state(folder, filename)
        except (CorruptFileError, StorageError) as error:
            if attempt + 1 == attempts:
                raise
            _log.warning("%s/%s cannot be read, trying again: %s", folder, filename, error)
            sleep(1.0)
    raise InvalidArgumentError(f"attempts: expected at least 1, got {attempts}")


def _own_index(model_dir: StrPath) -> CheckpointState | None:
    """The index of `model_dir`, unless the checkpoint it starts from was adopted and has been removed since."""
    state = read_checkpoint_state(model_dir)
    if state is None or checkpoint_exists(state.model_checkpoint_path):
        return state
    return None if _outside(state, model_dir) else state


def _outside(state: CheckpointState, model_dir: StrPath) -> tuple[str, ...]:
    """The checkpoint that `state` starts from, if it is another run's."""
    path = state.model_checkpoint_path
    return () if parent_folder(path) == str(model_dir).rstrip("/") else (path,)


def _listed(state: CheckpointState, name: str) -> str | None:
    wanted = base_name(name)
    return next((path for path in state.all_model_checkpoint_paths if base_name(path) == wanted), None)


def _mark(folder: StrPath, text: str) -> None:
    open_folder(folder).write(RESTORE_MARKER, text.encode())


def _has(folder: StrPath, name: str) -> bool:
    return open_folder(folder).size(name) is not None
