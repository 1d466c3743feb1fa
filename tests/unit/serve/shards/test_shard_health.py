"""Danger: a dead or slow replica fails requests that another replica could answer, or is asked for ever or never again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.cluster import HostServiceDiscovery
from monolith.errors import ConfigError, DiscoveryError, OverloadedError, ProtocolError, UnavailableError
from monolith.serve import load
from monolith.serve.shards.addresses import (
    ShardAddresses,
    announced_shard,
    discovered_shards,
    open_discovery,
    parse_shards,
)
from monolith.serve.shards.lookup_scope import lookup_scope
from monolith.serve.shards.shard_map import ServedShard, choose_replica
from monolith.serve.shards.shard_replica import ShardClientConfig, ShardReplica
from monolith.serve.shards.shard_server import ShardConfig, ShardServer
from monolith.serve.shards.shard_store import ShardStore, open_shard_stores
from monolith.table import Bags, EmbeddingTable, Store, bucket_of
from real_servers import consul_server, zookeeper_server
from serving_shards import IDS, export_rows, shard_servers

USERS = Bags(table="user", ids=IDS.numpy(), offsets=np.arange(len(IDS) + 1))
QUICK = ShardClientConfig(start_secs=0.0, timeout=5.0)
PATIENCE = 30.0


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_rows(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def local(export: Path) -> Store:
    (store,) = load(export).stores.values()
    return store


def wait_until(is_so: Callable[[], bool]) -> None:
    """Look again until it is so: what is waited for happens in the thread of the group."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        if is_so():
            return
        pause.wait(0.02)
    raise AssertionError("it never happened")


def test_another_replica_answers_when_one_has_gone(export: Path, local: Store) -> None:
    with shard_servers(export, 2, replicas=2) as servers:
        addresses = parse_shards(";".join(",".join(s.address for s in servers[at : at + 2]) for at in (0, 2)))
        with open_shard_stores(addresses, config=QUICK) as opened:
            store = opened["embeddings"]
            wait_until(lambda: sum(one.healthy for one in store.group.status()) == 4)
            servers[0].close()
            for _ in range(8):
                assert torch.equal(store.lookup([USERS])[0], local.lookup([USERS])[0])
            status = {one.address: one for one in store.group.status()}
            if not status[servers[0].address].healthy:
                assert store.group.counters.retries >= 1
            assert store.group.counters.unanswered == 0


def test_the_only_replica(export: Path, local: Store) -> None:
    config = ShardConfig(export=export, shard=1, shards=2)
    with ShardServer(ShardConfig(export=export, shard=0, shards=2)) as zero:
        one = ShardServer(config)
        with open_shard_stores(f"{zero.address};{one.address}", config=QUICK) as opened:
            store = opened["embeddings"]
            assert torch.equal(store.lookup([USERS])[0], local.lookup([USERS])[0])
            one.close()
            with pytest.raises(
                UnavailableError, match=rf"buckets 2048\.\.4095: none of its 1 replicas .*{one.address}"
            ):
                store.lookup([USERS])
            with pytest.raises(UnavailableError):
                store.stats()
            # It is back at the same address, and found there by a probe.
            with ShardServer(config.model_copy(update={"port": one.port})):
                wait_until(lambda: all(status.healthy for status in store.group.status()))
                assert torch.equal(store.lookup([USERS])[0], local.lookup([USERS])[0])


def test_partial_answers_only_if_asked_for(export: Path, local: Store) -> None:
    config = QUICK.model_copy(update={"partial": "initial"})
    with ShardServer(ShardConfig(export=export, shard=0, shards=2)) as zero:
        one = ShardServer(ShardConfig(export=export, shard=1, shards=2))
        with open_shard_stores(f"{zero.address};{one.address}", config=config) as opened:
            store = opened["embeddings"]
            with lookup_scope() as report:
                assert torch.equal(store.lookup([USERS])[0], local.lookup([USERS])[0])
            assert not report.partial
            one.close()
            with lookup_scope() as report:
                (found,) = store.lookup([USERS])
            check_partial(found, local, report.missing_ids)
            assert report.missing_buckets == {(2048, 4096)}
            assert store.group.counters.missing_ids == report.missing_ids


