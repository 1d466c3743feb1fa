"""Danger: a process of an MLP job calls a parameter server that is not up yet, or one that was taken out of the job."""

from __future__ import annotations

import logging
import socket

import pytest

from monolith import ConfigError, InvalidArgumentError
from monolith.errors import DiscoveryError
from monolith.original import MLPEnv, MLPServiceDiscovery

JOB = {
    "MLP_ROLE": "worker",
    "MLP_ROLE_INDEX": "1",
    "MLP_PORT": "3001",
    "MLP_PS_NUM": "2",
    "MLP_PS_0_PRIMARY_HOST": "10.0.0.1",
    "MLP_PS_0_PORT": "2000",
    "MLP_PS_1_PRIMARY_HOST": "2001:db8::1",
    "MLP_PS_1_PORT": "2001",
    "MLP_WORKER_NUM": "2",
    "MLP_WORKER_0_PRIMARY_HOST": "10.0.1.1",
    "MLP_WORKER_0_PORT": "3000",
    "MLP_WORKER_1_PRIMARY_HOST": "10.0.1.2",
    "MLP_WORKER_1_PORT": "3001",
}
PS = {0: "10.0.0.1:2000", 1: "[2001:db8::1]:2001"}
WORKERS = {0: "10.0.1.1:3000", 1: "10.0.1.2:3001"}


class Ports:
    """Remembers which ports were asked for; those of `down` do not answer."""

    def __init__(self, *down: int) -> None:
        self.down, self.asked = down, list[tuple[str, int, float]]()

    def check(self, host: str, port: int, timeout: float) -> bool:
        self.asked.append((host, port, timeout))
        return port not in self.down


def discovery(ports: Ports, **environ: str) -> MLPServiceDiscovery:
    return MLPServiceDiscovery(MLPEnv(JOB | environ), check=ports.check)


def test_a_process_knows_which_one_it_is() -> None:
    here = discovery(Ports())
    assert (here.server_type, here.index, here.addr) == ("worker", 1, "10.0.1.2:3001")


def test_all_addresses_are_those_of_the_scheduler() -> None:
    here = discovery(Ports())
    assert (here.query("ps"), here.query("worker"), here.query("chief")) == (PS, WORKERS, {})
    assert here.query_all() == {"ps": PS, "worker": WORKERS, "chief": {}}


def test_every_parameter_server_is_waited_for_an_hour_and_nobody_else() -> None:
    ports = Ports()
    discovery(ports).query_all()
    assert [(host, port) for host, port, _ in ports.asked] == [("10.0.0.1", 2000), ("2001:db8::1", 2001)]


def test_one_that_never_answers_is_an_error_that_names_it() -> None:
    ports = Ports(2001)
    here = discovery(ports)
    with pytest.raises(DiscoveryError, match=r"ps 1 at \[2001:db8::1\]:2001 .* 3600 seconds"):
        here.query("ps")
    assert sum(seconds for host, _, seconds in ports.asked if host == "2001:db8::1") == 3600.0
    assert here.query("ps", skip_port_check=True) == PS
    assert here.query("worker") == WORKERS


def test_a_server_that_is_waited_for_is_named_every_30_seconds(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[float] = []

    def check(host: str, port: int, timeout: float) -> bool:
        asked.append(timeout)
        return len(asked) > 2

    with caplog.at_level(logging.INFO):
        MLPServiceDiscovery(MLPEnv(JOB), check=check, port_check_secs=70.0).query("ps")
    assert asked[:3] == [30.0, 30.0, 10.0]
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for ps 0 to accept connections at {PS[0]}, for {seconds} s so far" for seconds in (30, 60)
    ]


def test_who_is_taken_back_is_hidden_and_not_waited_for_until_it_registers_again() -> None:
    ports = Ports(2001)
    here = discovery(ports)
    here.deregister("ps", 1, PS[1])
    assert here.query("ps") == {0: PS[0]}
    here.deregister("ps", 0, PS[0])
    assert here.query("ps") == {}
    here.register("ps", 0, PS[0])
    assert here.query("ps") == {0: PS[0]}


def test_all_can_be_taken_back_at_once() -> None:
    here = discovery(Ports())
    here.deregister_all()
    assert here.query_all() == {"ps": {}, "worker": {}, "chief": {}}
    here.register("worker", 1, WORKERS[1])
    assert here.query("worker") == {1: WORKERS[1]}


@pytest.mark.parametrize(
    ("name", "index", "addr", "message"),
    [
        ("evaluator", 0, "h:1", "evaluator 0: expected one of the job's, ps below 2, worker below 2"),
        ("ps", 2, "h:1", "ps 2: expected one of"),
        ("PS", 0, "10.0.0.1:2000", "PS 0: expected one of"),
        ("ps", 0, "10.0.0.1:2001", "addr: expected port 2000 of ps 0"),
        ("ps", -1, "10.0.0.1:2000", "index: expected"),
        ("ps", 0, "10.0.0.1", "address: expected"),
    ],
)
def test_what_the_scheduler_does_not_know_is_refused(name: str, index: int, addr: str, message: str) -> None:
    here = discovery(Ports())
    for call in (here.register, here.deregister):
        with pytest.raises(InvalidArgumentError, match=message):
            call(name, index, addr)
    assert here.query_all() == {"ps": PS, "worker": WORKERS, "chief": {}}


def test_a_host_may_have_several_addresses() -> None:
    here = discovery(Ports())
    here.deregister("ps", 0, "ps-0.example:2000")
    assert here.query("ps") == {1: PS[1]}


def test_outside_a_job_there_is_nothing_to_discover() -> None:
    with pytest.raises(ConfigError, match="MLP_<ROLE>_NUM"):
        MLPServiceDiscovery(MLPEnv({}))


def test_a_process_without_a_host_is_an_error_that_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="MLP_WORKER_2_PRIMARY_HOST"):
        discovery(Ports(), MLP_WORKER_NUM="3").query("worker")


def test_a_real_port_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        env = MLPEnv(JOB | {"MLP_PS_NUM": "1", "MLP_PS_0_PRIMARY_HOST": "127.0.0.1", "MLP_PS_0_PORT": port})
        assert MLPServiceDiscovery(env).query("ps") == {0: f"127.0.0.1:{port}"}
    with pytest.raises(DiscoveryError, match="accept connections"):
        MLPServiceDiscovery(env, port_check_secs=0.0).query("ps")
