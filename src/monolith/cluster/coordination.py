"""`Coordination`: the shared state of the workers of a run: which are alive, barriers, and the global step.

There are two implementations. `monolith.ps.client.coordination_client` keeps it on the parameter servers, and
`monolith.cluster.zookeeper_coordination` in ZooKeeper.
"""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from pydantic import Field

from monolith.config import Config

__all__ = ["Barrier", "Coordination", "Member", "Members", "Phase", "Seen", "StepCounter"]

Phase = Literal["joined", "running", "finished"]
"""The state of a worker. The chief is running once it has restored, the others from the moment they wait for that."""

_Whole = Annotated[int, Field(ge=0, lt=2**63)]


class Barrier(Config):
    """Holds every worker that reaches it until it is removed."""

    number: _Whole
    """Distinguishes it from earlier barriers."""
    action: str
    """What the workers are held for."""


class Member(Config):
    """A worker of the run."""

    index: Annotated[int, Field(ge=0, lt=65536)]
    """Number of the worker. 0 is the chief."""
    epoch: _Whole
    """Which incarnation of the worker it is. From the moment a larger one is seen, smaller ones are refused."""
    phase: Phase
    alive: bool
    """Whether it was heard from within its lease."""
    held: bool
    """Whether it waits behind the current barrier."""


class Members(Config):
    """All workers that have joined the run, by index, and what they have in common."""

    members: tuple[Member, ...]
    step: _Whole
    """The global step: batches of all workers, each counted once."""
    barrier: Barrier | None


class Seen(Config):
    """What a worker learns after a step."""

    step: _Whole
    """The global step."""
    barrier: Barrier | None = None


class StepCounter(Protocol):
    """The global step, for a `Coordination` that does not know it itself."""

    def now(self) -> int:
        """Return the global step."""

    def report(self) -> int:
        """Request it without waiting for the answer. Returns the answer of the previous call."""

    def close(self) -> None:
        """Close the connections."""


class Coordination(Protocol):
    """The run as one of its workers sees it. The worker is a member as long as the object is open.

    Any thread may call.

    Raises:
        StalePushError: a newer incarnation of this worker has joined. This process should end.
        ServerError: the parameter servers or ZooKeeper cannot be reached.
    """

    @property
    def index(self) -> int:
        """The number of this worker."""

    def enter(self, phase: Phase) -> None:
        """Report the phase of this worker. It outlives the process: a worker that has finished is never waited for."""

    def members(self) -> Members:
        """Ask for all workers, the global step and the barrier."""

    def report(self) -> Seen:
        """Ask for the global step and the barrier without waiting for the answer. Returns that of the report before."""

    def newest(self) -> Seen:
        """Return what the last `report` returned. Without a report since the last call of this method, it is asked for."""

    def place_barrier(self, action: str) -> tuple[bool, Barrier]:
        """Hold the other workers. Returns whether this call placed the barrier, and the current barrier.

        A barrier is removed when the worker that placed it dies.
        """

    def remove_barrier(self) -> None:
        """Let the other workers continue."""

    def hold(self, number: int) -> bool:
        """Wait behind barrier `number`. Returns whether the barrier is still there. If so, call again."""

    def end_run(self) -> None:
        """In the chief, after a success: forget all workers, so that none counts as finished in the next run."""

    def stay(self, seconds: float) -> None:
        """Remain a member for `seconds` after `close`: this worker has failed and is about to retry."""

    def close(self) -> None:
        """Leave the run: stop renewing the lease."""
