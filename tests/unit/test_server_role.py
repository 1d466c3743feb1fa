"""Danger: a server of a run that nobody finds, that loses its folder, or shares the port of one that hangs."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from monolith.cluster import HostServiceDiscovery, TfConfigServiceDiscovery
from monolith.ps import ClientConfig, ParameterServer, ServerConfig
from monolith.ps.client.server_group import ServerGroup
from monolith.testing.servers import free_ports
from monolith.train import RunnerConfig
from monolith.train.job_end import shut_down
from monolith.train.server_role import announced, place_server, serve
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
