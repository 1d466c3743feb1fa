"""Danger: a job starts among the remains of another one in ZooKeeper, or the remains of a running job are cleared.

Against a real server.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from monolith.cluster import ZKServiceDiscovery, clear_zk_path
from monolith.testing.servers import ZooKeeperServer

DAY = 86_400
Open = Callable[..., ZKServiceDiscovery]


def test_nothing_to_clear(zookeeper: ZooKeeperServer, job: str) -> None:
    clear_zk_path(zookeeper.address, job, False)


def test_a_path_that_is_there_is_an_error_that_says_what_is_in_it(
    zookeeper: ZooKeeperServer, zk_connect: Open, zk_client: KazooClient, job: str
) -> None:
    zk_connect().register("ps", 0, "h0:1")
    with pytest.raises(ValueError, match=r"there are \[ps.0\] in monolith zk path"):
        clear_zk_path(zookeeper.address, job, False)
    assert zk_client.exists(f"/monolith/{job}/ps.0")


def test_force_removes_it_with_all_that_is_in_it(zookeeper: ZooKeeperServer, zk_client: KazooClient, job: str) -> None:
    zk_client.create(f"/monolith/{job}/deep/deeper", makepath=True)
    clear_zk_path(zookeeper.address, job, True)
    assert zk_client.exists(f"/monolith/{job}") is None


def test_only_what_is_old_and_without_life_is_removed(
    zookeeper: ZooKeeperServer, zk_connect: Open, zk_client: KazooClient, job: str
) -> None:
    zk_connect().register("ps", 0, "h0:1")  # a job that has been running all the time
    zk_client.create("/monolith/remains/ps.0", b"h1:1", makepath=True)
    now = zk_client.exists("/monolith/remains").mtime / 1000
    clear_zk_path(zookeeper.address, "another", False, clock=lambda: now + 63 * DAY - 60)
    assert zk_client.exists("/monolith/remains")
    clear_zk_path(zookeeper.address, "another", False, clock=lambda: now + 63 * DAY + 60)
    assert zk_client.exists("/monolith/remains") is None
    assert zk_client.exists(f"/monolith/{job}/ps.0")


def test_old_remains_of_the_job_itself_are_no_error(
    zookeeper: ZooKeeperServer, zk_client: KazooClient, job: str
) -> None:
    zk_client.create(f"/monolith/{job}/ps.0", makepath=True)
    now = zk_client.exists(f"/monolith/{job}").mtime / 1000
    clear_zk_path(zookeeper.address, job, False, clock=lambda: now + 64 * DAY)
    assert zk_client.exists(f"/monolith/{job}") is None


def test_what_cannot_be_removed_is_left(zookeeper: ZooKeeperServer, zk_client: KazooClient, job: str) -> None:
    zk_client.ensure_path("/monolith")
    zk_client.create(f"/monolith/{job}", acl=[make_digest_acl("me", "secret", all=True)])
    clear_zk_path(zookeeper.address, "another", False, clock=lambda: 4e9)
    assert zk_client.exists(f"/monolith/{job}")
