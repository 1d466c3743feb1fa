"""Which saved moment a run starts from, given its configuration and what is in its folders."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.state.index import (
    RESTORE_MARKER,
    CheckpointState,
    adopt_restore_dir,
    checkpoint_exists,
    read_checkpoint_state,
    read_patiently,
    redirect,
    restore_marker,
    warn_if_ignored,
)
from monolith.state.paths import base_name, parent_folder
from monolith.state.restore_points import (
    RestorePoint,
    find_restore_point,
    restore_point_at,
    restore_point_of,
    restore_points,
)
from monolith.state.storage import is_remote, open_folder
from monolith.train.config import RunConfig

__all__ = [
    "CLEAR_NN_MARKER",
    "RESTORE_TO_MARKER",
    "RestoreChoice",
    "choose_restore_point",
    "cleared_before",
    "has_wishes",
    "leave_markers",
]

CLEAR_NN_MARKER = "clear_nn"
"""File of the model_dir that says that dense parameters have been started anew."""
RESTORE_TO_MARKER = "restore_to"
"""File of the model_dir with the moment that a run has gone back to."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RestoreChoice:
    """A moment, and what has to be remembered once a training run goes on from there."""

    point: RestorePoint
    own: bool
    """Whether it lies in the run's own model_dir, whose log then continues it."""
    clear_nn: bool = False
    """Restore the tables only."""
    went_back: bool = False
    """Something newer is left behind: save at once, so that it is not continued by accident."""
    markers: Mapping[str, str] = field(default_factory=dict)
    """Files to leave in the model_dir, and what they say."""

    @property
    def is_newest_checkpoint(self) -> bool:
        """Whether the run's own newest state is a checkpoint and all of it was restored."""
        return self.own and self.point.checkpoint is not None and not (self.clear_nn or self.went_back)


def choose_restore_point(config: RunConfig, *, training: bool) -> RestoreChoice | None:
    """What a run starts from; None if there is nothing. Only `training` follows one-time wishes once, and writes an index.

    Example:
        >>> choose_restore_point(RunConfig(model_dir="memory://no-run"), training=True)
    """
    if config.model_dir is None:
        return None
    choice = _by_moment(config, training) or _by_index(config, training)
    if choice is None or not config.clear_nn or not training:
        return choice
    if marker := cleared_before(config):
        _log.info("clear_nn is not done again: %s says that it has been done; remove that file to do it again", marker)
        return choice
    markers = {**choice.markers, CLEAR_NN_MARKER: "clean nn done!"}
    return RestoreChoice(point=choice.point, own=choice.own, clear_nn=True, went_back=choice.went_back, markers=markers)


def cleared_before(config: RunConfig) -> str | None:
    """The file that says that `clear_nn` has been done in the model_dir. None if it has not.

    Example:
        >>> cleared_before(RunConfig(model_dir="memory://no-run", clear_nn=True))
    """
    if config.model_dir is None or _text(config.model_dir, CLEAR_NN_MARKER) is None:
        return None
    return f"{config.model_dir.rstrip('/')}/{CLEAR_NN_MARKER}"


def has_wishes(config: RunConfig) -> bool:
    """Whether training and evaluation may start from different moments.

    Example:
        >>> has_wishes(RunConfig()), has_wishes(RunConfig(restore_ckpt="model.ckpt-3"))
        (False, True)
    """
    return config.clear_nn or any((config.restore_ckpt, config.restore_dir, config.restore_to))


def leave_markers(model_dir: str, choice: RestoreChoice) -> None:
    """Remember what a run has done, now that it has saved."""
    for name, text in choice.markers.items():
        open_folder(model_dir).write(name, text.encode())


def _by_moment(config: RunConfig, training: bool) -> RestoreChoice | None:
    if config.restore_to is None:
        return None
    model_dir = str(config.model_dir)
    if training and _text(model_dir, RESTORE_TO_MARKER) == config.restore_to:
        return None
    point = restore_point_at(model_dir, config.restore_to)
    return RestoreChoice(point=point, own=True, went_back=True, markers={RESTORE_TO_MARKER: config.restore_to})