def check_partial(found: torch.Tensor, local: Store, missing: int) -> None:
    """Ids of the second shard read as in an export without rows, the others as they are."""
    is_missing = torch.from_numpy(bucket_of(IDS) >= 2048)
    unseen = EmbeddingTable(local.configs()["user"]).lookup(IDS)
    assert torch.equal(found, torch.where(is_missing[:, None], unseen, local.lookup([USERS])[0]))
    assert int(is_missing.sum()) == missing > 0


def test_a_shard_that_starts_late(export: Path, local: Store) -> None:
    config = QUICK.model_copy(update={"partial": "initial"})
    with shard_servers(export, 2) as (zero, one):
        port, late = one.port, one.config
        one.close()
        with open_shard_stores(f"{zero.address};127.0.0.1:{port}", config=config) as opened:
            store = opened["embeddings"]
            with lookup_scope() as report:
                store.lookup([USERS])
            check_partial(store.lookup([USERS])[0], local, report.missing_ids)
            with ShardServer(late.model_copy(update={"port": port})):
                wait_until(lambda: not store.group.map.missing)
                assert torch.equal(store.lookup([USERS])[0], local.lookup([USERS])[0])


def test_a_replica_that_comes_back_with_another_export_is_not_used(
    export: Path, local: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        shard_servers(export, 1, replicas=2) as (kept, replaced),
        open_shard_stores(f"{kept.address},{replaced.address}", config=QUICK) as opened,
    ):
        store, port = opened["embeddings"], replaced.port
        replaced.close()
        with ShardServer(ShardConfig(export=export_rows(tmp_path, seed=6), port=port)):
            for _ in range(50):
                assert torch.equal(store.lookup([USERS])[0], local.lookup([USERS])[0])
            wait_until(lambda: "expected export" in caplog.text)
        assert [one.shard for one in store.group.status() if one.address == replaced.address] == [None]


def test_a_refused_request_does_not_count_against_the_replica(export: Path) -> None:
    config = ShardConfig(export=export, max_message_bytes=20_000)
    with ShardServer(config) as server, open_shard_stores(server.address, config=QUICK) as opened:
        with pytest.raises(ProtocolError, match="expected at most 20,000 bytes"):
            opened["embeddings"].lookup([USERS])
        assert [one.healthy for one in opened.group.status()] == [True]
        few = Bags(table="user", ids=np.arange(3), offsets=np.arange(4))
        assert opened["embeddings"].lookup([few])[0].shape == (3, 4)


def test_overload_is_reported_as_such(export: Path) -> None:
    with ShardServer(ShardConfig(export=export)) as server, open_shard_stores(server.address, config=QUICK) as opened:
        server._calls.max_requests = 0
        with pytest.raises(OverloadedError, match=server.address):
            opened["embeddings"].lookup([USERS])
        server._calls.max_requests = 8
        opened["embeddings"].lookup([USERS])


def replica_with(failures: int, outstanding: int, export: Path) -> ShardReplica:
    replica = ShardReplica("127.0.0.1:1", QUICK)
    replica.failures, replica.outstanding = failures, outstanding
    replica.described = object()  # type: ignore[assignment]
    return replica


def test_the_less_busy_replica_is_chosen(export: Path) -> None:
    busy, idle, failed = (replica_with(*numbers, export) for numbers in ((0, 5), (0, 1), (1, 0)))
    shard = ServedShard(ranges=((0, 4096),), replicas=(busy, idle, failed))
    assert {choose_replica(shard, ()) for _ in range(20)} == {idle}
    assert choose_replica(shard, [idle]) is busy
    assert choose_replica(shard, [idle, busy]) in (idle, busy, failed)
    assert choose_replica(ServedShard(ranges=((0, 1),), replicas=(replica_with(2, 0, export),)), ()) is None


