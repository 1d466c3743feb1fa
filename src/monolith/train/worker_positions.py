"""Where a worker is in its data, told to the servers with every push: a successor goes on there and no batch counts twice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from safetensors.torch import save

from monolith.errors import InvalidArgumentError
from monolith.state_bytes import State, pack_state, unpack_state
from monolith.table.store import MAX_POSITION, Position, Store

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
        self._stores: list[Store] = []
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
        known = [(store, progress) for store in stores if (progress := store.progress()) is not None]
        self._stores = [store for store, _ in known]
        behind = [progress.behind for _, progress in known if progress.behind is not None]
        last_batch = max((progress.last_batch for _, progress in known), default=0)
        if not resume:
            self.batches = last_batch
            epochs = min((position.epochs for position in behind), default=0)
            return Place(batches=self.batches, state=None, epochs=epochs) if behind else None
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
