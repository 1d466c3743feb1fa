"""The text files beside checkpoints, in the original's format: `checkpoint`, `monolith_checkpoint`, `ckpt.info-<step>`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from google.protobuf import text_format
from google.protobuf.message import Message

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.proto import checkpoint_state_pb2 as pb
from monolith.state.paths import absolute_path, base_name, parent_folder, relative_name
from monolith.state.storage import StrPath, open_folder

__all__ = [
    "CheckpointState",
    "INDEX",
    "MONOLITH_INDEX",
    "MonolithCheckpointState",
    "checkpoint_exists",
    "create_monolith_checkpoint_state",
    "get_latest_checkpoint_state",
    "get_monolith_checkpoint_state",
    "read_checkpoint_info",
    "read_checkpoint_state",
    "remove_checkpoint_info",
    "update_save_time",
    "with_exempt",
    "write_checkpoint_info",
    "write_checkpoint_state",
    "write_monolith_checkpoint_state",
]

INDEX = "checkpoint"
"""File that lists the checkpoints of a folder."""
MONOLITH_INDEX = "monolith_checkpoint"
"""File that says which of them must stay."""

_ADVICE = "put it back as it was; without this file a run starts from the newest checkpoint that is complete"

TableType = Literal["UNKNOWN", "CUCKOO_HASH_MAP", "MULTI_CUCKOO_HASH_MAP"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """The checkpoints of a folder; all paths are absolute or start where the folder's own path does."""

    model_checkpoint_path: str
    """The newest."""
    all_model_checkpoint_paths: tuple[str, ...] = ()
    """Oldest first."""
    all_model_checkpoint_timestamps: tuple[float, ...] = ()
    """Seconds since 1970, one per path, or none at all."""
    last_preserved_timestamp: float = 0.0
    """Time of the last checkpoint that is kept for good; 0 if there is none."""


@dataclass(frozen=True, kw_only=True)
class MonolithCheckpointState:
    """What must be known of checkpoints beside their names."""

    exempt_model_checkpoint_paths: tuple[str, ...] = ()
    """Never removed, not counted by `max_to_keep`."""
    last_checkpoint_save_timestamp: int = 0
    """Seconds since 1970."""
    builtin_hash_table_type: TableType = "UNKNOWN"
    """Which of the original's tables wrote it. New files say `MULTI_CUCKOO_HASH_MAP`, the original's default."""


def read_checkpoint_state(folder: StrPath, filename: str = INDEX) -> CheckpointState | None:
    """What the index of `folder` says; None if there is none. `CorruptFileError` for one that cannot be understood.

    Example:
        >>> write_checkpoint_state("memory://doc", CheckpointState(model_checkpoint_path="memory://doc/model.ckpt-3"))
        >>> open_folder("memory://doc").read("checkpoint")
        b'model_checkpoint_path: "model.ckpt-3"\\nall_model_checkpoint_paths: "model.ckpt-3"\\n'
        >>> read_checkpoint_state("memory://doc").model_checkpoint_path
        'memory://doc/model.ckpt-3'
    """
    text = _read(folder, filename, pb.CheckpointState())
    if text is None:
        return None
    if not text.model_checkpoint_path:
        raise CorruptFileError(f"{folder}/{filename}: names no model_checkpoint_path; {_ADVICE}")
    try:
        return CheckpointState(
            model_checkpoint_path=absolute_path(text.model_checkpoint_path, folder),
            all_model_checkpoint_paths=tuple(absolute_path(p, folder) for p in text.all_model_checkpoint_paths),
            all_model_checkpoint_timestamps=tuple(text.all_model_checkpoint_timestamps),
            last_preserved_timestamp=text.last_preserved_timestamp,
        )
    except InvalidArgumentError as error:
        raise CorruptFileError(f"{folder}/{filename}: {error}") from None


def write_checkpoint_state(
    folder: StrPath, state: CheckpointState, filename: str = INDEX, *, relative: bool = True
) -> None:
    """Replace the index of `folder`. Paths inside it are written `relative` to it, so that it may be moved as a whole."""

    def name(path: str) -> str:
        return relative_name(path, folder) if relative else path

    paths = state.all_model_checkpoint_paths
    if state.model_checkpoint_path not in paths:
        paths = (*paths, state.model_checkpoint_path)
    text = pb.CheckpointState(
        model_checkpoint_path=name(state.model_checkpoint_path),
        all_model_checkpoint_paths=[name(path) for path in paths],
        all_model_checkpoint_timestamps=state.all_model_checkpoint_timestamps,
        last_preserved_timestamp=state.last_preserved_timestamp,
    )
    _write(folder, filename, text)


def get_monolith_checkpoint_state(
    folder: StrPath, filename: str = MONOLITH_INDEX, *, remove_invalid_path: bool = False
) -> MonolithCheckpointState | None:
    """What `monolith_checkpoint` says, with absolute paths; None if it is not there or cannot be understood.

    With `remove_invalid_path`, paths that do not exist any more are left out, with a warning.
    """
    try:
        text = _read(folder, filename, pb.MonolithCheckpointState())
        if text is None:
            return None
        exempt = tuple(absolute_path(path, folder) for path in text.exempt_model_checkpoint_paths)
        kind: TableType = pb.MonolithCheckpointState.HashTableType.Name(text.builtin_hash_table_type)  # type: ignore[assignment]
    except (StorageError, CorruptFileError, InvalidArgumentError, ValueError) as error:
        _log.warning("%s/%s cannot be read: %s", folder, filename, error)
        return None
    if remove_invalid_path:
        gone = [path for path in exempt if not checkpoint_exists(path)]
        if gone:
            _log.warning("%s/%s: %s are not there any more", folder, filename, ", ".join(gone))
        exempt = tuple(path for path in exempt if path not in gone)
    return MonolithCheckpointState(
        exempt_model_checkpoint_paths=exempt,
        last_checkpoint_save_timestamp=text.last_checkpoint_save_timestamp,
        builtin_hash_table_type=kind,
    )


