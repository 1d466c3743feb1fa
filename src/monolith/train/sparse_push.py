"""What a step sends to its stores: gradients, now or one step late, and the position in the data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from safetensors.torch import save
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn import embedding_collections
from monolith.process_bound import WorkerThreads
from monolith.state_bytes import State, pack_state, unpack_state
from monolith.table.bags import Gradient
from monolith.table.store import MAX_POSITION, Position, Store

__all__ = ["ResumePoint", "SparsePush", "WorkerPositions"]

_log = logging.getLogger(__name__)
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
    After n steps n - 1 are applied, until `drain`.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> push = SparsePush(EmbeddingBagCollection([Feature(name="user", dim=2)]), delayed=True)
        >>> push.drain()
    """

    def __init__(self, model: nn.Module, *, delayed: bool) -> None:
        self._collections = embedding_collections(model)
        self._delayed = delayed
        self._kept: list[_Update] = []
        self._thread: WorkerThreads | None = None
        self._running: Future[None] | None = None

    def push(self, step: int, event_time: int, position: Position | None = None) -> None:
        """Apply, or keep for later, what backward has collected. `position` tells servers which batch it is of."""
        taken: list[tuple[Store, Sequence[Gradient]]] = []
        together: dict[int, list[Gradient]] = {}
        for collection in self._collections:
            # A schedule is asked for the step the gradient belongs to, not for the one in which it is applied.
            key, gradients = id(collection.store), collection.take_gradients(step)
            if key in together:
                # Collections of one remote store are joined: a batch is pushed there once.
                together[key].extend(gradients)
                continue
            if collection.store.remote:
                gradients = together[key] = list(gradients)
            taken.append((collection.store, gradients))
        if not self._delayed:
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


class WorkerPositions:
    """Counts the batches of a worker and reports them to the servers, if a store records positions.

    When a worker dies, some buckets have had its last batches and others have not. Its successor, of the same name, begins after
    the last batch that all buckets and dense parameters have had. Those that have had more are left out by the servers.

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

    def begin(self, stores: Sequence[Store], *, resume: bool = True) -> ResumePoint | None:
        """Count batches on the servers of `stores` from now on. Returns where an earlier incarnation stopped, if there was one.

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
        if not behind:
            if not last_batch:
                # The count of a checkpoint is that of the worker that wrote it, which may have been another one.
                self.batches = 0
            return None
        last = min(behind, key=lambda position: position.batches)
        if last.state is None and last.batches and not last.ended:
            _log.warning("the source of this worker has no position to resume from: its data starts from the beginning")
            return None
        state = None if last.state is None else _decoded(last.state)
        return ResumePoint(batches=last.batches, state=state, epochs=last.epochs)

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

    def tell_end(self, epochs: int = 1) -> None:
        """The data has ended after `epochs` passes: a successor that is to make as many has nothing left to do."""
        if self.active and self._current is not None:
            ended = self._current.model_copy(update={"ended": True, "state": None, "epochs": epochs})
            for store in self._stores:
                store.apply([], position=ended)
            # Told once: a later run of the trainer may be over other stores, and these closed.
            self._current = None


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


def _decoded(text: str) -> State:
    return unpack_state(text.encode(), _NO_TENSORS, "the position of a worker")
