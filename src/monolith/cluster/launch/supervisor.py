"""`Supervisor`: when the processes of a job are started, restarted and ended.

Processes and the clock are passed in, so that every rule is tested without them.

    running ──── all workers succeeded ──────────────────────┐
       │                                                     v
       └── a role failed, or stop was asked ──> workers end ──> servers end ──> over
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from monolith.cluster.launch.roles import Role, RoleKind
from monolith.cluster.liveness import Liveness
from monolith.exit_codes import WRONG_USAGE

__all__ = ["Event", "EventKind", "Outcome", "RoleProcess", "RoleState", "RoleStatus", "Supervisor"]

# The exit codes of a process that ended by SIGTERM, before or without a handler of its own, and by SIGKILL.
_TERMINATED, _KILLED = -15, -9
# The exit code of a command that did what it does on a signal, such as saving.
_INTERRUPTED = 130


class RoleProcess(Protocol):
    """A running role, wherever it runs."""

    pid: int | None
    """Its process id, or None while it is not known."""
    restarted: int
    """Restarts that its runtime, such as Ray, has made by itself."""

    @property
    def silence(self) -> float:
        """Seconds since it last showed that it is alive. 0 where that is not known."""

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its output."""

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""

    def ask_to_end(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """Kill it, with all processes that it started."""


class RoleState(StrEnum):
    """The state of a role."""

    RUNNING = "running"
    WAITING = "waiting"
    """It failed and will be restarted."""
    ENDING = "ending"
    """It was asked to end."""
    ENDED = "ended"
    """It succeeded, or ended because it was asked to."""
    FAILED = "failed"
    KILLED = "killed"
    """It did not end in time when asked."""


class EventKind(StrEnum):
    """What can happen to a role, or to the job."""

    STARTED = "started"
    RESTARTING = "restarting"
    RESTARTED = "restarted"
    """Its runtime, such as Ray, has restarted it."""
    ENDED = "ended"
    FAILED = "failed"
    KILLED = "killed"
    STOPPING = "stopping"
    """The job stops before its workers have ended."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of the state of a role or the job."""

    kind: EventKind
    role: Role | None = None
    pid: int | None = None
    code: int | None = None
    restarts: int = 0
    delay: float | None = None
    reason: str | None = None
    """Why the job stops, or why a role failed or is restarted if its exit code does not say it."""
    ranks_left: int | None = None
    """With how many ranks the job goes on without this one."""


@dataclass
class RoleStatus:
    """The current state of a role. Only the supervisor changes it."""

    role: Role
    state: RoleState = RoleState.WAITING
    process: RoleProcess | None = None
    since: float = -math.inf
    """When it was started or, while it waits, when it will be."""
    restarts: int = 0
    """All restarts so far."""
    restarted_at: deque[float] = field(default_factory=deque)
    """Times of the restarts within the restart window."""
    restarts_of_process: int = 0
    """Restarts by the runtime since the supervisor last started the role."""
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
    reason: str | None = None
    """Why it failed, if the exit code does not say it."""
    stopped: str | None = None
    """Why the job was asked to stop, if it was."""

    @property
    def is_success(self) -> bool:
        """Whether every worker succeeded."""
        return self.failed is None and self.stopped is None


class Failure(NamedTuple):
    """A role that failed for good."""

    role: Role
    code: int
    reason: str | None


class Supervisor:
    """Starts, restarts and ends the roles of a job. Call `step` repeatedly until it returns True. The first call starts them.

    A role is restarted if it fails while the job runs, as often as `liveness` allows, unless its exit code is `WRONG_USAGE`. A
    worker or rank has failed if its exit code is not 0. A server has failed if it ended without being asked to, whatever its
    exit code: workers still need it. So have shards, front ends and the parts of an online loop, which serve until they are
    asked to end. A role that hangs is killed, and has failed.

    Ranks end together: if one fails after others have ended well, those are started again too, because it cannot make its last
    steps alone. A rank that fails for good ends the job, unless `min_ranks` others are left, rank 0 among them.

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
        liveness: Liveness | None = None,
        *,
        min_ranks: int | None = None,
        clock: Callable[[], float],
        is_due: Callable[[Role], bool] = lambda role: True,
        report: Callable[[Event], None] = lambda event: None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Prepare to start the roles.

        Args:
            roles: in the order in which they are started.
            start: starts a role and returns at once.
            liveness: when a role counts as hung, and how often it is restarted.
            min_ranks: see above.
            clock: seconds.
            is_due: whether a role may be started. It is asked until it says so.
            report: called with every event.
            chance: draws the jitter of pauses.
        """
        self._start, self._clock, self._report, self._chance = start, clock, report, chance
        self._is_due = is_due
        self._liveness, self._min_ranks = liveness or Liveness(), min_ranks
        self.statuses = tuple(RoleStatus(role) for role in roles)
        self._failed: Failure | None = None
        self._stop_reason: str | None = None
        self._stopping = False
        self._kill_now = False

    @property
    def outcome(self) -> Outcome:
        """The outcome of the job, or what it would be if it ended now."""
        role, code, reason = self._failed or (None, None, None)
        return Outcome(failed=role, code=code, reason=reason, stopped=self._stop_reason)

    def request_stop(self, reason: str) -> None:
        """Stop the job with the next `step`. A second request kills all roles. Safe in a signal handler."""
        self._kill_now = self._stop_reason is not None
        self._stop_reason = self._stop_reason or reason

    def step(self) -> bool:
        """Check every role and do what is due. Returns whether the job is over."""
        for status in self.statuses:
            self._look_at(status)
        if not self._stopping and (self._stop_reason is not None or self._failed is not None):
            self._begin_to_stop()
        servers = self._of(RoleKind.PS, RoleKind.SHARD)
        if drivers := self._of(RoleKind.DRIVER):
            servers = [status for status in self.statuses if status not in drivers]
        workers = [status for status in self.statuses if status not in servers]
        if self._stopping:
            self._end(workers)
        if any(status.state not in _OVER for status in workers):
            return False
        # Servers last: a worker that is ending still pushes and saves.
        self._end(servers)
        return all(status.state in _OVER for status in servers)

    def kill_all(self) -> None:
        """Kill every process, for the case that supervising itself has failed."""
        for status in self.statuses:
            if status.is_alive and status.process is not None:
                status.process.kill()

    def _of(self, *kinds: RoleKind) -> list[RoleStatus]:
        return [status for status in self.statuses if status.role.kind in kinds]

    def _look_at(self, status: RoleStatus) -> None:
        if status.is_alive and status.process is not None:
            code = status.process.poll()
            self._note_restarts(status, status.process)
            if code is not None and status.is_alive:
                self._has_ended(status, code)
            elif status.state is RoleState.RUNNING:
                self._kill_if_hung(status, status.process)
        elif status.state is RoleState.WAITING and self._clock() >= status.since and self._is_due(status.role):
            self._start_role(status)

    def _note_restarts(self, status: RoleStatus, process: RoleProcess) -> None:
        """Count the restarts that the runtime of the role has made."""
        new = process.restarted - status.restarts_of_process
        if new <= 0:
            return
        status.restarts, status.restarts_of_process = status.restarts + new, process.restarted
        status.restarted_at.extend([self._clock()] * new)
        status.since = self._clock()
        self._tell(EventKind.RESTARTED, status)
        if self._recent_restarts(status) > self._liveness.restarts and not self._stopping:
            process.kill()
            self._has_failed(status, _KILLED, reason="it was lost too often")

    def _kill_if_hung(self, status: RoleStatus, process: RoleProcess) -> None:
        silence = process.silence
        if silence >= self._liveness.hang_secs:
            process.kill()
            self._has_failed(status, _KILLED, reason=f"it hung, no heartbeat for {silence:.0f} s")

    def _has_ended(self, status: RoleStatus, code: int) -> None:
        status.code = code
        asked = status.state is RoleState.ENDING
        unasked_server = status.role.kind in _SERVERS and not asked and not self._stopping
        ended_as_asked = self._stopping or code == _TERMINATED
        if status.role.kind is RoleKind.PART:
            ended_as_asked = ended_as_asked or code == _INTERRUPTED
        if (code == 0 and not unasked_server) or (asked and ended_as_asked):
            status.state = RoleState.ENDED
            self._tell(EventKind.ENDED, status, code=code)
        else:
            self._has_failed(status, code, reason=_REASONS.get(code))

    def _has_failed(self, status: RoleStatus, code: int, *, reason: str | None = None) -> None:
        status.code = code
        recent = self._recent_restarts(status)
        may_help = code != WRONG_USAGE and recent < self._liveness.restarts
        if may_help and status.state is RoleState.RUNNING and not self._stopping:
            delay = self._liveness.backoff(recent, self._chance)
            status.restarted_at.append(self._clock())
            self._restart(status, delay, code=code, reason=reason)
            if status.role.kind is RoleKind.RANK:
                self._restart_ended_ranks(status, delay)
            return
        status.state = RoleState.FAILED
        left = self._ranks_left(status)
        self._tell(EventKind.FAILED, status, code=code, reason=reason, ranks_left=left)
        if left is None:
            self._failed = self._failed or Failure(status.role, code, reason)

    def _restart(self, status: RoleStatus, delay: float, *, code: int | None = None, reason: str | None = None) -> None:
        status.state, status.since = RoleState.WAITING, self._clock() + delay
        status.restarts += 1
        self._tell(EventKind.RESTARTING, status, code=code, delay=delay, reason=reason)

    def _restart_ended_ranks(self, failed: RoleStatus, delay: float) -> None:
        """Start ranks that have ended well again. It is not their fault and does not count as a restart of theirs."""
        for status in self._of(RoleKind.RANK):
            if status.state is RoleState.ENDED:
                self._restart(status, delay, reason=f"{failed.role} cannot end without it")

    def _ranks_left(self, status: RoleStatus) -> int | None:
        """Return the number of ranks with which the job goes on without this role. None if it does not."""
        if status.role.kind is not RoleKind.RANK or self._min_ranks is None or self._stopping:
            return None
        if status.role.index == 0:
            return None  # it leads the others, and saves
        left = sum(other.state is not RoleState.FAILED for other in self._of(RoleKind.RANK))
        return left if left >= self._min_ranks else None

    def _recent_restarts(self, status: RoleStatus) -> int:
        while status.restarted_at and status.restarted_at[0] <= self._clock() - self._liveness.restart_window_secs:
            status.restarted_at.popleft()
        return len(status.restarted_at)

    def _start_role(self, status: RoleStatus) -> None:
        status.process = self._start(status.role)
        status.restarts_of_process = 0
        status.state, status.since = RoleState.RUNNING, self._clock()
        self._tell(EventKind.STARTED, status)

    def _begin_to_stop(self) -> None:
        self._stopping = True
        reason = self._stop_reason or f"{self._failed.role if self._failed else 'a role'} failed"
        self._report(Event(kind=EventKind.STOPPING, reason=reason))

    def _end(self, statuses: Sequence[RoleStatus]) -> None:
        """Ask running roles to end, and kill those whose grace period is over."""
        for status in statuses:
            if status.state is RoleState.WAITING:
                status.state = RoleState.ENDED
            if status.process is None or status.state in _OVER:
                continue
            if status.asked_at is None:
                status.asked_at, status.state = self._clock(), RoleState.ENDING
                status.process.ask_to_end()
            in_time = self._clock() < status.asked_at + self._liveness.grace_secs
            if self._kill_now or not in_time or status.process.silence >= self._liveness.hang_secs:
                status.process.kill()
                status.state = RoleState.KILLED
                self._tell(EventKind.KILLED, status)

    def _tell(
        self,
        kind: EventKind,
        status: RoleStatus,
        *,
        code: int | None = None,
        delay: float | None = None,
        reason: str | None = None,
        ranks_left: int | None = None,
    ) -> None:
        pid = None if status.process is None else status.process.pid
        event = Event(
            kind=kind,
            role=status.role,
            pid=pid,
            code=code,
            restarts=status.restarts,
            delay=delay,
            reason=reason,
            ranks_left=ranks_left,
        )
        self._report(event)


_REASONS = {
    0: "it ended while it is still needed",
    WRONG_USAGE: f"exit code {WRONG_USAGE}, wrong usage, configuration or data: a restart would not help",
}
# They serve until they are asked to end.
_SERVERS = (RoleKind.PS, RoleKind.SHARD, RoleKind.FRONT_END, RoleKind.PART)
_OVER = (RoleState.ENDED, RoleState.FAILED, RoleState.KILLED)
