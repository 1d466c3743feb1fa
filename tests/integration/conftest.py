"""Real servers for the tests of this folder, and clients of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from monolith.cluster import ZKServiceDiscovery
from monolith.testing.servers import ZooKeeperServer
from real_servers import zookeeper_server

if TYPE_CHECKING:
    from kazoo.client import KazooClient

Connect = Callable[..., ZKServiceDiscovery]


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    with zookeeper_server(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job name of the test's own."""
    return f"job.{abs(hash(request.node.name))}"


@pytest.fixture
def zk_connect(zookeeper: ZooKeeperServer, job: str) -> Iterator[Connect]:
    """Opens discoveries of the test's job, each a process of its own to ZooKeeper, and closes them at the end."""
    with ExitStack() as stack:

        def connect(**options: float) -> ZKServiceDiscovery:
            options = {"session_secs": 2.0, "delay": 0.1, **options}
            return stack.enter_context(ZKServiceDiscovery(job, zookeeper.address, **options))  # type: ignore[arg-type]

        yield connect


@pytest.fixture
def zk_client(zookeeper: ZooKeeperServer) -> Iterator[KazooClient]:
    """An ordinary client, to look at and damage the nodes."""
    import kazoo.client  # not for every test of this folder

    client = kazoo.client.KazooClient(zookeeper.address)
    client.start()
    yield client
    client.stop()
    client.close()
