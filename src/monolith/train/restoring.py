"""Restoring a trainer: which saved moment a run starts from, and how all of it is put in place or nothing is.

All of it is tables, dense parameters, optimizer, step and position in the data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from monolith.errors import (
    CheckpointMismatchError,
    CorruptFileError,
    InvalidArgumentError,
    LogGapError,
    ServerLostError,
    StorageError,
)
from monolith.nn import dense_state_dict, embedding_collections
from monolith.state.compatibility import RestoreReport
from monolith.state.dense import DenseReport, plan_dense
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
from monolith.state.locks import in_use
from monolith.state.model_dir import ModelDir
from monolith.state.optimizer_state import OptimizerPlan
from monolith.state.paths import base_name
from monolith.state.restore import prepare_tables
from monolith.state.restore_points import (
    RestorePoint,
    find_restore_point,
    restore_point_at,
    restore_point_of,
    restore_points,
)
from monolith.table.store import RestoreChoices
from monolith.train.config import RunConfig

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = [
    "CLEAR_NN_MARKER",
    "RESTORE_TO_MARKER",
    "RestoreChoice",
    "choose_restore_point",
    "has_restore_settings",
    "recover_servers",
    "restore_chosen",
    "warm_start",
]

CLEAR_NN_MARKER = "clear_nn"
"""Name of the file in the model_dir that says that dense parameters have been initialised again."""
RESTORE_TO_MARKER = "restore_to"
"""Name of the file in the model_dir with the moment that a run has gone back to."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RestoreChoice:
    """A moment to restore, and what to record once a training run continues from it."""

    point: RestorePoint
    own: bool
    """Whether it is in the run's own model_dir, whose log then continues it."""
    clear_nn: bool = False
    """Restore the tables only."""
    went_back: bool = False
    """Something newer is left behind. The run saves at once, so that it is not continued by accident."""
    markers: Mapping[str, str] = field(default_factory=dict)
    """Files to write into the model_dir, and their contents."""

    @property
    def is_newest_checkpoint(self) -> bool:
        """Whether the run's own newest state is a checkpoint and all of it was restored."""
        return self.own and self.point.checkpoint is not None and not (self.clear_nn or self.went_back)

    def leave_markers(self, model_dir: ModelDir) -> None:
        """Record what a run has done, after it has saved."""
        for name, text in self.markers.items():
            model_dir.folder.write(name, text.encode())


def choose_restore_point(
    config: RunConfig, *, training: bool, model_dir: ModelDir | None = None
) -> RestoreChoice | None:
    """Choose what a run starts from. Returns None if there is nothing.

    Only `training` follows `restore_ckpt`, `restore_to` and `restore_dir` once, and writes an index. `model_dir` is that of
    `config`, if the caller holds it.

    Example:
        >>> choose_restore_point(RunConfig(model_dir="memory://no-run"), training=True)
    """
    if config.model_dir is None:
        return None
    home = model_dir or ModelDir(config.model_dir)
    choice = _by_moment(config, home, training) or _by_index(config, home, training)
    if choice is None or not config.clear_nn or not training:
        return choice
    if marker := _cleared_before(home):
        _log.info("clear_nn is not done again: %s says that it has been done; remove that file to do it again", marker)
        return choice
    return replace(choice, clear_nn=True, markers={**choice.markers, CLEAR_NN_MARKER: "clean nn done!"})


def has_restore_settings(config: RunConfig) -> bool:
    """Return whether training and evaluation may start from different moments.

    Example:
        >>> has_restore_settings(RunConfig()), has_restore_settings(RunConfig(restore_ckpt="model.ckpt-3"))
        (False, True)
    """
    return config.clear_nn or any((config.restore_ckpt, config.restore_dir, config.restore_to))


def _cleared_before(home: ModelDir) -> str | None:
    """Return the file that says that `clear_nn` has been done, or None if it has not."""
    return None if home.folder.size(CLEAR_NN_MARKER) is None else f"{home.path}/{CLEAR_NN_MARKER}"


def _by_moment(config: RunConfig, home: ModelDir, training: bool) -> RestoreChoice | None:
    if config.restore_to is None:
        return None
    marked = training and home.folder.size(RESTORE_TO_MARKER) is not None
    if marked and home.folder.read(RESTORE_TO_MARKER).decode(errors="replace") == config.restore_to:
        return None
    point = restore_point_at(home, config.restore_to)
    return RestoreChoice(point=point, own=True, went_back=True, markers={RESTORE_TO_MARKER: config.restore_to})


