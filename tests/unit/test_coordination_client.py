"""Danger: workers that lose count of the global step, or each other, when a server is started anew or an answer is lost."""

from __future__ import annotations

import time

import pytest

from monolith.errors import StalePushError
from monolith.ps import ParameterServer, ServerConfig
from monolith.ps.client.coordination_client import CoordinationClient
from monolith.transport.calls import Call
from same_port import started_again


def test_steps_of_workers_add_up() -> None:
    with (
        ParameterServer() as server,
        CoordinationClient(server.address, index=0, epoch=1) as chief,
        CoordinationClient(server.address, index=1, epoch=1) as worker,
    ):
        assert [chief.report().step for _ in range(3)] == [0, 1, 2]
        assert chief.members().step == 3  # the last report was still on its way
        assert worker.newest().step == 3
        worker.report()
        worker.report()
        assert worker.newest().step == 4  # that of the report before, without asking
        assert worker.newest().step == 5
        assert chief.members().step == 5


def test_a_restored_step_counts_for_all() -> None:
    with (
        ParameterServer() as server,
        CoordinationClient(server.address, index=0, epoch=1) as chief,
        CoordinationClient(server.address, index=1, epoch=1) as worker,
    ):
        chief.report(0, at_least=100)
        assert chief.members().step == 100
        assert worker.newest().step == 100


def test_a_server_that_was_started_anew_is_told_again() -> None:
    with ParameterServer() as first, CoordinationClient(first.address, index=0, epoch=1) as client:
        client.enter("running")
        for _ in range(5):
            client.report()
        client.newest()
        assert client.newest().step == 5
        first.close()
        with started_again(ServerConfig(port=first.port)):
            assert client.members().step == 0
            client.report()
            assert client.members().step == 5
            assert [(member.index, member.phase) for member in client.members().members] == [(0, "running")]
            client.report()
            assert client.members().step == 6


def test_the_lease_is_renewed_while_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParameterServer() as server, CoordinationClient(server.address, index=1, epoch=1, lease=0.03) as client:
        asked: list[Call] = []
        ask = client._ask
        monkeypatch.setattr(client, "_ask", lambda call, message=None: (asked.append(call), ask(call, message))[1])
        deadline = time.monotonic() + 60
        while len(asked) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert set(asked) == {Call.GREET}


def test_a_worker_that_says_it_comes_back_outlives_its_lease() -> None:
    with ParameterServer() as server, CoordinationClient(server.address, index=0, epoch=1) as chief:
        gone, away = (CoordinationClient(server.address, index=index, epoch=1, lease=0.5) for index in (1, 2))
        away.stay(1000.0)
        away.close()
        gone.close()

        def there() -> list[int]:
            return [member.index for member in chief.members().members if member.alive]

        assert 2 in there()
        deadline = time.monotonic() + 60
        while 1 in there():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert there() == [0, 2]


def test_a_replaced_worker_is_told() -> None:
    with (
        ParameterServer() as server,
        CoordinationClient(server.address, index=1, epoch=1) as old,
        CoordinationClient(server.address, index=1, epoch=2) as _,
    ):
        with pytest.raises(StalePushError):
            old.enter("running")
        with pytest.raises(StalePushError):
            CoordinationClient(server.address, index=1, epoch=1)


def test_a_key_is_decided_once_for_all() -> None:
    with (
        ParameterServer() as server,
        CoordinationClient(server.address, index=0, epoch=1) as one,
        CoordinationClient(server.address, index=1, epoch=1) as other,
    ):
        assert one.set_key("servers/1", "a,b") == "a,b"
        assert other.set_key("servers/1", "b,a") == "a,b"
        assert other.set_key("servers/1", "b,a", expected="a,b") == "b,a"
        assert one.read_keys("servers/") == {"servers/1": "b,a"}
