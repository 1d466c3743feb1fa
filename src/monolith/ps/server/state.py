"""`ServerState`: everything that a parameter server holds, saved and restored as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from monolith.errors import ConfigError, CorruptFileError
from monolith.ps.protocol.messages import DeclareTables
from monolith.ps.server.coordination import ServerCoordination
from monolith.ps.server.dense_parameters import DenseParameters
from monolith.ps.server.gate import ChangeGate
from monolith.ps.server.ledger_state import ledger_text, load_ledger
from monolith.ps.server.memory_limit import MemoryLimit
from monolith.ps.server.pushes import PushLedger
from monolith.ps.server.served_tables import ServedTables
from monolith.state_bytes import State
from monolith.transport.calls import Answer

__all__ = ["ServerState", "StatePart"]


class StatePart(Protocol):
    """Another part of the state of a server."""

    def state(self) -> State:
        """Return its state. Called while the gate is closed."""

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""


class ServerState:
    """Tables, dense parameters, the ledger of pushes: all that the log and the checkpoints of a server hold.

    The log cuts the rows. `state` returns the rest in the form of a checkpoint's state: `parameters`, and as `source` what the
    rows belong to.

    Example:
        >>> state = ServerState()
        >>> sorted(state.state()["source"])
        ['checkpoint', 'initialised', 'ledger', 'parts', 'step', 'tables']
    """

    def __init__(self, *, memory_limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.gate = ChangeGate()
        """Every change passes it."""
        self.memory = memory = MemoryLimit(memory_limit)
        """Memory in use, and its limit."""
        self.tables = ServedTables(memory)
        self.dense = DenseParameters(require_memory=memory.require_memory)
        self.pushes: PushLedger[Answer] = PushLedger(gate=self.gate, require_memory=memory.require_memory)
        self.coordination = ServerCoordination(step=self.pushes.step, clock=clock, require_memory=memory.require_memory)
        """Members, barriers and keys of the run. Kept apart from the log, because every change is durable at once."""
        for what, held in (
            ("tables", self.tables),
            ("dense parameters", self.dense),
            ("workers", self.pushes),
            ("coordination", self.coordination),
        ):
            memory.count(what, partial(getattr, held, "nbytes"))
        self.initialised = False
        """Whether it holds trained or restored state, which must not be replaced by a restart."""
        self.checkpoint: str | None = ""
        """Name of the checkpoint that it was saved in or restored from last, "" while it is new. None once gradients were pushed
        since: they are in no checkpoint."""
        self.step = 0
        """The newest global step that a worker has pushed."""
        self.parts: dict[str, StatePart] = {}
        """Other parts of the state, by name."""
        self.ranges: Callable[[], Sequence[range] | None] = lambda: None
        """Returns the owned buckets. None if it was never given any."""
        self.moving: Callable[[], bool] = lambda: False
        """Returns whether rows or dense parameters are in transit to another server."""
        self.moving_dense: Callable[[], tuple[str, ...]] = lambda: ()
        """Returns the dense parameters that are in transit to another server."""
        self.gave_dense: Callable[[], tuple[str, ...]] = lambda: ()
        """Returns the dense parameters that were moved to other servers."""

    def state(self) -> dict[str, State]:
        """Return everything but the rows. Called while the gate is closed."""
        return {
            "parameters": self.dense.state(),
            "source": {
                "tables": DeclareTables(tables=tuple(self.tables.declared())).model_dump_json(),
                "ledger": ledger_text(self.pushes),
                "initialised": self.initialised,
                "checkpoint": self.checkpoint,
                "step": self.step,
                "parts": {name: part.state() for name, part in self.parts.items()},
            },
        }

    def declare_saved(self, state: Mapping[str, State], where: str) -> None:
        """Create the tables of a saved state, without rows."""
        try:
            self.tables.declare(DeclareTables.from_json(str(source_of(state, where).get("tables"))).tables)
        except ConfigError as error:
            raise CorruptFileError(f"{where}: its tables cannot be read: {error}") from None

    def load_state(self, state: Mapping[str, State], where: str) -> None:
        """Restore everything but the rows of a saved state. Called before the first request."""
        source, parameters = source_of(state, where), state.get("parameters")
        parts, step = source.get("parts"), source.get("step")
        if not isinstance(parameters, dict) or not isinstance(parts, dict) or not isinstance(step, int):
            raise CorruptFileError(f"{where}: expected the state of a parameter server")
        self.dense.load_state(parameters)
        load_ledger(self.pushes, str(source.get("ledger")), where)
        for name, part in self.parts.items():
            if name in parts:
                part.load_state(parts[name])
        self.initialised, self.step = source.get("initialised") is True, step
        checkpoint = source.get("checkpoint")
        self.checkpoint = checkpoint if isinstance(checkpoint, str) else None


def is_of_rank(state: Mapping[str, State]) -> bool:
    """Return whether a rank of a synchronous run has saved `state`, which then has nothing but rows."""
    source = state.get("source")
    return isinstance(source, dict) and "rank" in source


def source_of(state: Mapping[str, State], where: str) -> dict[str, State]:
    """Return the part of a saved state that describes what the rows belong to."""
    source = state.get("source")
    if not isinstance(source, dict):
        raise CorruptFileError(f"{where}: expected the state of a parameter server")
    return source