def _by_index(config: RunConfig, home: ModelDir, training: bool) -> RestoreChoice | None:
    read = _model_dir_to_read(config, home, training)
    wanted = _pending_restore_ckpt(config, home, training)
    state = read_patiently(read)
    if state is None:
        if wanted is not None:
            _log.warning("restore_ckpt %r is ignored: %s has no index of checkpoints", wanted, read.path)
        return _newest(read, home)
    if wanted is not None:
        state = redirect(state, wanted, read.path) or state
        if base_name(wanted) == base_name(state.model_checkpoint_path):
            return _back(restore_point_of(state.model_checkpoint_path, read), home, {RESTORE_MARKER: wanted})
    if read.home_of(state.model_checkpoint_path) is not read:
        return _newest(read, home) or _adopted(state.model_checkpoint_path, read)
    named = _named_point(state.model_checkpoint_path, read)
    if not read.keeps_log:
        # Without a log only the index knows which is the newest.
        return RestoreChoice(point=named, own=read is home)
    if _lists_a_newer_one(state, named, read):
        return _back(named, home, {})
    return _newest(read, home)


def _pending_restore_ckpt(config: RunConfig, home: ModelDir, training: bool) -> str | None:
    """Return the `restore_ckpt` to follow. Training follows one only once."""
    if config.restore_ckpt is None or not training or (followed := restore_marker(home)) is None:
        return config.restore_ckpt
    warn_if_ignored(config.restore_ckpt, followed, home.path)
    return None


def _model_dir_to_read(config: RunConfig, home: ModelDir, training: bool) -> ModelDir:
    if config.restore_dir is None:
        return home
    if restore_points(home):
        _log.info("restore_dir %s is not read: %s has a state of its own", config.restore_dir, home.path)
        return home
    if training:
        adopt_restore_dir(config.restore_dir, home, restore_ckpt=config.restore_ckpt)
        return home
    # A run that only reads adopts nothing.
    if read_checkpoint_state(home) is not None:
        return home
    if read_checkpoint_state(config.restore_dir) is None:
        _log.warning("restore_dir %s has no checkpoint; %s starts without one", config.restore_dir, home.path)
    return ModelDir(config.restore_dir)


def _adopted(path: str, read: ModelDir) -> RestoreChoice | None:
    """Return the checkpoint at `path`, of another run, which this run starts from. None if it has been removed."""
    if not checkpoint_exists(path):
        _log.warning("%s, which %s was to start from, has been removed; the run starts without it", path, read.path)
        return None
    return RestoreChoice(point=_named_point(path, read), own=False)


def _back(point: RestorePoint, home: ModelDir, markers: Mapping[str, str]) -> RestoreChoice:
    return RestoreChoice(point=point, own=point.home is home, went_back=True, markers=markers)


def _newest(read: ModelDir, home: ModelDir) -> RestoreChoice | None:
    try:
        return RestoreChoice(point=find_restore_point(read), own=read is home)
    except InvalidArgumentError:
        return None  # there is nothing, not even something damaged


def _lists_a_newer_one(state: CheckpointState, named: RestorePoint, read: ModelDir) -> bool:
    """Return whether someone has made the index start from an older checkpoint than it lists."""
    for path in state.all_model_checkpoint_paths:
        try:
            home, name = read.home_of(path), base_name(path)
            if home.manifest(name).sequence > named.sequence and home.check(name):
                return True
        except (CorruptFileError, StorageError) as error:
            _log.warning("%s cannot be restored: %s", path, error)
    return False


def _named_point(path: str, read: ModelDir) -> RestorePoint:
    """Return the checkpoint that the index starts from. To start from another one would be an unnoticed loss."""
    try:
        return restore_point_of(path, read)
    except CorruptFileError as error:
        raise CorruptFileError(
            f"{error}; it is the newest checkpoint: put its files back, or go back on purpose with restore_ckpt or restore_to"
        ) from None