def test_pauses_grow_and_failures_of_one_moment_count_once() -> None:
    now = [100.0]
    replica = ShardReplica("127.0.0.1:1", QUICK, clock=lambda: now[0])
    pauses = []
    for _ in range(10):
        replica.failed(UnavailableError("gone"), began=now[0])
        replica.failed(UnavailableError("gone too"), began=now[0] - 1)
        pauses.append(replica.retry_at - now[0])
        now[0] = replica.retry_at
    assert replica.failures == 10
    assert all(0.05 <= pause <= 10 for pause in pauses)
    assert pauses[-1] >= 5
    assert pauses[0] <= 0.1


class Listed:
    """A discovery that answers what the test wants."""

    def __init__(self, *groups: tuple[str, ...]) -> None:
        self.groups: ShardAddresses | Exception = groups
        self.calls = 0

    def __call__(self, count: int) -> ShardAddresses:
        self.calls += 1
        if isinstance(self.groups, Exception):
            raise self.groups
        return self.groups


def opened_at(find: Listed) -> ShardStore:
    return open_shard_stores(find, config=QUICK.model_copy(update={"refresh_secs": 0.05}))["embeddings"]


def refreshed(find: Listed, groups: ShardAddresses | Exception) -> None:
    find.groups, before = groups, find.calls
    wait_until(lambda: find.calls >= before + 2)


def test_a_list_that_vanishes_does_not_replace_a_good_one(export: Path, local: Store) -> None:
    with shard_servers(export, 2) as (zero, one):
        find = Listed((zero.address,), (one.address,))
        store = opened_at(find)
        try:
            for answer in ((), ((), ()), DiscoveryError("no answer"), ((zero.address,), ()), ((zero.address,),)):
                refreshed(find, answer)
                assert torch.equal(store.lookup([USERS])[0], local.lookup([USERS])[0]), answer
        finally:
            store.group.close()


def test_replicas_come_and_go(export: Path, local: Store) -> None:
    with shard_servers(export, 1, replicas=2) as (old, new):
        find = Listed((old.address,))
        store = opened_at(find)
        try:
            find.groups = ((new.address,),)
            # The old one leaves when another replica of its shard is known, not before.
            wait_until(lambda: [one.address for one in store.group.status() if one.healthy] == [new.address])
            assert torch.equal(store.lookup([USERS])[0], local.lookup([USERS])[0])
        finally:
            store.group.close()


def test_through_a_folder(export: Path, tmp_path: Path, local: Store) -> None:
    with shard_servers(export, 2) as servers, HostServiceDiscovery(tmp_path) as discovery:
        for number, server in enumerate(servers):
            discovery.register(f"serving_shard_{number}", 0, server.address)
        assert discovered_shards(discovery)(3) == ((servers[0].address,), (servers[1].address,), ())
        with open_shard_stores(f"file={tmp_path}", config=QUICK) as opened:
            assert torch.equal(opened["embeddings"].lookup([USERS])[0], local.lookup([USERS])[0])


@pytest.mark.parametrize("kind", ["consul", "zk"])
def test_through_a_real_discovery(
    kind: str, export: Path, tmp_path: Path, local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        if kind == "consul":
            known = stack.enter_context(consul_server(tmp_path))
            monkeypatch.setenv("CONSUL_HTTP_ADDR", known.address)
            text = "consul=clicks"
        else:
            text = f"zk=clicks@{stack.enter_context(zookeeper_server(tmp_path)).address}"
        servers = stack.enter_context(shard_servers(export, 2))
        discovery = stack.enter_context(open_discovery(text))
        with ExitStack() as announced:
            for number, server in enumerate(servers):
                announced.enter_context(announced_shard(discovery, number, 0, server.address))
            opened = stack.enter_context(open_shard_stores(text, config=QUICK))
            assert torch.equal(opened["embeddings"].lookup([USERS])[0], local.lookup([USERS])[0])
        wait_until(lambda: discovered_shards(discovery)(2) == ((), ()))


@pytest.mark.parametrize("text", ["", "a:1;", "a:1,,;", "zk=", "etcd=clicks", "a"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises((ConfigError, ValueError), match="expected"):
        open_discovery(text) if "=" in text else parse_shards(text)
