"""Danger: processes that find each other through Consul stay invisible when it forgets them, or visible after their death.

Against a real agent, which is stopped and restarted while they run; in development mode a restart forgets everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import consul
import pytest

from monolith import InvalidArgumentError
from monolith.cluster import ConsulServiceDiscovery, deregister_all
from monolith.errors import DiscoveryError
from monolith.testing.servers import ConsulServer
from real_servers import consul_server, until

Open = Callable[..., ConsulServiceDiscovery]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsulServer]:
    with consul_server(tmp_path_factory.mktemp("consul")) as server:
        yield server


@pytest.fixture
def connect(server: ConsulServer, job: str) -> Iterator[Open]:
    """Opens discoveries of the test's job and closes them at the end."""
    with ExitStack() as stack:

        def connect(**options: float) -> ConsulServiceDiscovery:
            discovery = ConsulServiceDiscovery(job, address=server.address, **options)  # type: ignore[arg-type]
            return stack.enter_context(discovery)

        yield connect


@pytest.fixture
def client(server: ConsulServer) -> Iterator[consul.Consul]:
    """An ordinary client, to look at and damage the entries."""
    client = consul.Consul(port=server.port)
    yield client
    client.http.session.close()


def die(discovery: ConsulServiceDiscovery) -> None:
    """Stop keeping entries alive without removing them, as a killed process does."""
    discovery._own.clear()
    discovery.close()


def test_who_registers_is_seen_by_all_until_it_leaves(connect: Open) -> None:
    here, there = connect(), connect()
    here.register("ps", 1, "h1:1")
    here.register("ps", 0, "[::1]:2")
    there.register("worker", 0, "h2:1")
    assert list(there.query("ps").items()) == [(0, "[::1]:2"), (1, "h1:1")]
    assert here.query_all() == {"ps": {0: "[::1]:2", 1: "h1:1"}, "worker": {0: "h2:1"}}
    here.deregister("ps", 0, "[::1]:2")
    here.deregister("ps", 1, "h1:1")
    here.deregister("ps", 1, "h1:1")
    until(lambda: there.query("ps") == {})
    assert there.query("worker") == {0: "h2:1"}


def test_registering_again_replaces(connect: Open) -> None:
    here, there = connect(), connect()
    here.register("ps", 0, "old:1")
    here.register("ps", 0, "new:1")
    assert there.query("ps") == {0: "new:1"}
    there.register("ps", 0, "newer:1")
    assert here.query("ps") == {0: "newer:1"}


def test_a_late_farewell_does_not_remove_the_successor(connect: Open) -> None:
    old, new = connect(), connect()
    old.register("ps", 0, "old:1")
    new.register("ps", 0, "new:1")
    old.deregister("ps", 0, "old:1")
    old.close()
    assert new.query("ps") == {0: "new:1"}


def test_entries_have_the_tags_of_the_original(connect: Open, client: consul.Consul, job: str) -> None:
    connect().register("worker", 12, "192.0.2.7:80")
    _, [entry] = client.health.service(job)
    assert sorted(entry["Service"]["Tags"]) == ["index:12", "ip:192.0.2.7", "name:worker"]
    assert (entry["Service"]["Address"], entry["Service"]["Port"]) == ("192.0.2.7", 80)


def test_closing_removes_what_this_process_registered(connect: Open) -> None:
    here, there = connect(), connect()
    here.register("ps", 0, "h0:1")
    there.register("ps", 1, "h1:1")
    here.close()
    here.close()
    until(lambda: there.query("ps") == {1: "h1:1"})
    with pytest.raises(DiscoveryError, match="closed"):
        here.register("ps", 0, "h0:1")


def test_the_living_stay_and_the_dead_vanish(connect: Open) -> None:
    watching, living, dying = connect(), connect(ttl_secs=1.0), connect(ttl_secs=1.0)
    living.register("ps", 0, "h0:1")
    dying.register("ps", 1, "h1:1")
    assert watching.query("ps") == {0: "h0:1", 1: "h1:1"}
    die(dying)
    until(lambda: watching.query("ps") == {0: "h0:1"})  # whoever dies first, the other must still be there


