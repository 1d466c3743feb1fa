"""Danger: a server that restored itself stops every worker, or a push around its death counts twice or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import console
from monolith.errors import ServerRestartedError, ServerRestoredError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import TableWrite
from monolith.table import Bags
from monolith.testing import sgd_table_config
from real_servers import until

TABLE = sgd_table_config(1, name="t")
IDS = np.arange(100)
BAGS = Bags(table="t", ids=IDS, offsets=np.arange(101))


def started(folder: Path | None, port: int = 0) -> ParameterServer:
    return ParameterServer(ServerConfig(folder=folder, port=port, log_flush_secs=0))


def restarted(server: ParameterServer, folder: Path, *, same_port: bool = True) -> ParameterServer:
    port = server.port if same_port else 0
    server.close()
    return started(folder, port)


def test_a_worker_goes_on_with_a_server_that_has_restored_itself(tmp_path: Path) -> None:
    server = started(tmp_path)
    with ServerStore([server.address], [TABLE]) as store:
        for turn in range(3):
            store.assign_add("t", IDS, torch.ones(100, 1))
            server = restarted(server, tmp_path)
            assert store.lookup([BAGS])[0].eq(turn + 1).all()
    server.close()


def test_a_push_that_was_applied_before_the_server_died_is_known_after(tmp_path: Path) -> None:
    server = started(tmp_path)
    with ServerStore([server.address], [TABLE]) as store:
        (link,) = store.links
        write = TableWrite(push=store.next_push(), table="t", map=1)
        arrays = [IDS, np.ones((100, 1), dtype=np.float32)]
        heard, lost = (link.begin(Call.ASSIGN_ADD, write.model_dump_json(), arrays) for _ in range(2))
        heard.finish()
        server = restarted(server, tmp_path)
        lost.finish()  # the same push, meant for the earlier life
        assert store.lookup([BAGS])[0].eq(1.0).all()
        server.close()


def test_who_does_not_want_to_go_on_is_told_and_a_server_that_lost_everything_always_tells(tmp_path: Path) -> None:
    server = started(tmp_path)
    with ServerStore([server.address], [TABLE], config=ClientConfig(on_restart="raise")) as careful:
        server = restarted(server, tmp_path)
        with pytest.raises(ServerRestoredError):
            careful.lookup([BAGS])
        careful.rejoin()
        careful.lookup([BAGS])
    with ServerStore([server.address], [TABLE]) as store:
        port = server.port
        server.close()
        with started(None, port):
            with pytest.raises(ServerRestartedError) as caught:
                store.lookup([BAGS])
            assert not isinstance(caught.value, ServerRestoredError)


def test_a_worker_waits_for_a_server_that_is_away_and_finds_it_at_its_new_address(tmp_path: Path) -> None:
    servers = [started(tmp_path / "0"), started(tmp_path / "1")]
    places = [server.address for server in servers]
    asked = threading.Event()

    def find() -> list[str]:
        asked.set()
        return list(places)

    with ServerStore(places, [TABLE], find=find) as store, ServerStore(places, [TABLE], find=find) as other:
        store.assign("t", IDS, torch.ones(100, 1))
        servers[1].close()
        asked.clear()
        change = threading.Thread(target=lambda: store.assign_add("t", IDS, torch.ones(100, 1)))
        change.start()
        assert asked.wait(60)
        servers[1] = started(tmp_path / "1")
        places[1] = servers[1].address
        change.join(60)
        assert not change.is_alive()
        assert other.lookup([BAGS])[0].eq(2.0).all()
        assert store.addresses == other.addresses == tuple(places)
    for server in servers:
        server.close()


def test_what_servers_own_survives_them(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    servers = [started(folder) for folder in folders]
    addresses = [server.address for server in servers]
    with ServerStore(addresses[:2], [TABLE]) as store:
        store.assign("t", IDS, torch.ones(100, 1))
        grown = store.rebalance(addresses)
        servers = [restarted(server, folder) for server, folder in zip(servers, folders, strict=True)]
        store.assign_add("t", IDS, torch.ones(100, 1))
        assert store.ownership == grown
        with ServerStore(addresses[:2]) as late:
            assert set(late.ownership.servers) == set(grown.servers)
            assert late.lookup([BAGS])[0].eq(2.0).all()
    for server in servers:
        server.close()


def test_a_worker_says_that_it_waits_for_a_server_and_that_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(console, "QUIET_SECS", 0.0)
    server = started(tmp_path)
    address = server.address
    with caplog.at_level("INFO", logger="monolith"), ServerStore([address], [TABLE]) as store:
        server.close()
        waiting = threading.Thread(target=store.lookup, args=([BAGS],))
        waiting.start()
        until(lambda: "waiting for it, at most" in caplog.text)
        with started(tmp_path, int(address.rpartition(":")[2])):
            waiting.join()
    told = [message for message in caplog.messages if address in message]
    assert len([message for message in told if "waiting for it" in message]) == 1, told
    assert [message for message in told if "joined it again" in message], told
    assert [message for message in told if "answers again, after" in message], told
