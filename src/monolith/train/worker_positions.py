"""Where a worker is in its data, told to the servers with every push: a successor goes on there and no batch counts twice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from safetensors.torch import save

from monolith.errors import InvalidArgumentError
from monolith.ps.client.server_group import ServerGroup
from monolith.ps.messages import MAX_POSITION, HeldPosition, Position
from monolith.state_bytes import State, pack_state, unpack_state
from monolith.table.store import Store
from monolith.train.served_stores import served_stores

__all__ = ["Place", "WorkerPositions"]

_log = logging.getLogger(__name__)
_NO_TENSORS = save({})


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker goes on."""

    batches: int
    """Batches trained before."""
    state: State
    """Of its source; None: at the beginning."""
    epochs: int = 0
    """Complete passes over the data."""


class WorkerPositions:
    """Counts the batches of a worker and tells the servers; does nothing unless a store is on servers and names its worker.

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
        """Batches trained in all lives of the worker."""
        self._stores: list[ServerGroup] = []
        self._resume = True
        self._current: Position | None = None
        self._warned = False

    @property
    def active(self) -> bool:
        """Whether servers are told at all."""
        return bool(self._stores)

    def begin(self, stores: Sequence[Store], *, resume: bool = True) -> Place | None:
        """Count batches on the servers of `stores` from now on. Returns where an earlier incarnation stopped, if there was one.

        Without `resume` the data is not that of the earlier one, or cannot go back: its batches are counted behind the last one
        that any server has.
        """
        self._current, self._resume = None, resume
        self._stores = [store for store in served_stores(stores) if store.config.worker is not None]
        behind = [found for store in self._stores if (found := _furthest_behind(store)) is not None]
        if not resume:
            self.batches = max([0, *(_last_batch(store) for store in self._stores)])
            epochs = min((position.epochs for position in behind), default=0)
            return Place(batches=self.batches, state=None, epochs=epochs) if behind else None
        if not behind:
            if not any(map(_last_batch, self._stores)):
                # The count of a checkpoint is that of the worker that wrote it, which may have been another one.
                self.batches = 0
            return None
        last = min(behind, key=lambda position: position.batches)
        if last.state is None and last.batches and not last.ended:
            _log.warning(
                "the source of worker %s could not tell its place; its data begins anew", self._stores[0].worker
            )
            return None
        state = None if last.state is None else _decoded(last.state)
        return Place(batches=last.batches, state=state, epochs=last.epochs)

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
                store.apply([], position=ended)  # type: ignore[attr-defined]
            # Told once: a later run of the trainer may be over other stores, and these closed.
            self._current = None


def _furthest_behind(store: ServerGroup) -> HeldPosition | None:
    """The position of whatever has had the fewest batches. None in the first epoch, and in one that has pushed already."""
    buckets, parameters = store.positions()
    found = [*buckets, *parameters]
    if not any(position.batches for position in found) or any(position.epoch == store.epoch for position in found):
        return None
    # Only pushes to tables say that the data ended, so of a batch that everything has had the buckets know more.
    last = [min(buckets, key=lambda position: (position.batches, position.ended))] if buckets else []
    return min([*last, *parameters], key=lambda position: position.batches)


def _last_batch(store: ServerGroup) -> int:
    """The last batch of this worker that any server has."""
    buckets, parameters = store.positions()
    return max([0, *(position.batches for position in (*buckets, *parameters))])


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
