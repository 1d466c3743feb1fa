"""`Supervisor`: when the processes of a job are started, started again, and ended. It knows neither processes nor time itself:
both are handed in, so that every rule here is tried without either.

    running ──── all workers ended well ─────────────────────┐
       │                                                     v
       └── a role failed, or stop was asked ──> workers end ──> servers end ──> over
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import Field

from monolith.cluster.launch.roles import Role, RoleKind
from monolith.config import Config

__all__ = ["Event", "EventKind", "Outcome", "RoleProcess", "RoleState", "RoleStatus", "Supervision", "Supervisor"]

_TERMINATED = -15  # the exit code of a process that ended by SIGTERM, before or without a handler of its own


class RoleProcess(Protocol):
    """A running role, wherever it runs."""

    pid: int | None
    """Its process id; None where it is not known yet."""
    restarted: int
    """How often whoever runs it has started it again by itself."""

    @property
    def last_lines(self) -> list[str]:
        """The end of what it has written."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def ask_to_end(self) -> None:
        """Let it end in order."""

    def kill(self) -> None:
        """End it at once, with everything it has started."""


class RoleState(StrEnum):
    """Where a role is in its life."""

    RUNNING = "running"
    WAITING = "waiting"
    """It failed, and is started again a little later."""
    ENDING = "ending"
    """It was asked to end."""
    ENDED = "ended"
    """It ended well, or because it was asked to."""
    FAILED = "failed"
    KILLED = "killed"
    """It did not end in time when asked."""


class EventKind(StrEnum):
    """What can happen to a role, or to the job."""

    STARTED = "started"
    RESTARTING = "restarting"
    RESTARTED = "restarted"
    """Whoever runs it has started it again by itself."""
    ENDED = "ended"
    FAILED = "failed"
    KILLED = "killed"
    STOPPING = "stopping"
    """The job ends before its workers have."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened."""

    kind: EventKind
    role: Role | None = None
    pid: int | None = None
    code: int | None = None
    restarts: int = 0
    delay: float | None = None
    reason: str | None = None


@dataclass
class RoleStatus:
    """A role as it is now; the supervisor alone changes it."""

    role: Role
    state: RoleState = RoleState.WAITING
    process: RoleProcess | None = None
    since: float = -math.inf
    """When it was started or, while it waits, when it will be."""
    restarts: int = 0
    restarts_of_process: int = 0
    """Those of `restarts` that were not the supervisor's doing, since it last started the role."""
    code: int | None = None
    asked_at: float | None = None

    @property
    def is_alive(self) -> bool:
        """Whether there is a process."""
        return self.state in (RoleState.RUNNING, RoleState.ENDING)


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    failed: Role | None = None
    """The first role that failed for good."""
    code: int | None = None
    """Its exit code."""
    stopped: str | None = None
    """Why the job was asked to stop, if it was."""

    @property
    def is_success(self) -> bool:
        """Whether every worker did its work."""
        return self.failed is None and self.stopped is None


class Supervision(Config):
    """How patient a supervisor is.

    Example:
        >>> Supervision(restarts=3).backoff(2)  # before the third start again
        4.0
    """

    restarts: Annotated[int, Field(ge=0)] = 0
    """How often each role is started again after it failed; then the job fails."""
    backoff_secs: Annotated[float, Field(ge=0)] = 1.0
    """The pause before the first start again; each further one is twice as long."""
    max_backoff_secs: Annotated[float, Field(ge=0)] = 30.0
    """No pause is longer."""
    grace_secs: Annotated[float, Field(ge=0)] = 30.0
    """Time between asking a role to end and ending it."""

    def backoff(self, restarts: int) -> float:
        """The pause before a role that was started again `restarts` times is so once more."""
        # Beyond 2**60 a float still counts seconds, and the power does not overflow.
        return min(self.max_backoff_secs, self.backoff_secs * 2.0 ** min(restarts, 60))


