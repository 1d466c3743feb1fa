"""Danger: a server of a run that cannot be found, that loses its folder, or shares the port of one that hangs."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path
from typing import cast

import pytest

from monolith.cluster import HostServiceDiscovery, TfConfigServiceDiscovery
from monolith.cluster.liveness import Liveness
from monolith.errors import WorkerLostError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig
from monolith.ps.client.server_group import ServerGroup
from monolith.testing.servers import free_ports
from monolith.train import RunnerConfig
from monolith.train.distributed.run import shut_down
from monolith.train.distributed.server import announced, place_server, serve, wait_for_end
from real_servers import until


def runner(model_dir: Path | str, index: int = 0) -> RunnerConfig:
    return RunnerConfig(server_type="ps", index=index, num_ps=2, model_dir=str(model_dir))


def test_it_serves_under_its_index_until_the_chief_ends_it(tmp_path: Path) -> None:
    discovery = HostServiceDiscovery(tmp_path / "discovery")
    thread = threading.Thread(target=serve, args=(runner(tmp_path, 1), discovery), daemon=True)
    thread.start()
    until(lambda: discovery.query("ps"))
    found = discovery.query("ps")
    assert list(found) == [1]
    with ServerGroup([found[1]]) as group:
        assert group.health()[0]["folder"] is True
    assert shut_down([found[1]], ClientConfig()) == []
    thread.join(60)
    assert not thread.is_alive()
    assert discovery.query("ps") == {}
    assert (tmp_path / "ps" / "1").is_dir()


def test_what_the_scheduler_expects_is_where_it_listens() -> None:
    tf_config = '{"cluster": {"ps": ["127.0.0.1:7001"], "worker": ["h:1"]}, "task": {"type": "ps", "index": 0}}'
    discovery = TfConfigServiceDiscovery(tf_config)
    placed = place_server(ServerConfig(), runner(""), discovery)
    assert (placed.host, placed.port, placed.folder) == ("127.0.0.1", 7001, None)
    assert place_server(ServerConfig(host="0.0.0.0"), runner(""), discovery).host == "0.0.0.0"


def test_a_folder_of_its_own_is_kept_and_a_remote_model_dir_gives_none(tmp_path: Path) -> None:
    discovery = HostServiceDiscovery(tmp_path)
    own = place_server(ServerConfig(folder=tmp_path / "own", take_over=False), runner("/mnt/run"), discovery)
    assert (own.folder, own.take_over) == (tmp_path / "own", False)
    assert place_server(ServerConfig(), runner("s3://bucket/run"), discovery).folder is None


def test_a_successor_takes_the_port_of_its_predecessor(tmp_path: Path) -> None:
    discovery = HostServiceDiscovery(tmp_path)
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        address = f"127.0.0.1:{port}"
        discovery.register("ps", 0, address)
        # Someone is there, perhaps only hanging: its port is not shared.
        assert place_server(ServerConfig(), runner(tmp_path), discovery).port == 0
    assert place_server(ServerConfig(), runner(tmp_path), discovery).port == port
    assert place_server(ServerConfig(), runner(tmp_path, 1), discovery).port == 0
    assert place_server(ServerConfig(port=7), runner(tmp_path), discovery).port == 7
    discovery.register("ps", 0, "elsewhere:7001")
    assert place_server(ServerConfig(), runner(tmp_path), discovery).port == 0


def test_who_leaves_late_does_not_hide_its_successor(tmp_path: Path) -> None:
    discovery = HostServiceDiscovery(tmp_path)
    with ParameterServer() as server, announced(server, runner(tmp_path), discovery) as address:
        assert discovery.query("ps") == {0: address}
        discovery.register("ps", 0, "successor:1")
    assert discovery.query("ps") == {0: "successor:1"}


class Forsaken:
    """A server that nobody calls, on a clock of its own that moves while it waits."""

    silence = 0.0

    def wait(self, timeout: float) -> bool:
        self.silence += timeout
        return self.silence > 50_000


@pytest.mark.parametrize(
    ("settings", "ends"), [({}, False), ({"supervised": True}, True), ({"enable_realtime_training": True}, True)]
)
def test_a_server_without_workers_says_so_and_does_not_wait_for_ever(
    settings: dict[str, bool], ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Forsaken()
    run = RunnerConfig(server_type="ps", liveness=Liveness(orphan_secs=7200.0), **settings)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "monolith.train.distributed.server"):
        if ends:
            wait_for_end(cast(ParameterServer, server), run, clock=lambda: server.silence)
        else:
            with pytest.raises(WorkerLostError, match=r"no worker has called parameter server 0 for 7200 s"):
                wait_for_end(cast(ParameterServer, server), run, clock=lambda: server.silence)
    until_when = "" if ends else ", at most 6980 s more"
    said = "parameter server 0: waiting for a worker to call, none has for longer than a restart takes"
    assert caplog.messages[0] == said + until_when
    assert len(caplog.messages) == (83 if ends else 12), "every ten minutes"


def test_health_checks_are_no_sign_of_a_worker(tmp_path: Path) -> None:
    with ParameterServer() as server, ServerGroup([server.address]) as group:
        called = server._dispatcher._called_at
        group.health()
        assert server._dispatcher._called_at == called
        group.is_initialised()
        assert server._dispatcher._called_at > called
