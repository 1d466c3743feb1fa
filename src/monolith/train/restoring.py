"""A saved moment into a trainer: tables, dense parameters, optimizer, step and place in the data, all or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from monolith.state.locks import in_use
from monolith.state.optimizer_state import OptimizerPlan
from monolith.state.paths import base_name
from monolith.state.restore import prepare_tables
from monolith.state.restore_points import RestorePoint, find_restore_point, restore_points
from monolith.table.store import RestoreChoices
from monolith.train.restore_choice import RestoreChoice, choose_restore_point, cleared_before

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["recover_servers", "restore_chosen", "warm_start"]

_log = logging.getLogger(__name__)


def restore_chosen(trainer: Trainer, *, training: bool) -> tuple[RestoreChoice | None, int]:
    """Bring `trainer` to the moment its configuration says; which it was, and the sequence number its own log continues.

    The number is 0 if the log continues nothing. On an error nothing has changed.
    """
    choice = choose_restore_point(trainer.config, training=training)
    while choice is not None:
        # Only training sends servers back, which others may be using.
        goes_back = training and choice.went_back
        if training and not goes_back:
            _require_no_loss(trainer, choice.point)
        try:
            return choice, _restore(trainer, choice, only_fresh=not goes_back)
        except (CorruptFileError, LogGapError, StorageError):
            # Who only reads may find that training has removed what was chosen, and written something newer.
            newer = choose_restore_point(trainer.config, training=training)
            if newer == choice:
                raise
            choice = newer
    return None, 0


def warm_start(trainer: Trainer, model_dir: str) -> None:
    """Give `trainer` the weights and rows of another run's newest moment, and nothing else of it."""
    if not restore_points(model_dir):
        raise InvalidArgumentError(
            f"RunConfig.warm_start_from: expected the model_dir of a saved run, got {model_dir!r}"
        )
    _, dense, _, put_in_place = _read(trainer, find_restore_point(model_dir), rows_only=True, only_fresh=True)
    put_in_place()
    trainer.model.load_state_dict(dict(dense.values))
    trainer.dense.install(OptimizerPlan(), only_fresh=True)
    for collection in embedding_collections(trainer.model):
        collection.steps.zero_()


def recover_servers(trainer: Trainer) -> None:
    """Restore the servers that do not hold a state worth keeping, if there is a checkpoint, and say that all of them do now.

    A run calls it whenever it begins: a server may have lost its state while the rest of the run has kept its own.

    Raises:
        ServerLostError: a server has lost what was trained on it, and `trainer.accepts_lost_servers` is False.
    """
    stores = trainer.remote_stores
    if not all(store.is_initialised() for store in stores):
        choice = choose_restore_point(trainer.config, training=True)
        _require_no_loss(trainer, None if choice is None else choice.point)
        if choice is not None:
            _begin_remote(trainer, choice.point, only_fresh=True)()
    for store in stores:
        store.mark_initialised()


def _require_no_loss(trainer: Trainer, point: RestorePoint | None) -> None:
    name = "" if point is None else base_name(str(point.checkpoint))
    trained = trainer.step > (0 if point is None else point.step)
    lost = [address for store in trainer.stores for address in store.lost(name, trained=trained)]
    if not lost:
        return
    instead = "begin empty" if point is None else f"go back to step {point.step} of {point.checkpoint}"
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
    """Everything of `point`, checked against the model; the last answer puts its rows into the tables.

    With `only_fresh`, servers that hold a state worth keeping are left alone. With `rows_only` servers read no dense parameters:
    they get those of the model, without the state of an optimizer.
    """
    config = trainer.config
    with in_use(point.checkpoint or point.model_dir):
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
            # Both at once: new dense parameters alone do not help if tables do not fit.
            raise CheckpointMismatchError(f"{error}{dense.also()}") from None
        dense.require(point.checkpoint or point.model_dir, cleared=cleared_before(config))
        put_remote = _begin_remote(trainer, point, only_fresh=only_fresh, rows_only=clear_nn or rows_only)

    def put_in_place() -> None:
        # The servers first: if one of them is gone, nothing here has changed.
        put_remote()
        put_local()

    return state, dense, local, put_in_place


def _with_slots_of_servers(point: RestorePoint, state: dict[str, Any]) -> dict[str, Any]:
    """`state` with the slots of the dense optimizer that servers have saved in their parts of the checkpoint."""
    model, optimizer = state.get("model"), state.get("optimizer")
    if not isinstance(model, dict) or not isinstance(optimizer, dict) or not optimizer.get("on_servers"):
        return state
    held: dict[str, dict[str, Any]] = {}
    home = point.home
    for path in home.home_of(point.checkpoint).parts(base_name(point.checkpoint)) if point.checkpoint else ():
        parameters: Any = home.home_of(path).state(base_name(path)).get("parameters", {})
        for name, saved in parameters.items():
            # Of two copies the one counts that workers were training.
            if name not in held or saved["declared"]:
                held[name] = saved
    slots = {name: one["optimizer"][0] for name, one in held.items() if name in model and 0 in one["optimizer"]}
    return {**state, "optimizer": {**optimizer, "state": {**optimizer["state"], **slots}}}


def _begin_remote(
    trainer: Trainer, point: RestorePoint, *, only_fresh: bool, rows_only: bool = False
) -> Callable[[], None]:
    """Let those that hold rows elsewhere read them from `point`. Returns a function that puts them in place."""
    if point.checkpoint is None and trainer.remote_stores:
        raise InvalidArgumentError(f"{point.model_dir}: an entry of its log does not have the rows of servers")
    prepared = [
        store.begin_restore(str(point.checkpoint), only_fresh=only_fresh, rows_only=rows_only, **_choices(trainer))
        for store in trainer.remote_stores
    ]

    def put_in_place() -> None:
        for put in prepared:
            put()

    return put_in_place
