"""Danger: processes that find each other through ZooKeeper stay invisible after a lost session, or visible after their death.

Against a real server, which is stopped, restarted and emptied while they run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from monolith import ConfigError, InvalidArgumentError
from monolith.cluster import ZKServiceDiscovery
from monolith.errors import DiscoveryError
from monolith.testing.servers import ZooKeeperServer, free_ports
from real_servers import until

DAY = 86_400
Open = Callable[..., ZKServiceDiscovery]


def expire_session(discovery: ZKServiceDiscovery, zookeeper: ZooKeeperServer) -> None:
    """End the session of a discovery from outside, as the server does when a process was silent for too long."""
    thief = KazooClient(zookeeper.address, client_id=discovery._client.client_id)
    thief.start()
    thief.stop()
    thief.close()


def test_who_registers_is_seen_by_all_until_it_leaves(zk_connect: Open) -> None:
    here, there = zk_connect(), zk_connect()
    here.register("ps", 0, "h0:1")
    here.register("ps", 1, "[::1]:2")
    here.register("worker", 0, "h2:1")
    assert list(here.query("ps").items()) == [(0, "h0:1"), (1, "[::1]:2")]
    until(lambda: there.query("ps") == {0: "h0:1", 1: "[::1]:2"} and there.query("worker") == {0: "h2:1"})
    here.deregister("ps", 0, "h0:1")
    assert here.query("ps") == {1: "[::1]:2"}
    until(lambda: there.query("ps") == {1: "[::1]:2"})
    assert there.query("chief") == {}


def test_a_discovery_that_comes_later_sees_who_is_there(zk_connect: Open) -> None:
    zk_connect().register("ps", 3, "h3:1")
    assert zk_connect().query("ps") == {3: "h3:1"}


def test_registering_again_replaces(zk_connect: Open) -> None:
    here = zk_connect()
    here.register("ps", 0, "old:1")
    here.register("ps", 0, "new:1")
    assert here.query("ps") == {0: "new:1"}


def test_nodes_are_those_of_the_original(zk_connect: Open, zk_client: KazooClient, job: str) -> None:
    zk_connect().register("worker", 12, "h0:1")
    data, stat = zk_client.get(f"/monolith/{job}/worker.12")
    assert data == b"h0:1"
    assert stat.ephemeralOwner != 0


def test_a_successor_keeps_its_place_when_the_predecessor_goes(zk_connect: Open) -> None:
    old, new = zk_connect(), zk_connect()
    old.register("ps", 0, "old:1")
    new.register("ps", 0, "new:1")
    assert new.query("ps") == {0: "new:1"}
    old.deregister("ps", 0, "old:1")  # a late farewell
    old.close()  # the node would vanish here if only its data had been replaced
    third = zk_connect()
    assert third.query("ps") == {0: "new:1"}


def test_the_dead_vanish(zk_connect: Open, zookeeper: ZooKeeperServer) -> None:
    watching, dying = zk_connect(), zk_connect()
    dying.register("ps", 0, "h0:1")
    until(lambda: watching.query("ps") == {0: "h0:1"})
    dying.close()
    until(lambda: watching.query("ps") == {})


def test_all_can_be_taken_back_at_once(zk_connect: Open) -> None:
    here, there = zk_connect(), zk_connect()
    here.deregister_all()
    here.register("ps", 0, "h0:1")
    there.register("worker", 0, "h1:1")
    here.deregister_all()
    assert (here.query("ps"), here.query("worker")) == ({}, {})
    until(lambda: there.query("worker") == {})


@pytest.mark.parametrize("damage", ["wrong", "", "deleted", "made by hand"])
def test_periodic_registration_repairs(zk_connect: Open, zk_client: KazooClient, job: str, damage: str) -> None:
    path = f"/monolith/{job}/ps.0"
    here = zk_connect(registration_period_secs=0.3)
    here.register("ps", 0, "h0:1")
    if damage in ("deleted", "made by hand"):
        zk_client.delete(path)
    if damage == "made by hand":
        zk_client.create(path, b"elsewhere:1")
    if damage in ("wrong", ""):
        zk_client.set(path, damage.encode())
    until(
        lambda: zk_client.exists(path) and zk_client.get(path)[0] == b"h0:1" and zk_client.get(path)[1].ephemeralOwner
    )
    until(lambda: here.query("ps") == {0: "h0:1"})


def test_nodes_that_are_no_entries_are_nobody(zk_connect: Open, zk_client: KazooClient, job: str) -> None:
    here = zk_connect()
    here.register("ps", 0, "h0:1")
    for name in ("ps", "ps.x", "1", ".1", "ps.-1"):
        zk_client.create(f"/monolith/{job}/{name}", b"h9:1")
    for number, data in enumerate([b"", b"h9", b"\xff"]):
        zk_client.create(f"/monolith/{job}/ps.{number + 5}", data)
    zk_client.create(f"/monolith/{job}/ps.9", b"h9:1")
    until(lambda: 9 in here.query("ps"))
    assert here.query("ps") == {0: "h0:1", 9: "h9:1"}


def test_a_lost_session_registers_again(
    zk_connect: Open, zookeeper: ZooKeeperServer, zk_client: KazooClient, job: str
) -> None:
    path = f"/monolith/{job}/ps.0"
    here = zk_connect()
    here.register("ps", 0, "h0:1")
    first = zk_client.get(path)[1].ephemeralOwner
    expire_session(here, zookeeper)
    until(lambda: zk_client.exists(path) and zk_client.get(path)[1].ephemeralOwner != first)
    assert zk_client.get(path)[0] == b"h0:1"
    until(lambda: here.query("ps") == {0: "h0:1"})
    here.deregister("ps", 0, "h0:1")
    assert zk_client.exists(path) is None


def test_one_that_was_replaced_meanwhile_gives_up_its_place(
    zk_connect: Open, zookeeper: ZooKeeperServer, zk_client: KazooClient, job: str
) -> None:
    old, new = zk_connect(), zk_connect()
    old.register("ps", 0, "old:1")
    old.register("ps", 1, "old:2")
    new.register("ps", 0, "new:1")
    path = f"/monolith/{job}/ps.1"
    first = zk_client.get(path)[1].ephemeralOwner
    expire_session(old, zookeeper)
    # The other entry comes back: the keeper has been through its list.
    until(lambda: zk_client.exists(path) and zk_client.get(path)[1].ephemeralOwner != first)
    until(lambda: ("ps", 0) not in old._own)
    until(lambda: new.query("ps") == {0: "new:1", 1: "old:2"})
    assert zk_client.get(f"/monolith/{job}/ps.0")[0] == b"new:1"


def test_a_successor_is_not_fought_every_period(zk_connect: Open, zk_client: KazooClient, job: str) -> None:
    old, new = zk_connect(registration_period_secs=0.1), zk_connect()
    old.register("ps", 0, "old:1")
    new.register("ps", 0, "new:1")
    until(lambda: old._own == {})
    assert zk_client.get(f"/monolith/{job}/ps.0")[0] == b"new:1"


def test_a_server_that_restarts_is_no_event(zk_connect: Open, zookeeper: ZooKeeperServer) -> None:
    here, there = zk_connect(session_secs=20.0), zk_connect(session_secs=20.0)
    here.register("ps", 0, "h0:1")
    until(lambda: there.query("ps") == {0: "h0:1"})
    zookeeper.stop(kill=True)
    assert there.query("ps") == {0: "h0:1"}  # the last that was known
    zookeeper.start()
    here.register("ps", 1, "h1:1")
    until(lambda: there.query("ps") == {0: "h0:1", 1: "h1:1"})


def test_a_server_that_comes_back_empty_is_told_everything_again(zk_connect: Open, zookeeper: ZooKeeperServer) -> None:
    here, there = zk_connect(start_secs=2.0), zk_connect(start_secs=2.0)
    here.register("ps", 0, "h0:1")
    there.register("worker", 0, "h1:1")
    for _ in range(20):  # the more it has done, the longer it would turn away those who have seen it
        here.register("ps", 1, "h2:1")
        here.deregister("ps", 1, "h2:1")
    here._client.create("/forgotten")
    zookeeper.stop(kill=True)
    zookeeper.forget()
    zookeeper.start()
    fresh = zk_connect()  # the others answer from what they knew before
    assert fresh._client.exists("/forgotten") is None
    until(lambda: fresh.query("ps") == {0: "h0:1"} and fresh.query("worker") == {0: "h1:1"})
    fresh.register("worker", 1, "h3:1")
    until(lambda: here.query("worker") == {0: "h1:1", 1: "h3:1"})


def test_a_call_while_the_server_is_away_ends_with_an_error(zk_connect: Open, zookeeper: ZooKeeperServer) -> None:
    here = zk_connect(start_secs=1.0, max_tries=1)
    zookeeper.stop(kill=True)
    try:
        with pytest.raises(DiscoveryError, match="/monolith/"):
            here.register("ps", 0, "h0:1")
    finally:
        zookeeper.start()
    until(lambda: here._client.connected)
    here.register("ps", 0, "h1:1")
    assert here.query("ps") == {0: "h1:1"}


def test_a_closed_discovery_says_so(zk_connect: Open) -> None:
    here = zk_connect()
    here.close()
    here.close()
    with pytest.raises(DiscoveryError, match="closed"):
        here.register("ps", 0, "h0:1")


def test_nobody_there_is_an_error_in_time() -> None:
    [port] = free_ports(1)
    with pytest.raises(DiscoveryError, match=f"127.0.0.1:{port} within 0.5 seconds"):
        ZKServiceDiscovery("job", f"127.0.0.1:{port}", start_secs=0.5)


def test_no_server_at_all_is_an_error_before_anything_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONOLITH_ZK_HOSTS", raising=False)
    monkeypatch.delenv("MONOLITH_ZK_HOSTS_IPV6", raising=False)
    with pytest.raises(ConfigError, match=r"zk_server: .* MONOLITH_ZK_HOSTS"):
        ZKServiceDiscovery("job")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0", "-x"])
def test_a_job_name_that_would_be_another_path_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="job_name"):
        ZKServiceDiscovery(name, "127.0.0.1:1")


def test_credentials_come_from_the_environment(
    zookeeper: ZooKeeperServer, zk_client: KazooClient, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    zk_client.ensure_path("/monolith")
    zk_client.create(f"/monolith/{job}", acl=[make_digest_acl("me", "secret", all=True)])
    monkeypatch.setenv("ZK_AUTH", "me:wrong")
    with pytest.raises(DiscoveryError, match="NoAuth"):
        ZKServiceDiscovery(job, zookeeper.address)
    monkeypatch.setenv("ZK_AUTH", "me:secret")
    with ZKServiceDiscovery(job, zookeeper.address) as here:
        here.register("ps", 0, "h0:1")
        assert here.query("ps") == {0: "h0:1"}
