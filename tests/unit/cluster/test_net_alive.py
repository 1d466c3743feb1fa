"""Danger: a dead process counts as alive and a run hangs, or a living one counts as dead and a run never starts."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from monolith import InvalidArgumentError
from monolith.cluster import HostServiceDiscovery, NodeAliveChecker, check_port
from monolith.errors import UnavailableError
from monolith.ps import ClientConfig
from monolith.ps.client.server_group import link_to
from monolith.testing.servers import free_ports
from monolith.train.distributed.formation import wait_for_servers
from monolith.transport.calls import BasicCall


class Network:
    """Time, and hosts that come up at a given time; each attempt on one that is down takes `cost` seconds."""

    def __init__(self, up_at: dict[str, float], cost: float = 0.0) -> None:
        self.up_at, self.cost, self.now, self.attempts = up_at, cost, 0.0, 0

    def connect(self, host: str, port: int, timeout: float) -> None:
        self.attempts += 1
        if self.now < self.up_at.get(host, 1e9):
            self.now += min(self.cost, timeout)
            raise TimeoutError("timed out") if self.cost else ConnectionRefusedError("refused")

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def check(self, host: str, timeout: float) -> bool:
        return check_port(host, 1, timeout, connect=self.connect, clock=lambda: self.now, sleep=self.sleep)


def test_a_port_that_answers_is_found_at_the_first_attempt() -> None:
    network = Network({"here": 0})
    assert network.check("here", 1.0)
    assert network.attempts == 1
    assert network.now == 0


def test_a_port_that_opens_in_time_is_waited_for() -> None:
    network = Network({"late": 2.5})
    assert network.check("late", 10.0)
    assert 2.5 <= network.now < 3
    assert network.attempts > 5


@pytest.mark.parametrize("cost", [0.0, 0.4, 30.0])
def test_a_port_that_never_opens_costs_no_more_than_the_time_given(cost: float) -> None:
    network = Network({}, cost=cost)
    assert not network.check("nowhere", 1.0)
    assert network.now <= 1.0


def test_brackets_of_ipv6_are_not_part_of_the_host() -> None:
    assert Network({"::1": 0}).check("[::1]", 0.0)


def test_a_real_port_answers_until_it_is_closed() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert check_port("127.0.0.1", port)
    assert not check_port("127.0.0.1", port, 0.0)


NODES = [f"localhost:{port}" for port in range(1, 6)]


@pytest.mark.parametrize("down", [set(), {2}, {1, 5}, {1, 2, 3, 4, 5}])
def test_everyone_is_either_alive_or_dead(down: set[int]) -> None:
    def connect(host: str, port: int, timeout: float) -> None:
        assert (host, timeout) == ("localhost", 0.5)
        if port in down:
            raise TimeoutError

    checker = NodeAliveChecker(NODES, timeout=0.5, num_thread=2, connect=connect)
    assert checker.get_addrs() == NODES
    assert checker.get_dead_nodes() == [f"localhost:{port}" for port in sorted(down)]
    assert checker.get_alive_nodes() == [node for node in NODES if node not in checker.get_dead_nodes()]
    assert checker.all_nodes_alive() == (not down)


def test_as_many_are_tried_at_a_time_as_asked_for() -> None:
    meeting = threading.Barrier(5, timeout=30)  # passed only by five attempts at once
    assert NodeAliveChecker(NODES, num_thread=5, connect=lambda *_: meeting.wait() and None).all_nodes_alive()


def test_no_node_is_no_dead_node() -> None:
    assert NodeAliveChecker([]).all_nodes_alive()


def test_a_real_server_is_alive_and_its_closed_port_dead() -> None:
    closed = f"127.0.0.1:{free_ports(1)[0]}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        checker = NodeAliveChecker([closed, f"127.0.0.1:{server.getsockname()[1]}"])
    assert checker.get_dead_nodes() == [closed]


def test_wrong_arguments_are_refused_before_anyone_is_called() -> None:
    with pytest.raises(InvalidArgumentError, match="num_thread"):
        NodeAliveChecker(NODES, num_thread=0)
    with pytest.raises(InvalidArgumentError, match="expected host:port"):
        NodeAliveChecker(["localhost:1", "localhost"])


@pytest.mark.parametrize("odd", ["node..local:2222", f"{'x' * 64}.local:2222", ".local:2222"])
def test_a_name_that_cannot_be_a_hosts_is_dead_and_no_error(odd: str) -> None:
    assert NodeAliveChecker([odd]).get_dead_nodes() == [odd]
    assert not check_port(odd.rpartition(":")[0], 2222, timeout=0)
    with pytest.raises(UnavailableError):
        link_to(odd, ClientConfig(timeout=0.01)).call(BasicCall.HEALTH)


@pytest.mark.parametrize("odd", ["node..local:2222", "no address", ":2222", "[::1:2222", "host:99999"])
def test_one_odd_announcement_does_not_keep_the_other_servers_from_being_found(tmp_path: Path, odd: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        HostServiceDiscovery(str(tmp_path)) as discovery,
    ):
        good = f"127.0.0.1:{server.getsockname()[1]}"
        announced = {0: odd, 1: good}
        discovery.query = lambda name: announced  # type: ignore[assignment,method-assign]
        assert wait_for_servers(discovery, 1, sleep=lambda _: pytest.fail("waited")) == (good,)