class Supervisor:
    """`step`, called again and again, looks at each role and does what is due, until it returns True; the first starts them.

    Example:
        >>> from monolith.testing.roles import ScriptedProcess
        >>> roles = [Role(RoleKind.PS, 0), Role(RoleKind.WORKER, 0)]
        >>> running = {role: ScriptedProcess() for role in roles}
        >>> supervisor = Supervisor(roles, running.__getitem__, clock=lambda: 0.0)
        >>> supervisor.step()
        False
        >>> running[roles[1]].exit(0)  # the worker has done its work, and the server is asked to end
        >>> supervisor.step(), running[roles[0]].asked
        (False, True)
        >>> running[roles[0]].exit(0)
        >>> supervisor.step(), supervisor.outcome.is_success
        (True, True)
    """

    def __init__(
        self,
        roles: Sequence[Role],
        start: Callable[[Role], RoleProcess],
        supervision: Supervision | None = None,
        *,
        clock: Callable[[], float],
        report: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """`start` starts a role and returns at once; `report` hears of everything that happens."""
        self._start, self._clock, self._report = start, clock, report
        self._supervision = supervision or Supervision()
        self.statuses = tuple(RoleStatus(role) for role in roles)
        self._failed: tuple[Role, int] | None = None
        self._stop_reason: str | None = None
        self._stopping = False
        self._kill_now = False

    @property
    def outcome(self) -> Outcome:
        """How the job ended, or would if it ended now."""
        role, code = self._failed or (None, None)
        return Outcome(failed=role, code=code, stopped=self._stop_reason)

    def request_stop(self, reason: str) -> None:
        """End all in order with the next `step`; asked a second time, at once. Safe in a signal handler."""
        self._kill_now = self._stop_reason is not None
        self._stop_reason = self._stop_reason or reason

    def step(self) -> bool:
        """Look at every role, do what is due; whether all is over."""
        for status in self.statuses:
            self._look_at(status)
        if not self._stopping and (self._stop_reason is not None or self._failed is not None):
            self._begin_to_stop()
        workers, servers = self._of(RoleKind.WORKER), self._of(RoleKind.PS)
        if self._stopping:
            self._end(workers)
        if any(status.state not in _OVER for status in workers):
            return False
        # Servers last: a worker that ends in order still pushes and saves.
        self._end(servers)
        return all(status.state in _OVER for status in servers)

    def kill_all(self) -> None:
        """End every process at once, in no order: for when supervising itself has failed."""
        for status in self.statuses:
            if status.is_alive and status.process is not None:
                status.process.kill()

    def _of(self, kind: RoleKind) -> list[RoleStatus]:
        return [status for status in self.statuses if status.role.kind is kind]

    def _look_at(self, status: RoleStatus) -> None:
        if status.is_alive and status.process is not None:
            code = status.process.poll()
            self._hear_of_restarts(status, status.process)
            if code is not None:
                self._has_ended(status, code)
        elif status.state is RoleState.WAITING and self._clock() >= status.since:
            self._start_role(status)

    def _hear_of_restarts(self, status: RoleStatus, process: RoleProcess) -> None:
        new = process.restarted - status.restarts_of_process
        if new > 0:
            status.restarts, status.restarts_of_process = status.restarts + new, process.restarted
            status.since = self._clock()
            self._tell(EventKind.RESTARTED, status)

    def _has_ended(self, status: RoleStatus, code: int) -> None:
        status.code = code
        asked = status.state is RoleState.ENDING
        if code == 0 or (asked and (self._stopping or code == _TERMINATED)):
            status.state = RoleState.ENDED
            self._tell(EventKind.ENDED, status, code=code)
        elif status.restarts < self._supervision.restarts and not asked and not self._stopping:
            self._start_later(status, code)
        else:
            status.state = RoleState.FAILED
            self._failed = self._failed or (status.role, code)
            self._tell(EventKind.FAILED, status, code=code)

    def _start_later(self, status: RoleStatus, code: int) -> None:
        delay = self._supervision.backoff(status.restarts)
        status.state, status.since = RoleState.WAITING, self._clock() + delay
        status.restarts += 1
        self._tell(EventKind.RESTARTING, status, code=code, delay=delay)

    def _start_role(self, status: RoleStatus) -> None:
        status.process = self._start(status.role)
        status.restarts_of_process = 0
        status.state, status.since = RoleState.RUNNING, self._clock()
        self._tell(EventKind.STARTED, status)

    def _begin_to_stop(self) -> None:
        self._stopping = True
        reason = self._stop_reason or f"{self._failed[0] if self._failed else 'a role'} failed"
        self._report(Event(kind=EventKind.STOPPING, reason=reason))

    def _end(self, statuses: Sequence[RoleStatus]) -> None:
        """Ask those that run to end, and end those that were asked long enough ago."""
        for status in statuses:
            if status.state is RoleState.WAITING:
                status.state = RoleState.ENDED
            if status.process is None or status.state in _OVER:
                continue
            if status.asked_at is None:
                status.asked_at, status.state = self._clock(), RoleState.ENDING
                status.process.ask_to_end()
            if self._kill_now or self._clock() >= status.asked_at + self._supervision.grace_secs:
                status.process.kill()
                status.state = RoleState.KILLED
                self._tell(EventKind.KILLED, status)

    def _tell(
        self, kind: EventKind, status: RoleStatus, *, code: int | None = None, delay: float | None = None
    ) -> None:
        pid = None if status.process is None else status.process.pid
        self._report(Event(kind=kind, role=status.role, pid=pid, code=code, restarts=status.restarts, delay=delay))


_OVER = (RoleState.ENDED, RoleState.FAILED, RoleState.KILLED)
