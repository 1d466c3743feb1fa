"""The text files next to checkpoints: `checkpoint`, `monolith_checkpoint` and `ckpt.info-<step>`, in the original's format.

A run starts from the newest checkpoint of its model_dir. Two settings change that: `restore_dir` starts from another run's
checkpoint, and `restore_ckpt` from an older one. A training run follows them once, at its first start. The file `restore_ckpt` in
the model_dir records that, so a restart continues with what was trained since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from google.protobuf import text_format
from google.protobuf.message import Message

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.proto import checkpoint_state_pb2 as pb
from monolith.state.model_dir import ModelDir
from monolith.state.paths import absolute_path, base_name, parent_folder, relative_name
from monolith.state.storage import StrPath, open_folder

__all__ = [
    "CHECKPOINT_INDEX",
    "CheckpointState",
    "MONOLITH_INDEX",
    "MonolithCheckpointState",
    "RESTORE_MARKER",
    "adopt_restore_dir",
    "checkpoint_exists",
    "create_monolith_checkpoint_state",
    "get_monolith_checkpoint_state",
    "mark_restored",
    "read_checkpoint_info",
    "read_checkpoint_state",
    "read_patiently",
    "redirect",
    "remove_checkpoint_info",
    "restore_marker",
    "update_save_time",
    "warn_if_ignored",
    "with_exempt",
    "write_checkpoint_info",
    "write_checkpoint_state",
    "write_monolith_checkpoint_state",
]

CHECKPOINT_INDEX = "checkpoint"
"""Name of the file that lists the checkpoints of a folder."""
MONOLITH_INDEX = "monolith_checkpoint"
"""Name of the file with the checkpoints that must stay."""

_ADVICE = "put it back as it was; without this file a run starts from the newest checkpoint that is complete"

TableType = Literal["UNKNOWN", "CUCKOO_HASH_MAP", "MULTI_CUCKOO_HASH_MAP"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """The checkpoints of a folder. Paths are absolute, or relative to what the folder's own path is relative to."""

    model_checkpoint_path: str
    """The newest."""
    all_model_checkpoint_paths: tuple[str, ...] = ()
    """Oldest first."""
    all_model_checkpoint_timestamps: tuple[float, ...] = ()
    """Seconds since 1970, one per path, or none at all."""
    last_preserved_timestamp: float = 0.0
    """Time of the last checkpoint that is kept for good. 0 if there is none."""


@dataclass(frozen=True, kw_only=True)
class MonolithCheckpointState:
    """What is known of checkpoints besides their names."""

    exempt_model_checkpoint_paths: tuple[str, ...] = ()
    """Never removed, and not counted by `max_to_keep`."""
    last_checkpoint_save_timestamp: int = 0
    """Seconds since 1970."""
    builtin_hash_table_type: TableType = "UNKNOWN"
    """Which of the original's tables wrote it. New files say `MULTI_CUCKOO_HASH_MAP`, the original's default."""


def read_checkpoint_state(folder: StrPath | ModelDir, filename: str = CHECKPOINT_INDEX) -> CheckpointState | None:
    """Read the index of `folder`. Returns None if there is none, and raises `CorruptFileError` if it cannot be parsed.

    Example:
        >>> write_checkpoint_state("memory://doc", CheckpointState(model_checkpoint_path="memory://doc/model.ckpt-3"))
        >>> open_folder("memory://doc").read("checkpoint")
        b'model_checkpoint_path: "model.ckpt-3"\\nall_model_checkpoint_paths: "model.ckpt-3"\\n'
        >>> read_checkpoint_state("memory://doc").model_checkpoint_path
        'memory://doc/model.ckpt-3'
    """
    home = ModelDir.of(folder)
    text = _read(home, filename, pb.CheckpointState())
    if text is None:
        return None
    if not text.model_checkpoint_path:
        raise CorruptFileError(f"{folder}/{filename}: names no model_checkpoint_path; {_ADVICE}")
    try:
        return CheckpointState(
            model_checkpoint_path=absolute_path(text.model_checkpoint_path, home.path),
            all_model_checkpoint_paths=tuple(absolute_path(p, home.path) for p in text.all_model_checkpoint_paths),
            all_model_checkpoint_timestamps=tuple(text.all_model_checkpoint_timestamps),
            last_preserved_timestamp=text.last_preserved_timestamp,
        )
    except InvalidArgumentError as error:
        raise CorruptFileError(f"{folder}/{filename}: {error}") from None