def _by_index(config: RunConfig, training: bool) -> RestoreChoice | None:
    model_dir = str(config.model_dir).rstrip("/")
    folder = _folder_to_read(config, training)
    wish = _open_wish(config, training)
    state = read_patiently(folder)
    if state is not None and wish is not None:
        state = redirect(state, wish, folder) or state
    if state is None:
        if wish is not None:
            _log.warning("restore_ckpt %r is ignored: %s has no index of checkpoints", wish, folder)
        return _newest(folder, model_dir)
    if wish is not None and base_name(wish) == base_name(state.model_checkpoint_path):
        return _back(restore_point_of(state.model_checkpoint_path), model_dir, {RESTORE_MARKER: wish})
    if parent_folder(state.model_checkpoint_path) != folder:
        return _newest(folder, model_dir) or _adopted(state.model_checkpoint_path, folder)
    named = _named_point(state.model_checkpoint_path)
    if is_remote(folder):
        # Without a log nothing but the index knows which is the newest.
        return RestoreChoice(point=named, own=folder == model_dir)
    if _lists_a_newer_one(state, named):
        return _back(named, model_dir, {})
    return _newest(folder, model_dir)


def _open_wish(config: RunConfig, training: bool) -> str | None:
    """The `restore_ckpt` to follow: training follows one once."""
    followed = restore_marker(str(config.model_dir)) if training else None
    if followed is None or config.restore_ckpt is None:
        return config.restore_ckpt
    warn_if_ignored(config.restore_ckpt, followed, str(config.model_dir))
    return None


def _folder_to_read(config: RunConfig, training: bool) -> str:
    model_dir = str(config.model_dir).rstrip("/")
    if config.restore_dir is None:
        return model_dir
    if restore_points(model_dir):
        _log.info("restore_dir %s is not read: %s has a state of its own", config.restore_dir, model_dir)
        return model_dir
    if training:
        adopt_restore_dir(config.restore_dir, model_dir, restore_ckpt=config.restore_ckpt)
        return model_dir
    # A run that only reads adopts nothing.
    if read_checkpoint_state(model_dir) is not None:
        return model_dir
    if read_checkpoint_state(config.restore_dir) is None:
        _log.warning("restore_dir %s has no checkpoint; %s starts without one", config.restore_dir, model_dir)
    return config.restore_dir.rstrip("/")


def _adopted(path: str, model_dir: str) -> RestoreChoice | None:
    """Another run's checkpoint, which this one has adopted and not saved one of its own since."""
    if not checkpoint_exists(path):
        _log.warning("%s, which %s was to start from, has been removed; the run starts without it", path, model_dir)
        return None
    return RestoreChoice(point=_named_point(path), own=False)


def _back(point: RestorePoint, model_dir: str, markers: Mapping[str, str]) -> RestoreChoice:
    return RestoreChoice(point=point, own=point.model_dir == model_dir, went_back=True, markers=markers)


def _newest(folder: str, model_dir: str) -> RestoreChoice | None:
    try:
        return RestoreChoice(point=find_restore_point(folder), own=folder == model_dir)
    except InvalidArgumentError:
        return None  # there is nothing, not even something damaged


def _lists_a_newer_one(state: CheckpointState, named: RestorePoint) -> bool:
    """Whether someone has made an index start from an older checkpoint than it lists. One that only lags lists no newer one."""
    others = map(_point_or_none, state.all_model_checkpoint_paths)
    return any(other is not None and other.sequence > named.sequence for other in others)


def _named_point(path: str) -> RestorePoint:
    """The checkpoint that the index starts from. Another one in its place would be a loss that nobody notices."""
    try:
        return restore_point_of(path)
    except CorruptFileError as error:
        raise CorruptFileError(
            f"{error}; it is the newest checkpoint: put its files back, or go back on purpose with restore_ckpt or restore_to"
        ) from None


def _point_or_none(path: str) -> RestorePoint | None:
    try:
        return restore_point_of(path)
    except (CorruptFileError, StorageError) as error:
        _log.warning("%s cannot be restored: %s", path, error)
        return None


def _text(folder: str, name: str) -> str | None:
    place = open_folder(folder)
    return None if place.size(name) is None else place.read(name).decode(errors="replace")