def restore_chosen(trainer: Trainer, *, training: bool) -> tuple[RestoreChoice | None, int]:
    """Restore `trainer` to the moment its configuration names. On an error nothing has changed.

    Returns that moment and the sequence number that the trainer's own log continues, which is 0 if it continues nothing.
    """
    choice = choose_restore_point(trainer.config, training=training, model_dir=trainer.model_dir)
    while choice is not None:
        # Only training sends servers back, because others may be using them.
        goes_back = training and (choice.went_back or _servers_go_back(trainer, choice.point))
        if training and not goes_back:
            _require_no_loss(trainer, choice.point)
        try:
            return choice, _restore(trainer, choice, only_fresh=not goes_back)
        except (CorruptFileError, LogGapError, StorageError):
            # Training may have removed what was chosen and written something newer, if this process only reads.
            newer = choose_restore_point(trainer.config, training=training, model_dir=trainer.model_dir)
            if newer == choice:
                raise
            choice = newer
    if training and _servers_go_back(trainer, None):
        for store in trainer.remote_stores:
            store.begin_restore(None, only_fresh=False)()
    return None, 0


def _servers_go_back(trainer: Trainer, point: RestorePoint | None) -> bool:
    """Return whether servers hold something else than `point`, None for nothing, and must have exactly that. Then log it."""
    if not trainer.rewinds_servers:
        return False
    name = "" if point is None else base_name(point.location)
    ahead = [address for store in trainer.remote_stores for address in store.moved_on(name)]
    if ahead and point is None:
        _log.warning(
            "there is no checkpoint: servers %s drop the rows of an earlier attempt, so that every batch counts once",
            ", ".join(ahead),
        )
    elif ahead and point is not None:
        _log.warning(
            "servers %s hold updates that are not in %s: their rows go back to step %d with the run, so that every batch counts "
            "once",
            ", ".join(ahead),
            point.location,
            point.step,
        )
    return bool(ahead)


def warm_start(trainer: Trainer, model_dir: str) -> None:
    """Load the weights and rows of the newest restore point of another run into `trainer`, and nothing else."""
    other = ModelDir(model_dir)
    if not restore_points(other):
        raise InvalidArgumentError(
            f"RunConfig.warm_start_from: expected the model_dir of a saved run, got {model_dir!r}"
        )
    _, dense, _, put_in_place = _read(trainer, find_restore_point(other), rows_only=True, only_fresh=True)
    put_in_place()
    trainer.model.load_state_dict(dict(dense.values))
    trainer.dense.install(OptimizerPlan(), only_fresh=True)
    for collection in embedding_collections(trainer.model):
        collection.steps.zero_()


def recover_servers(trainer: Trainer) -> None:
    """Restore the servers that are not initialised, if there is a checkpoint, and mark all of them as initialised.

    A run calls it whenever it begins, because a server may have lost its state while the rest of the run has kept its own.

    Raises:
        ServerLostError: A server has lost what was trained on it, and `trainer.accepts_lost_servers` is False.
    """
    stores = trainer.remote_stores
    if not all(store.is_initialised() for store in stores):
        choice = choose_restore_point(trainer.config, training=True, model_dir=trainer.model_dir)
        _require_no_loss(trainer, None if choice is None else choice.point)
        if choice is not None:
            _begin_remote(trainer, choice.point, only_fresh=True)()
    for store in stores:
        store.mark_initialised()


def _require_no_loss(trainer: Trainer, point: RestorePoint | None) -> None:
    name = "" if point is None else base_name(point.location)
    trained = trainer.step > (0 if point is None else point.step)
    lost = [address for store in trainer.stores for address in store.lost(name, trained=trained)]
    if not lost:
        return
    instead = "begin empty" if point is None else f"go back to step {point.step} of {point.location}"
    if not trainer.accepts_lost_servers:
        raise ServerLostError(
            f"servers {', '.join(lost)} have lost what was trained on them: their folders are empty or not the ones they had. "
            f"Give them their folders back; or let only them {instead} with RunnerConfig.partial_recovery or "
            "`monolith launch --accept-loss`; or start all servers on empty folders, to restore the newest checkpoint as a whole"
        )
    _log.warning(
        "servers %s have lost what was trained on them and %s: partial_recovery accepts that", ", ".join(lost), instead
    )


def _choices(trainer: Trainer) -> RestoreChoices:
    config = trainer.config
    return {
        "aliases": config.table_alias_map,
        "allow_new_tables": config.allow_new_tables,
        "allow_new_segments": config.allow_new_segments,
    }