def write_monolith_checkpoint_state(
    folder: StrPath, state: MonolithCheckpointState, filename: str = MONOLITH_INDEX
) -> None:
    """Replace `monolith_checkpoint` of `folder`.

    Example:
        >>> exempt = MonolithCheckpointState(exempt_model_checkpoint_paths=("model.ckpt-10",))
        >>> write_monolith_checkpoint_state("memory://doc", exempt)
        >>> get_monolith_checkpoint_state("memory://doc").exempt_model_checkpoint_paths
        ('memory://doc/model.ckpt-10',)
    """
    text = pb.MonolithCheckpointState(
        exempt_model_checkpoint_paths=[relative_name(path, folder) for path in state.exempt_model_checkpoint_paths],
        last_checkpoint_save_timestamp=state.last_checkpoint_save_timestamp,
        builtin_hash_table_type=state.builtin_hash_table_type,
    )
    _write(folder, filename, text)


def create_monolith_checkpoint_state(folder: StrPath) -> None:
    """Write `monolith_checkpoint` of `folder` with the type of the tables, before anything is saved.

    A file that is there keeps what it says. Only a type that it leaves open is filled in.

    Example:
        >>> create_monolith_checkpoint_state("memory://doc-start")
        >>> open_folder("memory://doc-start").read("monolith_checkpoint")
        b'builtin_hash_table_type: MULTI_CUCKOO_HASH_MAP\\n'
    """
    known = get_monolith_checkpoint_state(folder)
    if known is None and open_folder(folder).size(MONOLITH_INDEX) is not None:
        return  # it cannot be read, which has been logged; a person may still repair it
    if known is None or known.builtin_hash_table_type == "UNKNOWN":
        write_monolith_checkpoint_state(folder, _with_table_type(known))


def update_save_time(folder: StrPath, time: int) -> MonolithCheckpointState:
    """Note in `monolith_checkpoint` of `folder`, which is made if it is missing, when a checkpoint was saved."""
    known = _with_table_type(get_monolith_checkpoint_state(folder))
    state = replace(known, last_checkpoint_save_timestamp=time)
    write_monolith_checkpoint_state(folder, state)
    return state


def _with_table_type(state: MonolithCheckpointState | None) -> MonolithCheckpointState:
    if state is not None and state.builtin_hash_table_type != "UNKNOWN":
        return state
    return replace(state or MonolithCheckpointState(), builtin_hash_table_type="MULTI_CUCKOO_HASH_MAP")


class _LatestStates:
    """The index of every folder as last read, for those who ask at every step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, tuple[int, CheckpointState | None]] = {}

    def get(self, folder: str, step: int) -> CheckpointState | None:
        with self._lock:
            known = self._states.get(folder)
        if known is None or known[1] is None or step > known[0]:
            known = (step, read_checkpoint_state(folder))
            with self._lock:
                self._states[folder] = known
        return known[1]


_LATEST = _LatestStates()


def get_latest_checkpoint_state(folder: StrPath, step: int) -> CheckpointState | None:
    """The index of `folder`, read again only when a larger `step` is asked for than before, or there was none."""
    return _LATEST.get(str(folder), step)


def write_checkpoint_info(
    folder: StrPath, step: int, *, feature_counts: Mapping[str, int], slot_counts: Mapping[int, int] | None = None
) -> None:
    """Note how many rows the checkpoint of `step` has, by table and, if counted, by slot: `ckpt.info-<step>`.

    Example:
        >>> write_checkpoint_info("memory://doc", 3, feature_counts={"user": 7})
        >>> read_checkpoint_info("memory://doc", 3)
        ({'user': 7}, {})
    """
    _write(folder, f"ckpt.info-{step}", pb.CkptInfo(feature_counts=feature_counts, slot_counts=slot_counts or {}))


def read_checkpoint_info(folder: StrPath, step: int) -> tuple[dict[str, int], dict[int, int]] | None:
    """Rows by table and by slot, as `write_checkpoint_info` noted them; None if it did not."""
    info = _read(folder, f"ckpt.info-{step}", pb.CkptInfo())
    return None if info is None else (dict(info.feature_counts), dict(info.slot_counts))


def remove_checkpoint_info(folder: StrPath, step: int) -> None:
    """Forget the counts of `step`; nothing happens if there are none."""
    open_folder(folder).remove(f"ckpt.info-{step}")


TextMessage = TypeVar("TextMessage", bound=Message)


def _read(folder: StrPath, name: str, message: TextMessage) -> TextMessage | None:
    place = open_folder(folder)
    if place.size(name) is None:
        return None
    try:
        return text_format.Parse(place.read(name).decode(), message, allow_unknown_field=True)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{folder}/{name}: cannot be understood: {error}; {_ADVICE}") from None


def _write(folder: StrPath, name: str, message: Message) -> None:
    open_folder(folder).write(name, text_format.MessageToString(message).encode())


def checkpoint_exists(path: str) -> bool:
    """Whether there is something at the path of a checkpoint, complete or not.

    Example:
        >>> checkpoint_exists("memory://no-run/model.ckpt-3")
        False
    """
    return base_name(path) in open_folder(parent_folder(path)).names()


def with_exempt(state: MonolithCheckpointState | None, *paths: str) -> MonolithCheckpointState:
    """`state` with more paths that must stay."""
    state = state or MonolithCheckpointState()
    known = state.exempt_model_checkpoint_paths
    return replace(
        state, exempt_model_checkpoint_paths=(*known, *(path for path in dict.fromkeys(paths) if path not in known))
    )
