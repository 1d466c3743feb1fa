"""Danger: shards that follow a run miss changes, store rows of other shards, or do not say how far behind they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from followed_tables import FeedProcess, until, writer_at
from monolith.follow import Writer
from monolith.serve.follow import RunWriters
from monolith.serve.shards.following import ShardFollower
from monolith.serve.shards.front_end import sharded_replica
from monolith.serve.shards.shard_replica import ShardClientConfig
from monolith.serve.shards.shard_server import ShardConfig, ShardServer, load_shard
from monolith.table import EmbeddingTable, bucket_of
from serving_shards import FEATURES, SumModel, export_rows, fill

BATCH = {"user": torch.arange(0, 4000, 7), "item": torch.arange(0, 4000, 7)}


class OneRun(RunWriters):
    """A run whose only process is known."""

    def __init__(self, process: FeedProcess) -> None:
        super().__init__("run")
        self._process = process

    def writers(self) -> list[Writer]:
        return [writer_at(self._process.address)]

    def server(self, address: str) -> Writer:
        return writer_at(address)


@pytest.fixture
def model() -> SumModel:
    trained = SumModel()
    fill(trained.embeddings.store)
    return trained


@contextmanager
def followed(export: Path, run: RunWriters, shards: int) -> Iterator[list[ShardServer]]:
    """Run shards of an export that follow `run`."""
    with ExitStack() as stack:
        servers = []
        for number in range(shards):
            tables = load_shard(export, number, shards)
            follower = ShardFollower(tables, run)
            stack.callback(follower.close)
            config = ShardConfig(export=export, shard=number, shards=shards)
            servers.append(stack.enter_context(ShardServer(config, tables, lag=follower.lag)))
            assert follower.wait_until_read(60)
        yield servers


def change(tables: Sequence[EmbeddingTable], seed: int) -> None:
    chance = np.random.default_rng(seed)
    for table in tables:
        ids = chance.choice(4000, 500, replace=False)
        table.assign(ids, chance.normal(size=(500, table.dim)).astype(np.float32), event_time=100 + seed)
        table.erase(chance.choice(4000, 50, replace=False))


def test_rows_of_all_shards_are_those_of_the_run(model: SumModel, tmp_path: Path) -> None:
    export = export_rows(tmp_path)
    tables = dict(model.embeddings.store.tables)
    process = FeedProcess(tables, complete=True)
    run = OneRun(process)
    try:
        change(list(tables.values()), seed=1)  # between the export and the start of the shards
        with followed(export, run, 3) as servers:
            addresses = ",".join(server.address for server in servers)
            replica = sharded_replica("clicks", export, addresses, config=ShardClientConfig(timeout=30.0), run=run)
            try:
                for seed in range(2, 6):
                    change(list(tables.values()), seed=seed)
                    process.publish()
                    (store,) = replica.predictor.stores.values()
                    expected = {feature.name: rows_of(tables[feature.name]) for feature in FEATURES}
                    until(lambda want=expected: all(rows_in(servers, name) == want[name] for name in want))  # type: ignore[misc]
                    found = replica.predict(BATCH)["ctr"]
                    torch.testing.assert_close(found, model.eval()(BATCH).detach().sigmoid(), rtol=0, atol=1e-3)
                    lag = replica.lag()
                    assert lag is not None
                    assert lag.connected
                    assert lag.sequence > 0
                    assert store.stats()["user"].rows == len(tables["user"])
                for server in servers:
                    check_own_rows(server)
            finally:
                replica.close()
    finally:
        process.close()


def rows_of(table: EmbeddingTable) -> dict[int, tuple[float, ...]]:
    """Rows as a serving table stores them: those of `item` with 16 bits."""
    entries = table.entries()
    values = entries.values.half().float() if table.name == "item" else entries.values
    return dict(zip(entries.ids.tolist(), map(tuple, values.tolist()), strict=True))


def rows_in(servers: Sequence[ShardServer], name: str) -> dict[int, tuple[float, ...]]:
    found: dict[int, tuple[float, ...]] = {}
    for server in servers:
        for table in server.tables.collections[0].all():
            if table.name == name:
                found |= rows_of(table)
    return found


def check_own_rows(server: ShardServer) -> None:
    ((first, end),) = server.tables.description.ranges
    for table in server.tables.collections[0].all():
        buckets = bucket_of(table.entries().ids)
        assert len(buckets)
        assert ((buckets >= first) & (buckets < end)).all()


def test_the_lag_is_in_the_health_and_in_answers(model: SumModel, tmp_path: Path) -> None:
    export = export_rows(tmp_path)
    process = FeedProcess(dict(model.embeddings.store.tables), complete=True)
    try:
        with followed(export, OneRun(process), 1) as (server,):
            replica = sharded_replica("clicks", export, server.address, config=ShardClientConfig(timeout=30.0))
            try:
                assert replica.lag() is None, "the weights do not follow"
                replica.predict(BATCH)
                (store,) = replica.predictor.stores.values()
                lag = store.group.lag()  # type: ignore[attr-defined]
                assert lag is not None
                assert lag.connected
                assert lag.seconds >= 0
            finally:
                replica.close()
    finally:
        process.close()
