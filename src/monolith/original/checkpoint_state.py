"""The original's names for the index of checkpoints: `SaveHelper`, `get_checkpoint_state` and their like."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from monolith.errors import InvalidArgumentError
from monolith.state.index import (
    CHECKPOINT_INDEX,
    CheckpointState,
    mark_restored,
    read_checkpoint_state,
    read_patiently,
    redirect,
    restore_marker,
    warn_if_ignored,
    write_checkpoint_state,
)
from monolith.state.paths import parent_folder
from monolith.state.restore_points import step_of_name
from monolith.state.storage import StrPath

__all__ = ["SaveHelper", "get_checkpoint_state", "get_latest_checkpoint_state"]


def get_checkpoint_state(
    folder: StrPath,
    *,
    restore_ckpt: str | None = None,
    training: bool = False,
    filename: str = CHECKPOINT_INDEX,
    attempts: int = 5,
    sleep: Callable[[float], None] = time.sleep,
) -> CheckpointState | None:
    """Read the index of `folder`, with the checkpoint to start from as its `model_checkpoint_path`. None if there is none.

    An index that cannot be read is read again, up to `attempts` times, because it may just be being replaced.

    `restore_ckpt` is the name of a checkpoint in `folder`. When not `training`, it becomes the one to start from. When
    `training`, it does so the first time only: the index is rewritten and a marker file is left, and from then on the index is
    taken as it is. A name that the index does not list changes nothing and is logged. Only the index "checkpoint" is redirected.

    Example:
        >>> write_checkpoint_state("memory://redirect", CheckpointState(
        ...     model_checkpoint_path="memory://redirect/model.ckpt-60",
        ...     all_model_checkpoint_paths=("memory://redirect/model.ckpt-30", "memory://redirect/model.ckpt-60")))
        >>> get_checkpoint_state("memory://redirect", restore_ckpt="model.ckpt-30").model_checkpoint_path
        'memory://redirect/model.ckpt-30'
    """
    state = read_patiently(folder, filename, attempts=attempts, sleep=sleep)
    if state is None or restore_ckpt is None or filename != CHECKPOINT_INDEX:
        return state
    if training and (followed := restore_marker(folder)) is not None:
        warn_if_ignored(restore_ckpt, followed, folder)
        return state
    redirected = redirect(state, restore_ckpt, folder)
    if redirected is not None and training:
        # The marker last: if the process is killed in between, the same is done again.
        write_checkpoint_state(folder, redirected)
        mark_restored(folder, restore_ckpt)
    return redirected or state


class _LatestStates:
    """The index of every folder as last read, for callers that ask at every step."""

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
    """Return the index of `folder`, read again only when `step` is larger than before, or there was none."""
    return _LATEST.get(str(folder), step)


class SaveHelper:
    """Names of checkpoints that begin with `basename`, such as `/runs/ctr/model.ckpt`.

    Example:
        >>> names = SaveHelper("/runs/ctr/model.ckpt")
        >>> names.get_ckpt_prefix(30), names.get_ckpt_asset_dir(names.get_ckpt_prefix(30))
        ('/runs/ctr/model.ckpt-30', '/runs/ctr/model.ckpt-30.assets/')
        >>> SaveHelper.get_global_step_value("/runs/ctr/model.ckpt-30")
        30
    """

    def __init__(self, basename: StrPath) -> None:
        self.basename = str(basename)

    def get_ckpt_prefix(self, step: int) -> str:
        """Return the path of the checkpoint of `step`."""
        return f"{self.basename}-{step}"

    def get_ckpt_asset_dir(self, ckpt_prefix: str) -> str:
        """Return the folder where the original keeps the parts of a checkpoint that are not dense variables."""
        return f"{ckpt_prefix}.assets/"

    @staticmethod
    def get_global_step_value(ckpt_prefix: str) -> int:
        """Return the step in the name of a checkpoint. Raises `InvalidArgumentError` (a ValueError) if it has none."""
        step = step_of_name(ckpt_prefix)
        if step is None:
            raise InvalidArgumentError(f"{ckpt_prefix!r}: expected a name that ends with '-' and a step")
        return step

    def get_existing_checkpoint_steps(self) -> set[int]:
        """Return the steps that the index of their folder lists. A checkpoint whose name has no step is left out."""
        state = read_checkpoint_state(parent_folder(self.basename))
        steps = map(step_of_name, state.all_model_checkpoint_paths if state else ())
        return {step for step in steps if step is not None}