def write_checkpoint_state(
    folder: StrPath | ModelDir, state: CheckpointState, filename: str = CHECKPOINT_INDEX, *, relative: bool = True
) -> None:
    """Replace the index of `folder`. Paths inside of it are written `relative` to it, so the folder may be moved."""

    home = ModelDir.of(folder)

    def name(path: str) -> str:
        return relative_name(path, home.path) if relative else path

    paths = state.all_model_checkpoint_paths
    if state.model_checkpoint_path not in paths:
        paths = (*paths, state.model_checkpoint_path)
    text = pb.CheckpointState(
        model_checkpoint_path=name(state.model_checkpoint_path),
        all_model_checkpoint_paths=[name(path) for path in paths],
        all_model_checkpoint_timestamps=state.all_model_checkpoint_timestamps,
        last_preserved_timestamp=state.last_preserved_timestamp,
    )
    _write(home, filename, text)


def get_monolith_checkpoint_state(
    folder: StrPath | ModelDir, filename: str = MONOLITH_INDEX, *, remove_invalid_path: bool = False
) -> MonolithCheckpointState | None:
    """Read `monolith_checkpoint`, with absolute paths. Returns None if it does not exist or cannot be parsed.

    With `remove_invalid_path`, paths that no longer exist are left out, with a warning.
    """
    try:
        home = ModelDir.of(folder)
        text = _read(home, filename, pb.MonolithCheckpointState())
        if text is None:
            return None
        exempt = tuple(absolute_path(path, home.path) for path in text.exempt_model_checkpoint_paths)
        kind: TableType = pb.MonolithCheckpointState.HashTableType.Name(text.builtin_hash_table_type)  # type: ignore[assignment]
    except (StorageError, CorruptFileError, InvalidArgumentError, ValueError) as error:
        _log.warning("%s/%s cannot be read: %s", folder, filename, error)
        return None
    if remove_invalid_path:
        gone = [path for path in exempt if not checkpoint_exists(path)]
        if gone:
            _log.warning("%s/%s: %s no longer exist", folder, filename, ", ".join(gone))
        exempt = tuple(path for path in exempt if path not in gone)
    return MonolithCheckpointState(
        exempt_model_checkpoint_paths=exempt,
        last_checkpoint_save_timestamp=text.last_checkpoint_save_timestamp,
        builtin_hash_table_type=kind,
    )


def write_monolith_checkpoint_state(
    folder: StrPath | ModelDir, state: MonolithCheckpointState, filename: str = MONOLITH_INDEX
) -> None:
    """Replace `monolith_checkpoint` of `folder`.

    Example:
        >>> exempt = MonolithCheckpointState(exempt_model_checkpoint_paths=("model.ckpt-10",))
        >>> write_monolith_checkpoint_state("memory://doc", exempt)
        >>> get_monolith_checkpoint_state("memory://doc").exempt_model_checkpoint_paths
        ('memory://doc/model.ckpt-10',)
    """
    home = ModelDir.of(folder)
    text = pb.MonolithCheckpointState(
        exempt_model_checkpoint_paths=[relative_name(path, home.path) for path in state.exempt_model_checkpoint_paths],
        last_checkpoint_save_timestamp=state.last_checkpoint_save_timestamp,
        builtin_hash_table_type=state.builtin_hash_table_type,
    )
    _write(home, filename, text)