def test_consul_that_forgot_everything_is_told_again(connect: Open, server: ConsulServer) -> None:
    here, there = connect(ttl_secs=1.0), connect(ttl_secs=1.0)
    here.register("ps", 0, "h0:1")
    there.register("worker", 0, "h1:1")
    server.stop(kill=True)
    server.start()
    until(lambda: here.query("ps") == {0: "h0:1"} and there.query("worker") == {0: "h1:1"})


def test_one_that_was_replaced_meanwhile_gives_up_its_place(connect: Open) -> None:
    old, new = connect(ttl_secs=0.4), connect()
    old.register("ps", 0, "old:1")
    new.register("ps", 0, "new:1")
    until(lambda: ("ps", 0) not in old._own)
    assert new.query("ps") == {0: "new:1"}


def test_of_two_entries_for_one_place_the_latest_has_it(connect: Open, client: consul.Consul, job: str) -> None:
    """Two machines have two agents, and one cannot remove the entries of the other."""
    for number, host in enumerate(["first", "second", "third"]):
        tags = ["index:0", "name:ps", f"ip:{host}"]
        client.agent.service.register(job, service_id=f"{job}-{2 - number}", port=1, tags=tags)
    here = connect()
    until(lambda: here.query("ps") == {0: "third:1"})


@pytest.mark.parametrize("tags", [[], ["name:ps"], ["name:ps", "index:x", "ip:h"], ["name:ps", "index:1", "ip:"]])
def test_entries_of_others_are_nobody(connect: Open, client: consul.Consul, job: str, tags: list[str]) -> None:
    client.agent.service.register(job, service_id=f"{job}-other", port=1, tags=tags)
    here = connect()
    here.register("ps", 0, "h0:1")
    until(lambda: len(client.health.service(job)[1]) == 2)
    assert here.query_all() == {"ps": {0: "h0:1"}}


def test_all_can_be_taken_back_at_once(connect: Open, server: ConsulServer, client: consul.Consul, job: str) -> None:
    here, there = connect(), connect()
    here.register("ps", 0, "h0:1")
    there.register("worker", 0, "h1:1")
    here.deregister_all()
    until(lambda: client.health.service(job)[1] == [])
    for discovery, name in ((here, "ps"), (there, "worker")):
        discovery.register(name, 0, "h2:1")
        die(discovery)
    client.catalog.register(  # by a machine whose agent is gone
        "elsewhere",
        "192.0.2.9",
        service={"service": job, "id": "x", "port": 1, "tags": ["name:ps", "index:7", "ip:h7"]},
    )
    assert len(client.health.service(job)[1]) == 3
    deregister_all(job, address=server.address)
    until(lambda: client.health.service(job)[1] == [])


def test_answers_may_be_kept_for_a_while_without_anyone_waiting_for_another(connect: Open) -> None:
    """In the original a cached lookup waited for a lock that it held itself."""
    now = [0.0]
    here, there = connect(cache_secs=10.0, clock=lambda: now[0]), connect()
    there.register("ps", 0, "h0:1")
    assert here.query("ps") == {0: "h0:1"}
    there.register("ps", 0, "h1:1")
    answers: list[dict[int, str]] = []
    callers = [threading.Thread(target=lambda: answers.append(here.query("ps")), daemon=True) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert answers == [{0: "h0:1"}] * 8
    now[0] += 10
    assert here.query("ps") == {0: "h1:1"}
    here.register("ps", 1, "h2:1")  # what this process did it sees at once
    assert here.query("ps") == {0: "h1:1", 1: "h2:1"}


@pytest.mark.parametrize("name", ["", "a/b", ".x", "a b", "a?b"])
def test_a_job_that_cannot_be_a_service_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="consul_id"):
        ConsulServiceDiscovery(name)
