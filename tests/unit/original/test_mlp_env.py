"""Danger: a process of an MLP job takes itself for another one, or calls others at ports that are not theirs."""

from __future__ import annotations

import logging

import pytest

from monolith import ConfigError
from monolith.original import MLPEnv

JOB = {
    "MLP_FRAMEWORK": "tensorflow",
    "MLP_SSH_PORT": "22",
    "MLP_LOG_PATH": "'/var/log/job'",
    "MLP_DEBUG_PORT": "7000",
    "MLP_ENTRYPOINT_DIR": '"/opt/job"',
    "MLP_TASK_CMD": "python train.py",
    "MLP_ROLE": "ps",
    "MLP_ROLE_INDEX": "1",
    "MLP_PORT": "2001",
    "MLP_CPU": "4.5",
    "MLP_GPU": "0",
    "MLP_MEM": "8192",
    "MLP_PS_NUM": "2",
    "MLP_PS_0_HOST": "ps0.pod",
    "MLP_PS_0_PRIMARY_HOST": "10.0.0.1",
    "MLP_PS_0_PORT": "2000",
    "MLP_PS_1_PRIMARY_HOST": "'10.0.0.2'",
    "MLP_PS_1_PORT": '"2001"',
    "MLP_PS_ALL_HOSTS": "ps0.pod,ps1.pod",
    "MLP_PS_ALL_PRIMARY_HOSTS": "10.0.0.1,10.0.0.2",
    "MLP_PS_ALL_ADDRS": "ps0.pod:2000,ps1.pod:2001",
    "MLP_PS_ALL_PRIMARY_ADDRS": "10.0.0.1:2000, 10.0.0.2:2001",
    "MLP_WORKER_NUM": "3",
    "MLP_WORKER_0_PRIMARY_HOST": "10.0.1.1",
    "MLP_WORKER_0_PORT": "3000",
    "MLP_WORKER_1_PRIMARY_HOST": "2001:db8::7",
    "YARN_INET_ADDR": "10.0.0.2",
    "HOME": "/root",
}


def test_what_the_scheduler_says_is_read_without_its_quotes() -> None:
    env = MLPEnv(JOB)
    assert env.available
    assert (env.role, env.index, env.port, env.ssh_port, env.debug_port) == ("PS", 1, 2001, 22, 7000)
    assert (env.log_path, env.entrypoint_dir, env.task_cmd) == ("/var/log/job", "/opt/job", "python train.py")
    assert (env.cpu, env.gpu, env.gpu_type, env.mem) == (4, 0, "", 8192)
    assert (env.framework, env.host) == ("tensorflow", "10.0.0.2")
    assert env.all_roles == {"PS": 2, "WORKER": 3}


def test_hosts_and_addresses_of_roles() -> None:
    env = MLPEnv(JOB)
    assert (env.num_replicas(), env.num_replicas("worker"), env.num_replicas("dispatcher")) == (2, 3, 0)
    assert (env.get_all_host(), env.get_all_host(is_primary=False)) == ("10.0.0.1,10.0.0.2", "ps0.pod,ps1.pod")
    assert env.get_all_addrs("ps") == ["10.0.0.1:2000", "10.0.0.2:2001"]
    assert env.get_all_addrs("ps", is_primary=False) == ["ps0.pod:2000", "ps1.pod:2001"]
    assert env.get_all_addrs("worker") == []
    assert (env.get_host(), env.get_host("ps", 0, is_primary=False)) == ("10.0.0.2", "ps0.pod")
    assert (env.get_addr(), env.get_addr("ps", 0), env.get_addr("ps", 2)) == ("10.0.0.2:2001", "10.0.0.1:2000", None)
    assert env.get_port("worker", 0) == 3000


def test_a_port_is_a_number_with_a_default() -> None:
    assert MLPEnv(JOB).get_port("worker", 1) == 2222
    assert MLPEnv(JOB).get_addr("worker", 1) == "[2001:db8::7]:2222"


def test_the_dispatcher_is_on_this_machine_if_the_job_has_none() -> None:
    assert MLPEnv(JOB).dispatcher_addr() is None
    assert MLPEnv(JOB).dispatcher_target() == "grpc://localhost:5050"
    env = MLPEnv(JOB | {"MLP_DISPATCHER_0_PRIMARY_HOST": "10.0.2.1", "MLP_DISPATCHER_0_PORT": "4000"})
    assert env.dispatcher_target() == "grpc://10.0.2.1:4000"