def create_monolith_checkpoint_state(folder: StrPath | ModelDir) -> None:
    """Write `monolith_checkpoint` of `folder` with the type of the tables, before anything is saved.

    An existing file keeps its content. Only a missing type is filled in.

    Example:
        >>> create_monolith_checkpoint_state("memory://doc-start")
        >>> open_folder("memory://doc-start").read("monolith_checkpoint")
        b'builtin_hash_table_type: MULTI_CUCKOO_HASH_MAP\\n'
    """
    known = get_monolith_checkpoint_state(folder)
    if known is None and ModelDir.of(folder).folder.size(MONOLITH_INDEX) is not None:
        return  # it cannot be read, which has been logged, and a person may still repair it
    if known is None or known.builtin_hash_table_type == "UNKNOWN":
        write_monolith_checkpoint_state(folder, _with_table_type(known))


def update_save_time(folder: StrPath | ModelDir, time: int) -> MonolithCheckpointState:
    """Record in `monolith_checkpoint` of `folder`, which is created if it is missing, when a checkpoint was saved."""
    known = _with_table_type(get_monolith_checkpoint_state(folder))
    state = replace(known, last_checkpoint_save_timestamp=time)
    write_monolith_checkpoint_state(folder, state)
    return state


def _with_table_type(state: MonolithCheckpointState | None) -> MonolithCheckpointState:
    if state is not None and state.builtin_hash_table_type != "UNKNOWN":
        return state
    return replace(state or MonolithCheckpointState(), builtin_hash_table_type="MULTI_CUCKOO_HASH_MAP")


def write_checkpoint_info(
    folder: StrPath | ModelDir,
    step: int,
    *,
    feature_counts: Mapping[str, int],
    slot_counts: Mapping[int, int] | None = None,
) -> None:
    """Write to `ckpt.info-<step>` how many rows the checkpoint of `step` has, by table and, if counted, by slot.

    Example:
        >>> write_checkpoint_info("memory://doc", 3, feature_counts={"user": 7})
        >>> read_checkpoint_info("memory://doc", 3)
        ({'user': 7}, {})
    """
    _write(folder, f"ckpt.info-{step}", pb.CkptInfo(feature_counts=feature_counts, slot_counts=slot_counts or {}))


def read_checkpoint_info(folder: StrPath | ModelDir, step: int) -> tuple[dict[str, int], dict[int, int]] | None:
    """Read the rows by table and by slot that `write_checkpoint_info` wrote. Returns None if there is no such file."""
    info = _read(folder, f"ckpt.info-{step}", pb.CkptInfo())
    return None if info is None else (dict(info.feature_counts), dict(info.slot_counts))


def remove_checkpoint_info(folder: StrPath | ModelDir, step: int) -> None:
    """Remove the counts of `step`. Does nothing if there are none."""
    ModelDir.of(folder).folder.remove(f"ckpt.info-{step}")


TextMessage = TypeVar("TextMessage", bound=Message)


def _read(folder: StrPath | ModelDir, name: str, message: TextMessage) -> TextMessage | None:
    place = ModelDir.of(folder).folder
    if place.size(name) is None:
        return None
    try:
        return text_format.Parse(place.read(name).decode(), message, allow_unknown_field=True)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{place}/{name}: cannot be parsed: {error}; {_ADVICE}") from None


def _write(folder: StrPath | ModelDir, name: str, message: Message) -> None:
    ModelDir.of(folder).folder.write(name, text_format.MessageToString(message).encode())


def checkpoint_exists(path: str) -> bool:
    """Return whether there is something at the path of a checkpoint, complete or not.

    Example:
        >>> checkpoint_exists("memory://no-run/model.ckpt-3")
        False
    """
    return base_name(path) in open_folder(parent_folder(path)).names()


def with_exempt(state: MonolithCheckpointState | None, *paths: str) -> MonolithCheckpointState:
    """Return `state` with more paths that must stay."""
    state = state or MonolithCheckpointState()
    known = state.exempt_model_checkpoint_paths
    return replace(
        state, exempt_model_checkpoint_paths=(*known, *(path for path in dict.fromkeys(paths) if path not in known))
    )


RESTORE_MARKER = "restore_ckpt"
"""Name of the file that says that `restore_ckpt` or `restore_dir` has been followed."""


