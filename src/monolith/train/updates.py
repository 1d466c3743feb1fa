"""How a trainer changes parameters: the dense optimizer with its scheduler and saved state, and gradients sent to stores."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from monolith.errors import InvalidArgumentError
from monolith.nn import embedding_collections
from monolith.process_bound import WorkerThreads
from monolith.ps.client.server_parameters import ServerOptimizer
from monolith.state.optimizer_state import (
    OptimizerPlan,
    declared_settings,
    optimizer_state,
    parameter_names,
    plan_optimizer,
    plan_scheduler,
    scheduler_state,
)
from monolith.state_bytes import State, pack_state, unpack_state
from monolith.table.bags import Gradient
from monolith.table.store import MAX_POSITION, Position, Store, WorkerProgress

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["DenseState", "ResumePoint", "SparsePush", "WorkerPositions", "decoded_position"]

_log = logging.getLogger(__name__)

_FORGOTTEN = (
    "optimizer: it has a scheduler that is not saved with it. Rates continue where they were, but the scheduler counts from its "
    "beginning, unless the script restores it; give it as scheduler= to Trainer or ModelCheckpoints"
)

_FROM_FIRST = (
    "scheduler: with several workers rates are those that the code's schedule has at the global step, as if the run had begun "
    "with it"
)
_SCHEDULED = ("lr", "momentum", "betas")
"""The hyperparameters that schedulers of torch change."""


class DenseState:
    """Knows what the code of a run has declared, so that a checkpoint never overrules it.

    Example:
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> model = nn.Linear(1, 1)
        >>> dense = DenseState(Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5)))
        >>> dense.state()["optimizer"]["groups"][0]["declared"]["lr"]
        0.5
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._followed = 0
        self._is_declared = False
        self._take()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that the code has made, even if servers run its steps."""
        return self._trainer.optimizer if self.served is None else self.served.local

    @property
    def served(self) -> ServerOptimizer | None:
        """The optimizer, if servers run its steps."""
        optimizer = self._trainer.optimizer
        return optimizer if isinstance(optimizer, ServerOptimizer) else None

    @property
    def declared(self) -> list[dict[str, Any]]:
        """The hyperparameters of each parameter group as the code declares them."""
        return self._declared

    def declare(self) -> None:
        """Record the current hyperparameters as those that the code declares. Only the first call does."""
        if self._is_declared:
            return
        self._is_declared = True
        self._take()
        known = parameter_names(self._trainer.model)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        missing = sum(id(parameter) not in known for group in groups for parameter in group["params"])
        if missing and self._trainer.config.model_dir is not None:
            _log.warning(
                "optimizer: %d of its parameters are not in the model: their values are not saved, and their optimizer state is "
                "restored by position; make them part of the model",
                missing,
            )

    def _take(self) -> None:
        optimizer, scheduler = self.optimizer, self._trainer.scheduler
        self._declared = [] if optimizer is None else declared_settings(optimizer)
        self._declared_schedule = {} if scheduler is None else deepcopy(scheduler.state_dict())

    def state(self) -> dict[str, Any]:
        """Return the parts of a checkpoint's state: `optimizer` and, if there is one, `scheduler`."""
        optimizer, scheduler = self.optimizer, self._trainer.scheduler
        if optimizer is None:
            return {"optimizer": None}
        saved = optimizer_state(optimizer, parameter_names(self._trainer.model), self._declared)
        # Slots that are on servers are in the parts that the servers save.
        saved["on_servers"] = self.served is not None
        if scheduler is None:
            return {"optimizer": saved}
        schedule = scheduler_state(scheduler, self._declared_schedule)
        return {"optimizer": saved, "scheduler": {**schedule, "step": self._followed}}

    def plan(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> OptimizerPlan:
        """Plan how `state` is restored into optimizer and scheduler. Changes nothing.

        Args:
            state: that of a whole trainer.
            renamed: for parameters that have another name now, the saved name by the new one.
        """
        optimizer, scheduler = self.optimizer, self._trainer.scheduler
        saved = state.get("optimizer")
        if optimizer is None or saved is None:
            return OptimizerPlan(changes=_one_sided(optimizer, saved))
        plan = plan_optimizer(optimizer, saved, parameter_names(self._trainer.model), self._declared, renamed=renamed)
        if scheduler is None:
            forgotten = any("initial_lr" in group for group in optimizer.param_groups) and bool(state.get("step"))
            return replace(plan, changes=(*plan.changes, *([_FORGOTTEN] if forgotten else [])))
        schedule = plan_scheduler(scheduler, state.get("scheduler"), self._declared_schedule)

        # Workers without a checkpoint compute their rates from the first step: those of the chief must be the same.
        from_first = self._trainer.num_workers > 1 and bool(schedule.changes)

        def apply() -> None:
            built = [{key: group[key] for key in _SCHEDULED if key in group} for group in optimizer.param_groups]
            plan.apply()
            if from_first:
                for group, settings in zip(optimizer.param_groups, built, strict=True):
                    group.update(settings)
                return
            schedule.apply()
            # Also if the scheduler starts from its beginning: it has not missed the steps until now.
            self._followed = int((state.get("scheduler") or state)["step"])

        return OptimizerPlan(
            notes=(*plan.notes, *schedule.notes),
            changes=(*plan.changes, *schedule.changes, *([_FROM_FIRST] if from_first else [])),
            problems=plan.problems,
            slots=plan.slots,
            apply=apply,
        )

    def install(self, plan: OptimizerPlan, *, only_fresh: bool) -> None:
        """Continue on the servers from the values that the model has and from the slots of `plan`.

        With `only_fresh`, parameters that have been trained on the servers are left as they are.
        """
        if self.served is not None and not (only_fresh and self.served.origin.have_changed()):
            names = parameter_names(self._trainer.model)
            self.served.install({key: plan.slots[own[0]] for key, own in names.items() if own[0] in plan.slots})

    def follow(self, step: int) -> None:
        """Advance the scheduler to the global step `step`, which other workers may have moved too."""
        scheduler, step = self._trainer.scheduler, self._trainer.config.schedule_step(step)
        if scheduler is None or step <= self._followed:
            return
        # Where torch looks whether the optimizer comes before its scheduler: the steps may be those of other workers.
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        if isinstance(scheduler, LambdaLR):
            # A function of the step alone: no need to go through those in between.
            scheduler.last_epoch += step - self._followed - 1
            self._followed = step - 1
        while self._followed < step:
            scheduler.step()
            self._followed += 1

    def start_at(self, step: int) -> None:
        """Let the scheduler begin at the global step `step`. With several workers it follows the global step from the first."""
        self._followed = 0 if self._trainer.num_workers > 1 else step


def _one_sided(optimizer: torch.optim.Optimizer | None, saved: object) -> tuple[str, ...]:
    if optimizer is not None:
        return ("optimizer: the checkpoint has none: it starts from nothing",)
    return ("optimizer: the code has none: that of the checkpoint is dropped",) if saved is not None else ()


_NO_TENSORS = save({})


@dataclass(frozen=True, kw_only=True)
class _Update:
    """The gradients of one step for one store."""

    store: Store
    gradients: Sequence[Gradient]
    step: int
    event_time: int
    position: Position | None


class SparsePush:
    """The sparse half of an update for all collections of a model.

    With `delayed`, the gradients of step n are applied by a background thread after the forward pass of step n + 1 and before
    its own gradients are known. Every lookup so misses exactly the step before it: the result does not depend on timing.
    After n steps n - 1 are applied, until `drain`. Learning rates of rows stay what they are at step `hold_at`.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> push = SparsePush(EmbeddingBagCollection([Feature(name="user", dim=2)]), delayed=True)
        >>> push.drain()
    """

    def __init__(self, model: nn.Module, *, delayed: bool, hold_at: int | None = None) -> None:
        self._hold_at = math.inf if hold_at is None else hold_at
        self._collections = embedding_collections(model)
        self.delayed = delayed
        """Whether gradients are applied one step late."""
        self._kept: list[_Update] = []
        self._thread: WorkerThreads | None = None
        self._running: Future[None] | None = None

    def push(self, step: int, event_time: int, position: Position | None = None) -> None:
        """Apply, or keep for later, what backward has collected. `position` tells servers which batch it is of."""
        taken: list[tuple[Store, Sequence[Gradient]]] = []
        together: dict[int, int] = {}
        for collection in self._collections:
            # A schedule is asked for the step the gradient belongs to, not for the one in which it is applied.
            store, gradients = (
                collection.store,
                collection.take_gradients(step if step < self._hold_at else int(self._hold_at)),
            )
            if store.remote and together.setdefault(id(store), len(taken)) < len(taken):
                # Collections of one remote store are joined: a batch is pushed there once.
                taken[together[id(store)]] = store, [*taken[together[id(store)]][1], *gradients]
            else:
                taken.append((store, gradients))
        if not self.delayed:
            for store, gradients in taken:
                store.apply(gradients, step=step, event_time=event_time, position=position)
            return
        self._kept = [
            _Update(store=store, gradients=gradients, step=step, event_time=event_time, position=position)
            for store, gradients in taken
        ]

    def start(self) -> None:
        """The forward pass is done: begin to apply what was kept."""
        if self._kept:
            if self._thread is None:
                self._thread = WorkerThreads(1, thread_name_prefix="monolith-sparse-push")
            self._running, self._kept = self._thread.submit(_apply, self._kept), []

    def finish(self) -> None:
        """Wait for what `start` began. Its error, if any, is raised here."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def settle(self) -> None:
        """Apply everything that is kept: the tables then agree with the number of steps made."""
        self.finish()
        kept, self._kept = self._kept, []
        _apply(kept)

    def drain(self) -> None:
        """Settle and stop the thread."""
        try:
            self.settle()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Forget what is kept and stop the thread."""
        self._kept, self._running = [], None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _apply(updates: list[_Update]) -> None:
    for update in updates:
        update.store.apply(update.gradients, step=update.step, event_time=update.event_time, position=update.position)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a worker continues."""

    batches: int
    """Batches trained before."""
    state: State
    """State of its source. None: at the beginning."""
    epochs: int = 0
    """Complete passes over the data."""
    started: int = 0
    """Batches after them that some servers have had and others may not have had."""
    ahead: tuple[Position, ...] = ()
    """Batches that some servers have had and others have not, rising. A source that cuts its batches by time repeats them."""


class WorkerPositions:
    """Counts the batches of a worker and reports them to the servers, if a store records positions.

    When a worker dies, some buckets have applied its last batches and others have not. Its successor, of the same name, begins
    after the last batch that all buckets and dense parameters have applied. Servers skip a batch that they have applied.

    Example:
        >>> positions = WorkerPositions()
        >>> positions.begin([])
        >>> positions.tell({"file": 2}) is None
        True
    """

    def __init__(self) -> None:
        self.batches = 0
        """Batches trained in all incarnations of the worker."""
        self._stores: list[Store] = []
        self._resume = True
        self._current: Position | None = None
        self._warned = False

    @property
    def active(self) -> bool:
        """Whether positions are reported to servers at all."""
        return bool(self._stores)

    def begin(
        self, stores: Sequence[Store], *, resume: bool = True, join: Callable[[list[State]], State] | None = None
    ) -> ResumePoint | None:
        """Count batches on the servers of `stores` from now on. Returns where an earlier incarnation stopped, if there was one.

        With `join`, of a source whose positions can be joined, a worker without one takes what belongs to it from those of
        another number of workers.

        Without `resume` the data is not that of the earlier one, or cannot go back: its batches are counted behind the last one
        that any server has.
        """
        self._current, self._resume = None, resume
        known = [(store, progress) for store in stores if (progress := store.progress()) is not None]
        self._stores = [store for store, _ in known]
        behind = [progress.behind for _, progress in known if progress.behind is not None]
        last_batch = max((progress.last_batch for _, progress in known), default=0)
        if not resume:
            self.batches = last_batch
            epochs = min((position.epochs for position in behind), default=0)
            return ResumePoint(batches=self.batches, state=None, epochs=epochs) if behind else None
        if join is not None and (joined := _joined_share([progress for _, progress in known], join)) is not None:
            self.batches = 0
            return joined
        if not behind:
            if not last_batch:
                # The count of a checkpoint is that of the worker that wrote it, which may have been another one.
                self.batches = 0
            return None
        last = min(behind, key=lambda position: position.batches)
        if last.state is None and last.batches and not last.ended:
            _log.warning("the source of this worker has no position to resume from: its data starts from the beginning")
            return None
        state = None if last.state is None else decoded_position(last.state)
        ahead = {
            one.batches: one for _, progress in known for one in (progress.behind, *progress.ahead) if one is not None
        }
        return ResumePoint(
            batches=last.batches,
            state=state,
            epochs=last.epochs,
            started=max(0, last_batch - last.batches),
            ahead=tuple(ahead[batch] for batch in sorted(ahead) if batch > last.batches),
        )

    def tell(self, state: State, epochs: int = 0) -> Position | None:
        """The position of the batch that is trained now: the state of its source behind it, and the passes before this one."""
        self._current = None
        if self.active:
            self.batches += 1
            text = _encoded(state)
            if text is None and self._resume and not self._warned:
                self._warned = True
                _log.warning(
                    "the source cannot tell servers its place: it has none, or one with tensors or of more than %d characters, "
                    "as a large shuffle buffer has. A successor of this worker reads its data from the beginning",
                    MAX_POSITION,
                )
            self._current = Position(batches=self.batches, state=text, epochs=epochs)
            if not self._resume:
                # Data that cannot be resumed ends with every batch: a successor counts on, and takes what comes.
                self._current = Position(batches=self.batches, ended=True, epochs=epochs)
        return self._current

    def tell_start(self, state: State) -> None:
        """Let the servers know where this worker begins: it may have no record for long, and another number of workers needs the
        positions of all."""
        text = _encoded(state)
        if self.active and text is not None:
            for store in self._stores:
                store.apply([], position=Position(batches=0, state=text))

    def repeat(self, position: Position) -> Position:
        """Return `position` as that of the batch that is trained now, which an earlier incarnation did not finish."""
        self.batches = position.batches
        self._current = Position(batches=position.batches, state=position.state, epochs=position.epochs)
        return self._current

    def skip(self, position: Position) -> None:
        """Let the servers that have not had the batch of `position` count it: nothing is left of it to train."""
        for store in self._stores:
            store.apply([], position=self.repeat(position))

    def tell_end(self, epochs: int = 1) -> None:
        """The data has ended after `epochs` passes: a successor that is to make as many has nothing left to do."""
        if self.active and self._current is not None:
            ended = self._current.model_copy(update={"ended": True, "state": None, "epochs": epochs})
            for store in self._stores:
                store.apply([], position=ended)
            # Told once: a later run of the trainer may be over other stores, and these closed.
            self._current = None


_NAME = re.compile(r"worker-(\d+)-of-(\d+)")


def _joined_share(known: Sequence[WorkerProgress], join: Callable[[list[State]], State]) -> ResumePoint | None:
    """Return where a worker begins that continues the run of another number of workers. None if it does not."""
    name = _NAME.fullmatch(known[0].worker) if known else None
    if name is None:
        return None
    groups: dict[int, dict[int, list[tuple[int, Position]]]] = {}
    for worker, positions in [pair for progress in known for pair in progress.everyone().items()]:
        if positions and (found := _NAME.fullmatch(worker)) is not None:
            groups.setdefault(int(found[2]), {}).setdefault(int(found[1]), []).extend(positions)
    index, count = int(name[1]), int(name[2])
    own = max((epoch for epoch, _ in groups.get(count, {}).get(index, ())), default=-1)
    newest = {
        many: max(epoch for positions in group.values() for epoch, _ in positions)
        for many, group in groups.items()
        if many != count
    }
    if not newest or max(newest.values()) < own:
        return None
    many = max(newest, key=newest.__getitem__)
    if own >= 0:
        raise InvalidArgumentError(
            f"worker {index} of {count} has trained this stream before, and {many} workers have since: its position is out of "
            f"date. Continue with {many} workers, or with a number that was not used before"
        )
    return ResumePoint(batches=0, state=join([_whole(groups[many].get(n, ()), n, many) for n in range(many)]))


def _whole(positions: Sequence[tuple[int, Position]], index: int, count: int) -> State:
    """Return the state of a worker that has ended in order."""
    batches = {position.batches for _, position in positions}
    state = next((position.state for _, position in positions if position.state is not None), None)
    if len(batches) == 1 and state is not None:
        return decoded_position(state)
    why = "was interrupted within a batch" if len(batches) > 1 else "has reported no position"
    raise InvalidArgumentError(
        f"worker {index} of {count} {why}, so no other number of workers can continue. Start the job with {count} workers, and "
        "end it in order (`monolith control end`, or a signal) before you change their number"
    )


def _encoded(state: State) -> str | None:
    """The state of a source as text. None if it has none, or one that is too large or no JSON."""
    if state is None:
        return None
    try:
        packed = pack_state(state)
    except InvalidArgumentError:
        return None
    text = packed.structure.decode()
    return None if packed.tensors or len(text) > MAX_POSITION else text


def decoded_position(text: str) -> State:
    """Return the state of a source from a position on servers.

    Example:
        >>> decoded_position(_encoded({"file": 2}))
        {'file': 2}
    """
    return unpack_state(text.encode(), _NO_TENSORS, "the position of a worker")
