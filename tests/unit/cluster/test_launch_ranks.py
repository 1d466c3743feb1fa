"""Danger: a rank that is restarted waits for ever for ranks that have ended, or a job ends although enough ranks are left."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from monolith import ConfigError
from monolith.cluster.launch import Event, EventKind, JobRoles, Role, RoleKind, RoleState, Supervisor
from monolith.cluster.liveness import Liveness
from monolith.exit_codes import WRONG_USAGE
from monolith.testing.roles import ScriptedProcess

RANK0, RANK1, RANK2 = (Role(RoleKind.RANK, index) for index in range(3))


@dataclass
class Job:
    """Three ranks under a supervisor, and a clock of their own."""

    restarts: int = 1
    min_ranks: int | None = None
    now: float = 0.0
    started: list[Role] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    running: dict[Role, ScriptedProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        job = JobRoles(num_ps=0, num_ranks=3, min_ranks=self.min_ranks, uuid="job", worker_args=("train.py",))
        self.supervisor = Supervisor(
            job.roles,
            self.start,
            Liveness(restarts=self.restarts),
            min_ranks=job.min_ranks,
            clock=lambda: self.now,
            report=self.events.append,
            chance=lambda: 0.0,
        )
        assert not self.supervisor.step()

    def start(self, role: Role) -> ScriptedProcess:
        self.started.append(role)
        self.running[role] = ScriptedProcess()
        return self.running[role]

    def exit(self, *roles: Role, code: int = 0) -> bool:
        for role in roles:
            self.running[role].exit(code)
        return self.supervisor.step()

    def states(self) -> list[RoleState]:
        return [status.state for status in self.supervisor.statuses]


def test_a_rank_that_dies_is_restarted_alone() -> None:
    job = Job()
    assert not job.exit(RANK1, code=-9)
    job.now += 1
    assert not job.supervisor.step()
    assert job.started == [RANK0, RANK1, RANK2, RANK1]
    assert not any(process.asked or process.killed for process in job.running.values())
    assert job.exit(RANK0, RANK1, RANK2)
    assert job.supervisor.outcome.is_success


def test_ranks_that_have_ended_come_back_for_one_that_fails_at_the_end() -> None:
    job = Job()
    assert not job.exit(RANK0)
    assert not job.exit(RANK1, code=-9)
    assert job.states() == [RoleState.WAITING, RoleState.WAITING, RoleState.RUNNING]
    why = [event.reason for event in job.events if event.kind is EventKind.RESTARTING and event.role == RANK0]
    assert why == ["rank 1 cannot end without it"]
    job.now += 1
    assert not job.supervisor.step()
    assert job.started[3:] == [RANK0, RANK1]
    # That was no failure of rank 0, which may still fail once itself.
    assert not job.exit(RANK0, code=-9)
    assert job.states()[0] is RoleState.WAITING


def test_a_rank_that_fails_for_good_ends_the_job() -> None:
    job = Job(restarts=0)
    assert not job.exit(RANK2, code=3)
    outcome = job.supervisor.outcome
    assert (outcome.failed, outcome.code) == (RANK2, 3)
    assert {role for role, process in job.running.items() if process.asked} == {RANK0, RANK1}


@pytest.mark.parametrize("code", [1, -9, WRONG_USAGE])
def test_with_enough_ranks_left_the_job_goes_on(code: int) -> None:
    job = Job(restarts=0, min_ranks=2)
    assert not job.exit(RANK2, code=code)
    assert job.supervisor.outcome.is_success
    assert job.events[-1].kind is EventKind.FAILED
    assert job.events[-1].ranks_left == 2
    assert job.exit(RANK0, RANK1)
    assert job.supervisor.outcome.is_success


def test_too_few_ranks_end_the_job() -> None:
    job = Job(restarts=0, min_ranks=2)
    job.exit(RANK2, code=1)
    assert not job.exit(RANK1, code=4)
    outcome = job.supervisor.outcome
    assert (outcome.failed, outcome.code) == (RANK1, 4)
    assert job.running[RANK0].asked


def test_more_ranks_than_there_are_cannot_be_required() -> None:
    with pytest.raises(ConfigError, match="min_ranks must be at most num_ranks, 3 <= 2"):
        JobRoles(num_ps=0, num_ranks=2, min_ranks=3, uuid="job", worker_args=())