def _restore(trainer: Trainer, choice: RestoreChoice, *, only_fresh: bool) -> int:
    state, dense, tables, put_in_place = _read(trainer, choice.point, clear_nn=choice.clear_nn, only_fresh=only_fresh)
    optimizer = OptimizerPlan() if choice.clear_nn else trainer.dense.plan(state, dense.aliases)
    optimizer.require(tables.source)
    for note in (*dense.notes, *optimizer.notes):
        _log.info("%s: %s", tables.source, note)
    for change in (*optimizer.changes, *tables.notes):
        _log.warning("%s: %s", tables.source, change)
    put_in_place()
    optimizer.apply()
    trainer.load_position({**state, "step": dense.step})
    if choice.clear_nn:
        # Dense parameters, optimizer and scheduler stay as they were built.
        trainer.dense.start_at(dense.step)
        for collection in embedding_collections(trainer.model):
            collection.steps.fill_(dense.step)
    else:
        trainer.model.load_state_dict(dict(dense.values))
    if choice.clear_nn or not (state.get("optimizer") or {}).get("on_servers"):
        # Otherwise servers have restored their dense parameters themselves.
        trainer.dense.install(optimizer, only_fresh=only_fresh and not choice.clear_nn)
    return tables.parent if choice.own else 0


def _read(
    trainer: Trainer, point: RestorePoint, *, clear_nn: bool = False, rows_only: bool = False, only_fresh: bool
) -> tuple[dict[str, Any], DenseReport, RestoreReport, Callable[[], None]]:
    """Read everything of `point` and check it against the model. Calling the last result puts its rows into the tables.

    With `only_fresh`, initialised servers are left alone. With `rows_only` servers read no dense parameters: they get those of
    the model, without the state of an optimizer.
    """
    config = trainer.config
    with in_use(point.folder):
        state = _with_slots_of_servers(point, point.state()) if trainer.dense.served is None else point.state()
        model, step = state.get("model"), state.get("step")
        if not isinstance(model, dict) or not isinstance(step, int):
            raise CorruptFileError(f"{point.checkpoint or point.model_dir}: expected the state of a run")
        dense = plan_dense(
            dense_state_dict(trainer.model),
            model,
            step=step,
            aliases=config.reload_alias_map or None,
            auto_alias=config.enable_alias_map_auto_gen,
            clear_nn=clear_nn,
            continue_training=config.continue_training,
        )
        choices, own = _choices(trainer), trainer.tables()
        mine: RestoreChoices = {**choices, "only": [*own] if trainer.remote_stores else None}
        try:
            local, put_local = prepare_tables(point, own, **mine)
        except CheckpointMismatchError as error:
            # Both at once: new dense parameters alone do not help if the tables are incompatible.
            raise CheckpointMismatchError(f"{error}{dense.also()}") from None
        own_dir = trainer.model_dir
        cleared = None if own_dir is None else _cleared_before(own_dir)
        dense.require(point.checkpoint or point.model_dir, cleared=cleared)
        put_remote = _begin_remote(trainer, point, only_fresh=only_fresh, rows_only=clear_nn or rows_only)

    def put_in_place() -> None:
        # The servers first: if one of them is gone, nothing here has changed.
        put_remote()
        put_local()

    return state, dense, local, put_in_place


def _with_slots_of_servers(point: RestorePoint, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with the slots of the dense optimizer that servers have saved in their parts of the checkpoint."""
    model, optimizer = state.get("model"), state.get("optimizer")
    if not isinstance(model, dict) or not isinstance(optimizer, dict) or not optimizer.get("on_servers"):
        return state
    held: dict[str, dict[str, Any]] = {}
    home = point.home
    for path in home.home_of(point.checkpoint).parts(base_name(point.checkpoint)) if point.checkpoint else ():
        parameters: Any = home.home_of(path).state(base_name(path)).get("parameters", {})
        for name, saved in parameters.items():
            # Of two copies, the one that workers were training counts.
            if name not in held or saved["declared"]:
                held[name] = saved
    slots = {name: one["optimizer"][0] for name, one in held.items() if name in model and 0 in one["optimizer"]}
    return {**state, "optimizer": {**optimizer, "state": {**optimizer["state"], **slots}}}


def _begin_remote(
    trainer: Trainer, point: RestorePoint, *, only_fresh: bool, rows_only: bool = False
) -> Callable[[], None]:
    """Let those that hold rows elsewhere read them from `point`. Returns a function that puts them in place."""
    prepared = [
        store.begin_restore(point.location, only_fresh=only_fresh, rows_only=rows_only, **_choices(trainer))
        for store in trainer.remote_stores
    ]

    def put_in_place() -> None:
        for put in prepared:
            put()

    return put_in_place