@pytest.mark.parametrize("environ", [{}, {"HOME": "/root"}, {"MLP_FRAMEWORK": "tensorflow"}])
def test_a_process_the_scheduler_did_not_start_is_none_of_its_job(environ: dict[str, str]) -> None:
    assert not MLPEnv(environ).available


@pytest.mark.parametrize("name", ["MLP_PORT", "MLP_ROLE_INDEX", "MLP_PS_NUM", "MLP_GPU"])
@pytest.mark.parametrize("wrong", ["many", "-1", "1e3", "0x10"])
def test_a_number_that_is_none_is_refused_by_name(name: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected a number, got '{wrong}'"):
        MLPEnv(JOB | {name: wrong})


MPI = JOB | {
    "MLP_ROLE": "worker",
    "MLP_ROLE_INDEX": "0",
    "MLP_PORT": "3000",
    "MLP_WORKER_NUM": "2",
    "MLP_WORKER_1_PRIMARY_HOST": "10.0.1.2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_under_mpirun_the_workers_are_its_processes() -> None:
    env = MLPEnv(MPI)
    assert env.enable_mpi
    assert (env.index, env.port, env.num_replicas(), env.all_roles["WORKER"]) == (3, 3003, 4, 4)
    assert [env.get_addr("worker", index) for index in range(4)] == [
        "10.0.1.1:3000", "10.0.1.1:3001", "10.0.1.2:3002", "10.0.1.2:3003",
    ]  # fmt: skip
    assert env.get_addr("ps", 1) == "10.0.0.2:2001"


def test_mpirun_is_for_workers_only() -> None:
    env = MLPEnv(MPI | {"MLP_ROLE": "ps", "MLP_PORT": "2000"})
    assert not env.enable_mpi
    assert (env.index, env.port, env.num_replicas("worker")) == (0, 2000, 2)


class Machines:
    """Time, and ports that answer between two times."""

    def __init__(self, ports: dict[tuple[str, int], tuple[float, float]]) -> None:
        self.ports, self.now, self.timeouts = ports, 0.0, set[float]()

    def check(self, host: str, port: int, timeout: float) -> bool:
        self.timeouts.add(timeout)
        first, last = self.ports.get((host, port), (1e9, 0))
        return first <= self.now < last

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def env(self, environ: dict[str, str]) -> MLPEnv:
        return MLPEnv(environ, check=self.check, clock=lambda: self.now, sleep=self.sleep)


def test_waiting_polls_every_five_seconds_until_the_machine_is_up() -> None:
    machines = Machines({("10.0.0.1", 22): (12, 1e9)})
    assert machines.env(JOB).wait("ps", 0)
    assert machines.now == 15


def test_waiting_for_the_process_itself_asks_its_own_port() -> None:
    machines = Machines({("10.0.0.1", 22): (0, 1e9), ("10.0.0.1", 2000): (7, 1e9)})
    assert machines.env(JOB).wait("ps", 0, use_ssh=False)
    assert machines.now == 10


def test_waiting_ends_when_its_time_is_over() -> None:
    machines = Machines({})
    assert not machines.env(JOB).wait("ps", 0, timeout=12)
    assert machines.now == 10


def test_a_negative_timeout_is_no_limit_and_what_is_waited_for_is_said(caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines({("10.0.0.1", 22): (65, 1e9)})
    with caplog.at_level(logging.INFO):
        assert machines.env(JOB).wait("ps", 0, timeout=-1)
    assert machines.now == 65
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for ps 0 to accept connections at 10.0.0.1:22",
        "still waiting after 30 s for ps 0 to accept connections at 10.0.0.1:22",
        "still waiting after 60 s for ps 0 to accept connections at 10.0.0.1:22",
    ]


def test_a_timeout_of_zero_asks_once() -> None:
    machines = Machines({})
    assert not machines.env(JOB).wait("ps", 0, timeout=0)
    assert machines.now == 0


def test_joining_ends_when_worker_0_has_come_and_gone() -> None:
    machines = Machines({("10.0.1.1", 22): (8, 100)})
    machines.env(JOB).join()
    assert machines.now == 100
    assert 60.0 in machines.timeouts  # a slow answer is no absence


def test_who_cannot_be_waited_for_is_an_error_that_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="MLP_WORKER_2_PRIMARY_HOST"):
        MLPEnv(JOB).wait("worker", 2)
    with pytest.raises(ConfigError, match="MLP_SSH_PORT"):
        MLPEnv({key: value for key, value in JOB.items() if key != "MLP_SSH_PORT"}).wait("ps", 0)
