"""Danger: workers that lose count of the global step, or each other, when a server is restarted or an answer is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from counting_model import COUNTED
from monolith.errors import StalePushError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore, tables_of
from monolith.ps.client.coordination_client import CoordinationClient
from monolith.ps.protocol.calls import Call
from monolith.table.store import Position
from same_port import started_again


@contextmanager
def store(server: ParameterServer, worker: str, epoch: int = 1) -> Iterator[ServerStore]:
    config = ClientConfig(worker=worker, epoch=epoch)
    with ServerStore([server.address], tables_of(COUNTED), config=config) as found:
        yield found


def push(store: ServerStore, batch: int) -> None:
    store.apply([], position=Position(batches=batch))


def test_the_global_step_is_the_number_of_batches_that_the_servers_have_applied() -> None:
    with (
        ParameterServer() as server,
        CoordinationClient([server.address], index=0, epoch=1) as chief,
        CoordinationClient([server.address], index=1, epoch=1) as worker,
        store(server, "w0") as one,
        store(server, "w1") as two,
    ):
        assert chief.report().step == 0
        for batch in range(1, 4):
            push(one, batch)
            # That of the report before, whenever it has arrived: nobody waits for the network.
            assert batch - 1 <= chief.report().step <= batch
        assert chief.members().step == 3
        push(two, 1)
        assert worker.newest().step == 4
        push(two, 2)
        worker.report()
        assert worker.newest().step == 4  # what the last report has returned, without asking
        assert worker.newest().step == 5


def test_a_batch_that_a_successor_pushes_again_counts_once() -> None:
    with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as chief:
        with store(server, "w1") as first:
            push(first, 1)
            push(first, 2)
        with store(server, "w1", epoch=2) as second:
            push(second, 2)
            assert chief.members().step == 2
            push(second, 3)
        assert chief.members().step == 3


def test_a_restored_step_counts_for_all_and_only_once() -> None:
    with (
        ParameterServer() as server,
        CoordinationClient([server.address], index=1, epoch=1) as worker,
        store(server, "w0") as one,
    ):
        one.count_from(100)
        push(one, 1)
        assert worker.newest().step == 101
        one.count_from(100)  # a chief that was started again and has restored the same checkpoint
        assert worker.newest().step == 101


def test_the_step_survives_the_death_of_the_server(tmp_path: Path) -> None:
    config = ServerConfig(folder=tmp_path, log_flush_secs=0.0)
    with ParameterServer(config) as first, store(first, "w0") as one:
        one.count_from(100)
        push(one, 1)
    with ParameterServer(config) as second, CoordinationClient([second.address], index=0, epoch=1) as chief:
        assert chief.members().step == 101


def test_a_server_that_was_started_anew_is_told_again() -> None:
    with ParameterServer() as first, CoordinationClient([first.address], index=0, epoch=1) as client:
        client.enter("running")
        first.close()
        with started_again(ServerConfig(port=first.port)):
            client.report()
            client.newest()
            assert [(member.index, member.phase) for member in client.members().members] == [(0, "running")]


def test_the_lease_is_renewed_while_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParameterServer() as server, CoordinationClient([server.address], index=1, epoch=1, lease=0.03) as client:
        asked: list[Call] = []
        call = client._link.call
        monkeypatch.setattr(client._link, "call", lambda kind, message: (asked.append(kind), call(kind, message))[1])
        deadline = time.monotonic() + 60
        while len(asked) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert set(asked) == {Call.GREET}


def test_a_worker_that_says_it_comes_back_outlives_its_lease() -> None:
    with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as chief:
        gone, away = (CoordinationClient([server.address], index=index, epoch=1, lease=0.5) for index in (1, 2))
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
        CoordinationClient([server.address], index=1, epoch=1) as old,
        CoordinationClient([server.address], index=1, epoch=2) as _,
    ):
        with pytest.raises(StalePushError):
            old.enter("running")
        with pytest.raises(StalePushError):
            CoordinationClient([server.address], index=1, epoch=1)