def redirect(state: CheckpointState, restore_ckpt: str, folder: StrPath | ModelDir) -> CheckpointState | None:
    """Let `state`, the index of `folder`, start from `restore_ckpt`. Returns None, and logs it, if that is not listed.

    `restore_ckpt` is the name of a checkpoint in `folder`. If it is a path, only its last component counts.
    """
    chosen = _listed(state, restore_ckpt)
    if chosen is None:
        _log.warning(
            "restore_ckpt %r is not listed in %s/%s; the newest is used", restore_ckpt, folder, CHECKPOINT_INDEX
        )
        return None
    if chosen == state.model_checkpoint_path:
        _log.info("restore_ckpt %r is the newest checkpoint of %s anyway", restore_ckpt, folder)
    return replace(state, model_checkpoint_path=chosen)


def restore_marker(model_dir: StrPath | ModelDir) -> str | None:
    """Return the checkpoint that a training run of `model_dir` went back to or adopted, as it was named. None if there is none.

    Example:
        >>> restore_marker("memory://no-run")
    """
    place = ModelDir.of(model_dir).folder
    return None if place.size(RESTORE_MARKER) is None else place.read(RESTORE_MARKER).decode(errors="replace")


def warn_if_ignored(restore_ckpt: str, followed: str, model_dir: StrPath | ModelDir) -> None:
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


def adopt_restore_dir(
    restore_dir: StrPath, model_dir: StrPath | ModelDir, *, restore_ckpt: str | None = None
) -> str | None:
    """Let `model_dir` start from a checkpoint of `restore_dir`. Returns its path, or None if nothing was adopted.

    A `model_dir` that has an index keeps it, and `restore_dir` is then not read, since it may have been removed. The exception is
    an index whose checkpoint was adopted from elsewhere and no longer exists. A `restore_dir` without a checkpoint is logged.

    The checkpoint is the one named `restore_ckpt`, if it is listed there, else the newest. It stays where it is. The new index
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
    state = read_patiently(restore_dir)
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
    mark_restored(model_dir, restore_ckpt or base_name(chosen))
    write_monolith_checkpoint_state(model_dir, with_exempt(known, chosen))
    return chosen


def read_patiently(
    folder: StrPath | ModelDir,
    filename: str = CHECKPOINT_INDEX,
    *,
    attempts: int = 5,
    sleep: Callable[[float], None] = time.sleep,
) -> CheckpointState | None:
    """Read the index of `folder` like `read_checkpoint_state`, but retry on errors: it may just be being replaced."""
    for attempt in range(attempts):
        try:
            return read_checkpoint_state(folder, filename)
        except (CorruptFileError, StorageError) as error:
            if attempt + 1 == attempts:
                raise
            _log.warning("%s/%s cannot be read, trying again: %s", folder, filename, error)
            sleep(1.0)
    raise InvalidArgumentError(f"attempts: expected at least 1, got {attempts}")


def mark_restored(folder: StrPath | ModelDir, restore_ckpt: str) -> None:
    """Record in `folder` that a run has gone back to `restore_ckpt` or adopted it."""
    ModelDir.of(folder).folder.write(RESTORE_MARKER, restore_ckpt.encode())


def _own_index(model_dir: StrPath | ModelDir) -> CheckpointState | None:
    """Return the index of `model_dir`, unless the checkpoint it starts from was adopted and has been removed since."""
    state = read_checkpoint_state(model_dir)
    if state is None or checkpoint_exists(state.model_checkpoint_path):
        return state
    return None if _outside(state, model_dir) else state


def _outside(state: CheckpointState, model_dir: StrPath | ModelDir) -> tuple[str, ...]:
    """Return the checkpoint that `state` starts from, if it is another run's."""
    path = state.model_checkpoint_path
    home = ModelDir.of(model_dir)
    return () if home.home_of(path) is home else (path,)


def _listed(state: CheckpointState, name: str) -> str | None:
    wanted = base_name(name)
    return next((path for path in state.all_model_checkpoint_paths if base_name(path) == wanted), None)


def _has(folder: StrPath | ModelDir, name: str) -> bool:
    return ModelDir.of(folder).folder.size(name) is not None
