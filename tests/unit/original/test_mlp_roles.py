"""Danger: a process does the work of another role, or reads from a data service that is not up yet."""

from __future__ import annotations

import pytest

from monolith import InvalidArgumentError
from monolith.original import MLPEnv, mlp_pass

JOB = {
    "MLP_SSH_PORT": "22",
    "MLP_PORT": "5000",
    "MLP_ROLE_INDEX": "0",
    "MLP_DISPATCHER_NUM": "1",
    "MLP_DISPATCHER_0_PRIMARY_HOST": "d0",
    "MLP_DISPATCHER_0_PORT": "5000",
    "MLP_DSWORKER_NUM": "2",
    "MLP_DSWORKER_0_PRIMARY_HOST": "s0",
    "MLP_DSWORKER_0_PORT": "5001",
    "MLP_DSWORKER_1_PRIMARY_HOST": "s1",
    "MLP_DSWORKER_1_PORT": "5002",
    "MLP_WORKER_NUM": "2",
    "MLP_WORKER_0_PRIMARY_HOST": "w0",
    "MLP_PS_NUM": "1",
    "YARN_INET_ADDR": "w9",
}


class Job:
    """A journal of what a process did: servers started and closed, ports asked, in order. Ports answer, SSH for a while."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.now = 0.0

    def check(self, host: str, port: int, timeout: float) -> bool:
        self.journal.append(f"ask {host}:{port}")
        return port != 22 or self.now < 15

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start_dispatcher(self, port: int) -> Job:
        self.journal.append(f"dispatch at {port}")
        return self

    def start_worker(self, address: str, dispatcher: str) -> Job:
        self.journal.append(f"work at {address} for {dispatcher}")
        return self

    def close(self) -> None:
        self.journal.append("close")

    def env(self, role: str, **more: str) -> MLPEnv:
        return MLPEnv({**JOB, "MLP_ROLE": role, **more}, check=self.check, clock=lambda: self.now, sleep=self.sleep)


def test_the_dispatcher_serves_until_worker_0_is_gone() -> None:
    job = Job()
    done = mlp_pass(job.env("dispatcher"), job)
    assert (done.role, done.finished) == ("DISPATCHER", True)
    assert job.journal[0] == "dispatch at 5000"
    assert set(job.journal[1:-1]) == {"ask w0:22"}
    assert job.journal[-1] == "close"


def test_a_data_worker_waits_for_the_dispatcher_itself_not_for_its_machine() -> None:
    job = Job()
    done = mlp_pass(job.env("dsworker", MLP_ROLE_INDEX="1", MLP_PORT="5002"), job)
    assert done.finished
    assert job.journal[:3] == ["ask d0:5000", "work at s1:5002 for grpc://d0:5000", "ask w0:22"]
    assert job.journal[-1] == "close"


def test_a_server_that_cannot_wait_is_still_closed() -> None:
    job = Job()
    env = job.env("dispatcher")
    env.join = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        mlp_pass(env, job)
    assert job.journal == ["dispatch at 5000", "close"]


def test_a_worker_waits_for_the_whole_data_service() -> None:
    job = Job()
    left = mlp_pass(job.env("worker", MLP_ROLE_INDEX="1"), job, use_dataservice=True)
    assert (left.role, left.index, left.finished, left.dispatcher) == ("WORKER", 1, False, "grpc://d0:5000")
    assert job.journal == ["ask d0:5000", "ask s0:5001", "ask s1:5002"]
    assert left.servers == ()


def test_extra_data_workers_get_ports_behind_those_of_all_ranks() -> None:
    ranks = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    ports: list[str] = []
    for rank in range(4):
        job = Job()
        env = job.env("worker", MLP_PORT="6000", OMPI_COMM_WORLD_RANK=str(rank), **ranks)
        left = mlp_pass(env, job, use_dataservice=True, num_extra_dsworkers=2)
        assert len(left.servers) == 2
        ports += [line.split()[2] for line in job.journal if line.startswith("work at")]
    assert ports == [f"w9:{port}" for port in range(6004, 6012)]


@pytest.mark.parametrize("role", ["ps", "worker", "chief"])
def test_who_neither_serves_nor_reads_data_goes_on_at_once(role: str) -> None:
    job = Job()
    left = mlp_pass(job.env(role), job, use_dataservice=role != "worker")
    assert (left.role, left.finished, left.dispatcher) == (role.upper(), False, "")
    assert job.journal == []


def test_roles_may_have_other_names() -> None:
    job = Job()
    env = job.env("reader", MLP_READER_NUM="1")
    assert mlp_pass(env, job, dispatcher_role="Reader").finished


def test_outside_a_job_nothing_happens() -> None:
    left = mlp_pass(MLPEnv({}))
    assert (left.role, left.finished) == ("", False)


@pytest.mark.parametrize(("role", "extra"), [("dispatcher", 0), ("dsworker", 0), ("worker", 1)])
def test_a_role_that_needs_servers_says_so_when_there_are_none(role: str, extra: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"data_servers: .* role {role.upper()}"):
        mlp_pass(Job().env(role), use_dataservice=True, num_extra_dsworkers=extra)
