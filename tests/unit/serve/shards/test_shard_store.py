"""Danger: rows that come from shards differ from those of one process, or a request is sent to a shard of another export."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError, InvalidArgumentError, UnavailableError
from monolith.nn import EmbeddingBagCollection
from monolith.serve import load
from monolith.serve.shards.shard_replica import ShardClientConfig
from monolith.serve.shards.shard_server import ShardConfig, ShardServer
from monolith.serve.shards.shard_store import ShardStore, ShardStores, open_shard_stores
from monolith.table import Bags, LocalStore, Store
from serving_shards import FEATURES, IDS, export_rows, shard_servers

TOKEN = "a-token-of-the-shards"
QUICK = ShardClientConfig(start_secs=0.0)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_rows(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def local(export: Path) -> Store:
    (store,) = load(export).stores.values()
    return store


@pytest.fixture(scope="module")
def stores(export: Path) -> Iterator[ShardStores]:
    with shard_servers(export, 3) as servers:
        addresses = ",".join(server.address for server in servers)
        with open_shard_stores(addresses, config=ShardClientConfig(pool_on_shards=False, start_secs=0.0)) as opened:
            yield opened


@pytest.fixture
def store(stores: ShardStores) -> ShardStore:
    return stores["embeddings"]


def bags_of(table: str, count: int, *, pooling: str = "sum", seed: int = 0) -> Bags:
    """Bags of 0 to 9 ids, seen and unseen ones, some repeated."""
    chance = np.random.default_rng(seed)
    sizes = chance.integers(0, 10, count)
    ids = chance.integers(0, 2 * len(IDS), sizes.sum())
    return Bags(table=table, ids=ids, offsets=np.concatenate([[0], np.cumsum(sizes)]), pooling=pooling)  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
def test_rows_equal_those_of_one_process_bit_for_bit(store: ShardStore, local: Store, pooling: str) -> None:
    requests = [bags_of("user", 200, pooling=pooling), bags_of("item", 100, pooling=pooling, seed=1)]
    for found, expected in zip(store.lookup(requests), local.lookup(requests), strict=True):
        assert torch.equal(found, expected)


def test_bags_that_shards_pool(export: Path, local: Store) -> None:
    requests = [Bags(table="user", ids=np.arange(5000), offsets=np.array([0, 2000, 2000, 5000]), pooling="mean")]
    with shard_servers(export, 2) as (one, two), open_shard_stores(((one.address,), (two.address,))) as opened:
        (found,) = opened["embeddings"].lookup(requests)
    torch.testing.assert_close(found, local.lookup(requests)[0], rtol=1e-5, atol=1e-5)


def test_requests_without_ids(store: ShardStore) -> None:
    empty = Bags(table="user", ids=np.empty(0, dtype=np.int64), offsets=np.zeros(4, dtype=np.int64))
    assert torch.equal(store.lookup([empty])[0], torch.zeros(3, 4))
    assert store.lookup([]) == []


def test_ids_of_one_shard_ask_only_that_one(store: ShardStore) -> None:
    before = store.group.counters.requests
    store.lookup([Bags(table="user", ids=np.array([7]), offsets=np.array([0, 1]))])
    assert store.group.counters.requests == before + 1


def test_a_collection_predicts_as_over_local_tables(export: Path, store: ShardStore, local: Store) -> None:
    batch = {"user": torch.arange(2990, 3010), "item": torch.arange(20)}
    found = EmbeddingBagCollection(FEATURES, store).eval()(batch)
    expected = EmbeddingBagCollection(FEATURES, local).eval()(batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)  # type: ignore[arg-type]


def test_everything_else_that_can_be_read(store: ShardStore, local: Store) -> None:
    assert {name: stats.rows for name, stats in store.stats().items()} == {"user": 3000, "item": 3000}
    ids = torch.tensor([5, 2999, 3000, 17])
    assert torch.equal(store.lookup_entry("user", ids).values, local.lookup_entry("user", ids).values)
    assert store.lookup_entry("user", ids).found.tolist() == [True, True, False, True]
    assert rows_of(store, "item") == rows_of(local, "item")
    assert len(rows_of(store, "item")) == 3000
    assert store.configs()["user"].segments == local.configs()["user"].segments


def rows_of(store: Store, table: str) -> dict[int, list[float]]:
    chunks = store.iter_rows(table, chunk=200)
    return {int(i): value.tolist() for ids, values in chunks for i, value in zip(ids, values, strict=True)}


READS = {"configs", "stats", "lookup", "lookup_entry", "slot_counts", "iter_rows", "prefetch", "is_initialised", "lost"}
READS |= {"progress", "moved_on", "close"}


def test_every_method_that_changes_something_is_refused(store: ShardStore) -> None:
    methods = {name for name, member in inspect.getmembers(LocalStore, inspect.isfunction) if not name.startswith("_")}
    for name in methods - READS:
        method = getattr(store, name)
        given = {
            parameter.name: None
            for parameter in inspect.signature(method).parameters.values()
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        }
        with pytest.raises(InvalidArgumentError, match=f"{name}: rows on embedding shards are read-only"):
            method(**given)
    assert isinstance(store, Store)


def test_unknown_tables_and_collections(stores: ShardStores, store: ShardStore) -> None:
    with pytest.raises(InvalidArgumentError, match="no 'other'; they have 'user', 'item'"):
        store.lookup([Bags(table="other", ids=np.arange(1), offsets=np.array([0, 1]))])
    with pytest.raises(ConfigError, match="expected one of 'embeddings', got 'towers'"):
        ShardStore(stores.group, "towers")


def test_shards_of_another_export_are_refused(export: Path, tmp_path: Path) -> None:
    other = export_rows(tmp_path, seed=6)
    with (
        ShardServer(ShardConfig(export=export, shard=0, shards=2)) as one,
        ShardServer(ShardConfig(export=other, shard=1, shards=2)) as two,
    ):
        both = f"{one.address};{two.address}"
        with pytest.raises(ConfigError, match=r"serves version .* expected export"):
            open_shard_stores(both, config=QUICK)
        with pytest.raises(ConfigError, match="expected export 00000"):
            open_shard_stores(one.address, export="0" * 64, config=QUICK)


def test_gaps_and_overlaps_are_refused(export: Path) -> None:
    with shard_servers(export, 2) as (zero, one), ShardServer(ShardConfig(export=export)) as whole:
        with pytest.raises(UnavailableError, match=r"serves the buckets 2048\.\.4095"):
            open_shard_stores(zero.address, config=QUICK)
        with pytest.raises(ConfigError, match="both serve buckets"):
            open_shard_stores(f"{zero.address},{one.address},{whole.address}", config=QUICK)
        with pytest.raises(ConfigError, match="write , between replicas of one shard and ; between shards"):
            open_shard_stores(f"{zero.address},{one.address};127.0.0.1:1", config=QUICK)


def test_a_token_is_required(export: Path) -> None:
    with ShardServer(ShardConfig(export=export, token=TOKEN)) as server:
        with pytest.raises(UnavailableError, match="AuthenticationError"):
            open_shard_stores(server.address, config=QUICK)
        with open_shard_stores(server.address, config=ShardClientConfig(token=TOKEN)) as opened:
            assert opened["embeddings"].stats()["user"].rows == 3000


def test_an_open_address_needs_tls_and_a_token(export: Path) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        ShardServer(ShardConfig(export=export, host="0.0.0.0"))
