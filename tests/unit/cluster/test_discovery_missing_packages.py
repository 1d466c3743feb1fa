"""Danger: who needs no ZooKeeper, Consul or Ray must install their clients, or who does gets an error without the way out."""

from __future__ import annotations

import sys

import pytest

from monolith.cluster import ConsulServiceDiscovery, RayServiceDiscovery, ZKServiceDiscovery, clear_zk_path
from monolith.errors import MissingPackageError


@pytest.fixture
def _without_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("consul", "kazoo", "ray"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kazoo", None)
    monkeypatch.setitem(sys.modules, "consul", None)
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.usefixtures("_without_clients")
def test_the_error_has_the_command_that_helps() -> None:
    zookeeper = r"ZooKeeper needs the package 'kazoo'; .*: pip install 'monolith-torch\[zookeeper\]'"
    with pytest.raises(MissingPackageError, match=zookeeper):
        ZKServiceDiscovery("job", "127.0.0.1:1")
    with pytest.raises(ImportError, match=zookeeper):
        clear_zk_path("127.0.0.1:1", "job", False)
    with pytest.raises(
        MissingPackageError, match=r"Consul needs .* 'consul'; .*: pip install 'monolith-torch\[consul\]'"
    ):
        ConsulServiceDiscovery("job", address="127.0.0.1:1")
    with pytest.raises(MissingPackageError, match=r"Ray needs .* 'ray'; .*: pip install 'monolith-torch\[ray\]'"):
        RayServiceDiscovery("job", "127.0.0.1:1")
