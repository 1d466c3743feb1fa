"""Danger: a job that hangs because one process died, restarts forever, or ends servers while workers still push."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from monolith.cluster.launch import Event, EventKind, JobRoles, Role, RoleKind, RoleState, Supervisor
from monolith.cluster.liveness import Liveness
from monolith.testing.roles import ScriptedProcess

PS0, PS1 = Role(RoleKind.PS, 0), Role(RoleKind.PS, 1)
WORKER0, WORKER1 = Role(RoleKind.WORKER, 0), Role(RoleKind.WORKER, 1)


@dataclass
class Job:
    """A supervisor over scripted processes and a clock of its own."""

    liveness: Liveness = field(default_factory=Liveness)
    now: float = 100.0
    started: list[Role] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    running: dict[Role, ScriptedProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles = JobRoles(num_ps=2, num_workers=2, uuid="job", worker_args=("train.py",)).roles
        self.supervisor = Supervisor(
            roles,
            self.start,
            self.liveness,
            clock=lambda: self.now,
            report=self.events.append,
            chance=lambda: 0.0,
        )
        assert not self.supervisor.step()

    def start(self, role: Role) -> ScriptedProcess:
        self.started.append(role)
        self.running[role] = ScriptedProcess(pid=len(self.started))
        return self.running[role]

    def exit(self, *roles: Role, code: int = 0) -> bool:
        for role in roles:
            self.running[role].exit(code)
        return self.supervisor.step()

    def asked(self) -> set[Role]:
        return {role for role, process in self.running.items() if process.asked}

    def kinds(self, role: Role) -> list[EventKind]:
        return [event.kind for event in self.events if event.role == role]

    def state(self, role: Role) -> RoleState:
        return next(status.state for status in self.supervisor.statuses if status.role == role)


def test_servers_end_when_all_workers_have_ended_well() -> None:
    job = Job()
    assert job.started == [PS0, PS1, WORKER0, WORKER1]
    assert not job.exit(WORKER0)
    assert job.asked() == set()
    assert not job.exit(WORKER1)
    assert job.asked() == {PS0, PS1}
    assert not job.exit(PS0)
    assert job.exit(PS1)
    assert job.supervisor.outcome.is_success


@pytest.mark.parametrize("code", [0, -15, 1])
def test_a_server_that_ends_unasked_while_workers_run_has_failed_whatever_its_exit_code(code: int) -> None:
    """SIGTERM, a shutdown call and a fenced server end with code 0; the workers would wait for it for ever."""
    job = Job(Liveness(restarts=1))
    assert not job.exit(PS0, code=code)
    assert job.state(PS0) is RoleState.WAITING
    job.now += 1
    assert not job.supervisor.step()
    assert job.state(PS0) is RoleState.RUNNING
    assert not job.exit(PS0, code=code)
    assert job.supervisor.outcome.failed == PS0
    assert job.asked() == {WORKER0, WORKER1}


def test_why_a_server_that_ended_with_code_0_has_failed_is_said() -> None:
    job = Job()
    job.exit(PS1)
    assert job.events[-2].reason == job.supervisor.outcome.reason == "it ended while it is still needed"


@pytest.mark.parametrize("role", [PS1, WORKER0, WORKER1])
def test_a_role_that_hangs_is_killed_and_replaced(role: Role) -> None:
    job = Job(Liveness(restarts=1, hang_secs=60.0))
    stopped = job.running[role]
    stopped.silence = 59.9
    assert not job.supervisor.step()
    assert not stopped.killed
    stopped.silence = 60.0
    assert not job.supervisor.step()
    assert stopped.killed
    assert job.events[-1].reason == "it hung, no heartbeat for 60 s"
    job.now += 1
    assert not job.supervisor.step()
    assert job.started.count(role) == 2
    assert job.state(role) is RoleState.RUNNING


def test_without_restarts_a_role_that_hangs_ends_the_job() -> None:
    job = Job()
    job.running[WORKER1].silence = 1e6
    assert not job.supervisor.step()
    assert job.supervisor.outcome.failed == WORKER1
    assert job.asked() == {WORKER0}


def test_a_role_that_hangs_when_asked_to_end_is_not_waited_for() -> None:
    job = Job()
    job.running[WORKER1].silence = 30.0
    job.supervisor.request_stop("SIGTERM")
    job.exit(WORKER0)
    assert not job.running[WORKER1].killed
    job.running[WORKER1].silence = 61.0
    assert not job.supervisor.step()
    assert job.running[WORKER1].killed


def test_restarts_of_long_ago_do_not_count() -> None:
    job = Job(Liveness(restarts=2, restart_window_secs=3600.0))
    for _ in range(20):  # two in every hour
        assert not job.exit(WORKER1, code=-9)
        assert [event.delay for event in job.events if event.kind is EventKind.RESTARTING][-1] in (1.0, 2.0)
        job.now += 1800.1
        assert not job.supervisor.step()
        assert job.state(WORKER1) is RoleState.RUNNING
    for _ in range(2):
        job.exit(WORKER1, code=-9)
        job.now += 10
        job.supervisor.step()
    assert job.state(WORKER1) is RoleState.FAILED, "the third within an hour"


def test_pauses_are_spread() -> None:
    job = Job(Liveness(restarts=5, jitter=0.5))
    job.supervisor = Supervisor(
        [WORKER0], job.start, job.liveness, clock=lambda: 0.0, report=job.events.append, chance=lambda: 0.5
    )
    job.supervisor.step()
    job.exit(WORKER0, code=1)
    assert job.events[-1].delay == 1.25


def test_the_first_role_that_fails_ends_the_job_and_is_its_outcome() -> None:
    job = Job()
    job.exit(WORKER1, code=3)
    assert job.asked() == {WORKER0}, "servers stay while a worker may still push"
    assert not job.exit(WORKER0, code=1)
    assert job.asked() == {WORKER0, PS0, PS1}
    assert job.exit(PS0, PS1)
    outcome = job.supervisor.outcome
    assert (outcome.failed, outcome.code, outcome.is_success) == (WORKER1, 3, False)
    assert [event.reason for event in job.events if event.kind is EventKind.STOPPING] == ["worker 1 failed"]


def test_a_role_is_started_again_after_longer_and_longer_pauses_and_then_fails() -> None:
    job = Job(Liveness(restarts=3, backoff_secs=1.0, max_backoff_secs=3.0))
    for pause in (1.0, 2.0, 3.0):
        job.exit(PS1, code=-9)
        assert job.state(PS1) is RoleState.WAITING
        job.now += pause - 0.01
        assert not job.supervisor.step()
        assert job.state(PS1) is RoleState.WAITING
        job.now += 0.02
        assert not job.supervisor.step()
        assert job.state(PS1) is RoleState.RUNNING
    assert job.asked() == set(), "the others go on"
    job.exit(PS1, code=-9)
    assert job.asked() == {WORKER0, WORKER1}
    job.exit(WORKER0, WORKER1)
    assert job.exit(PS0)
    assert job.supervisor.outcome.failed == PS1
    assert job.kinds(PS1) == [EventKind.STARTED, *[EventKind.RESTARTING, EventKind.STARTED] * 3, EventKind.FAILED]


def test_each_role_has_restarts_of_its_own() -> None:
    job = Job(Liveness(restarts=1, backoff_secs=0.0))
    for role in (PS0, PS1, WORKER0, WORKER1):
        job.exit(role, code=1)
        assert not job.supervisor.step()
    assert [job.started.count(role) for role in (PS0, PS1, WORKER0, WORKER1)] == [2] * 4
    assert job.asked() == set()


def test_a_server_that_waits_to_be_started_again_is_left_alone_when_the_workers_are_done() -> None:
    job = Job(Liveness(restarts=1))
    job.exit(PS0, code=1)
    job.exit(WORKER0, WORKER1)
    assert job.exit(PS1)
    job.now += 1000
    assert job.supervisor.step()
    assert job.started.count(PS0) == 1
    assert job.supervisor.outcome.is_success


def test_a_worker_that_waits_to_be_started_again_keeps_the_servers() -> None:
    job = Job(Liveness(restarts=1))
    job.exit(WORKER0, code=1)
    job.exit(WORKER1)
    assert job.asked() == set()


def test_stop_ends_workers_then_servers_whatever_their_exit_codes() -> None:
    job = Job(Liveness(restarts=5))
    job.supervisor.request_stop("SIGINT")
    assert not job.supervisor.step()
    assert job.asked() == {WORKER0, WORKER1}
    assert not job.exit(WORKER0, code=130)
    assert job.asked() == {WORKER0, WORKER1}
    assert not job.exit(WORKER1, code=-15)
    assert job.exit(PS0, PS1, code=-15)
    outcome = job.supervisor.outcome
    assert (outcome.failed, outcome.stopped, outcome.is_success) == (None, "SIGINT", False)
    assert len(job.started) == 4


def test_who_does_not_end_within_the_grace_is_killed() -> None:
    job = Job(Liveness(heartbeat_secs=1.0, lease_secs=3.0, grace_secs=10.0))
    job.supervisor.request_stop("SIGTERM")
    job.exit(WORKER0, code=0)
    job.now += 9.9
    assert not job.supervisor.step()
    assert not job.running[WORKER1].killed
    job.now += 0.2
    assert not job.supervisor.step()
    assert job.running[WORKER1].killed
    assert job.kinds(WORKER1)[-1] is EventKind.KILLED
    assert not job.running[PS0].killed, "servers have a grace of their own"
    assert job.exit(PS0, PS1)


def test_a_second_stop_kills_at_once() -> None:
    job = Job()
    job.supervisor.request_stop("SIGINT")
    job.supervisor.step()
    job.supervisor.request_stop("SIGINT")
    assert job.supervisor.step()
    assert all(process.killed for process in job.running.values())


def test_a_server_that_has_to_be_killed_in_the_end_does_not_spoil_the_work_of_the_workers() -> None:
    job = Job(Liveness(heartbeat_secs=0.1, lease_secs=0.5, grace_secs=1.0))
    job.exit(WORKER0, WORKER1)
    job.now += 2
    assert job.exit(PS0)
    assert job.running[PS1].killed
    assert job.supervisor.outcome.is_success


@pytest.mark.parametrize(("code", "fine"), [(0, True), (-15, True), (1, False), (-6, False)])
def test_a_server_that_breaks_while_it_ends_is_a_failure(code: int, fine: bool) -> None:
    """A signal that came before the server could take it is not: it held nothing then. Neither is started again."""
    job = Job(Liveness(restarts=5, backoff_secs=0.0))
    job.exit(WORKER0, WORKER1)
    assert not job.exit(PS0)
    assert job.exit(PS1, code=code)
    assert job.supervisor.outcome.is_success is fine


def test_a_server_that_dies_while_workers_end_is_not_started_again() -> None:
    job = Job(Liveness(restarts=5, backoff_secs=0.0))
    job.supervisor.request_stop("SIGINT")
    job.supervisor.step()
    job.exit(PS1, code=-9)
    job.exit(WORKER0, WORKER1)
    assert job.exit(PS0)
    assert len(job.started) == 4


def test_of_two_that_fail_at_once_the_first_is_the_outcome() -> None:
    job = Job()
    job.exit(PS1, WORKER0, code=1)
    job.exit(WORKER1)
    job.exit(PS0)
    assert job.supervisor.outcome.failed == PS1


def test_restarts_that_were_made_elsewhere_are_told_and_count() -> None:
    job = Job(Liveness(restarts=2, backoff_secs=0.0))
    job.running[PS0].restarted = 2
    assert not job.supervisor.step()
    assert job.events[-1] == Event(kind=EventKind.RESTARTED, role=PS0, pid=1, restarts=2)
    assert not job.supervisor.step()
    assert job.kinds(PS0).count(EventKind.RESTARTED) == 1
    job.exit(PS0, code=1)
    assert job.state(PS0) is RoleState.FAILED


def test_a_role_that_is_lost_elsewhere_too_often_ends_the_job() -> None:
    job = Job(Liveness(restarts=2))
    job.running[PS0].restarted = 3
    assert not job.supervisor.step()
    assert job.running[PS0].killed
    assert job.supervisor.outcome.failed == PS0
    assert job.asked() == {WORKER0, WORKER1}
