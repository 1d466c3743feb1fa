"""When sparse gradients reach their tables: at the end of the step, or one step late beside the next backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import nn

from monolith.nn import embedding_collections
from monolith.process_bound import WorkerThreads
from monolith.table.bags import Gradient
from monolith.table.store import Position, Store

__all__ = ["SparsePush"]


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
        """Apply, or keep for later, what backward has collected; `position` says to servers which batch it is of."""
        # A schedule is asked for the step the gradient belongs to, not for the one in which it is applied.
        taken = [
            _Update(store=store, gradients=gradients, step=step, event_time=event_time, position=position)
            for store, gradients in self._taken(step)
        ]
        if self._delayed:
            self._kept = taken
        else:
            _apply(taken)

    def _taken(self, step: int) -> list[tuple[Store, Sequence[Gradient]]]:
        """Take what each collection has. Collections of one remote store are joined: a batch is pushed there once."""
        taken: list[tuple[Store, Sequence[Gradient]]] = []
        together: dict[int, list[Gradient]] = {}
        for collection in self._collections:
            key, gradients = id(collection.store), collection.take_gradients(step)
            if key in together:
                together[key].extend(gradients)
                continue
            if collection.store.remote:
                gradients = together[key] = list(gradients)
            taken.append((collection.store, gradients))
        return taken

    def start(self) -> None:
        """The forward pass is done: begin to apply what was kept."""
        if self._kept:
            if self._thread is None:
                self._thread = WorkerThreads(1, thread_name_prefix="monolith-sparse-push")
            self._running, self._kept = self._thread.submit(_apply, self._kept), []

    def finish(self) -> None:
        """Wait for what `start` began; its error, if any, is raised here."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def settle(self) -> None:
        """Apply everything that is kept: the tables then agree with the number of steps made."""
        self.finish()
        kept, self._kept = self._kept, []
        _apply(kept)

    def drain(self) -> None:
        """Settle and let the thread go."""
        try:
            self.settle()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None


def _apply(updates: list[_Update]) -> None:
    for update in updates:
        update.store.apply(update.gradients, step=update.step, event_time=update.event_time, position=update.position)
