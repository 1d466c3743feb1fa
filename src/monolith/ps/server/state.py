"""Everything a parameter server holds, taken at one moment and given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from monolith.errors import ConfigError, CorruptFileError
from monolith.ps.protocol.messages import DeclareTables
from monolith.ps.server.coordination import Coordination
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
    """Something else that a server must not forget."""

    def state(self) -> State:
        """What it is now; called while nobody changes anything."""

    def load_state(self, state: State) -> None:
        """Be what `state` returned."""


class ServerState:
    """Tables, dense parameters, the ledger of pushes, and whether it counts: what a log and a checkpoint of a server have.

    Rows are cut by the log; `state` has all the rest, in the form of a checkpoint's state: `parameters`, and as the place in the
    data, `source`, what the rows belong to.

    Example:
        >>> state = ServerState()
        >>> sorted(state.state()["source"])
        ['checkpoint', 'initialised', 'ledger', 'parts', 'step', 'tables']
    """

    def __init__(self, *, memory_limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.gate = ChangeGate()
        """Everything that changes something passes it."""
        self.memory = memory = MemoryLimit(memory_limit)
        """What all of it takes, and may take."""
        self.tables = ServedTables(memory)
        self.dense = DenseParameters(require_room=memory.require_room)
        self.pushes: PushLedger[Answer] = PushLedger(gate=self.gate, require_room=memory.require_room)
        self.coordination = Coordination(step=self.pushes.step, clock=clock, require_room=memory.require_room)
        """What workers know in common. It is kept apart from the log, because every change is durable at once."""
        for what, held in (
            ("tables", self.tables),
            ("dense parameters", self.dense),
            ("workers", self.pushes),
            ("coordination", self.coordination),
        ):
            memory.count(what, partial(getattr, held, "nbytes"))
        self.initialised = False
        """Whether it has been given a state that is worth keeping."""
        self.checkpoint: str | None = ""
        """Name of the checkpoint that it was saved in or restored from last, "" while it is new. None once gradients were pushed
        since: they are in no checkpoint."""
        self.step = 0
        """The newest global step that a worker has pushed."""
        self.parts: dict[str, StatePart] = {}
        """What else must survive, by name."""
        self.ranges: Callable[[], Sequence[range] | None] = lambda: None
        """The buckets it owns now; None: it was never told."""
        self.moving: Callable[[], bool] = lambda: False
        """Whether rows or dense parameters are on their way to another server."""
        self.moving_dense: Callable[[], tuple[str, ...]] = lambda: ()
        """Dense parameters that are on their way to another server."""
        self.gave_dense: Callable[[], tuple[str, ...]] = lambda: ()
        """Dense parameters that others hold."""

    def state(self) -> dict[str, State]:
        """All but the rows; while the gate is closed."""
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
        """Make the tables that a saved state had, empty."""
        try:
            self.tables.declare(DeclareTables.from_json(str(source_of(state, where).get("tables"))).tables)
        except ConfigError as error:
            raise CorruptFileError(f"{where}: its tables cannot be read: {error}") from None

    def load_state(self, state: Mapping[str, State], where: str) -> None:
        """Take over all but the rows of a saved state of this server; before the first call."""
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


def source_of(state: Mapping[str, State], where: str) -> dict[str, State]:
    """The part of a saved state that says what the rows belong to."""
    source = state.get("source")
    if not isinstance(source, dict):
        raise CorruptFileError(f"{where}: expected the state of a parameter server")
    return source
