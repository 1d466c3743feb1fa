"""Danger: parameter servers are trained, moved, killed and restored while replicas follow them. A replica whose rows differ from
the servers' afterwards serves wrong predictions until it is started again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from followed_tables import DIM, Copies, Rows, following, table, until, writer_at
from monolith.follow import Writer
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.ps.client.server_parameters import ServerParameters
from monolith.ps.protocol.dense_optimizers import DenseOptimizer
from monolith.table import Bags, Gradient

CONFIG = table().config


def server(folder: Path | None = None, port: int = 0) -> ParameterServer:
    return ParameterServer(ServerConfig(folder=folder, port=port, feed_secs=0.01))


def push(store: ServerStore, ids: np.ndarray, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(len(ids), DIM)).astype(np.float32)
    bags = Bags(table="item", ids=ids, offsets=np.arange(len(ids) + 1))
    store.apply([Gradient(bags=bags, values=torch.from_numpy(values))], step=seed)


def rows_of(store: ServerStore) -> Rows:
    found: Rows = {}
    for ids, values in store.iter_rows("item"):
        found |= dict(zip(ids.tolist(), map(tuple, values.tolist()), strict=True))
    return found


def writers(*servers: ParameterServer) -> list[Writer]:
    return [writer_at(one.address, one.address) for one in servers]


def test_two_servers_are_followed_and_their_steps_reported() -> None:
    with server() as a, server() as b, ServerStore([a.address, b.address]) as store:
        store.declare([CONFIG])
        push(store, np.arange(1000), 1)
        copies = Copies()
        with following(copies, *writers(a, b)) as follower:
            assert copies.rows() == rows_of(store)
            push(store, np.arange(500, 2000), 2)
            until(lambda: copies.rows() == rows_of(store))
            until(lambda: all(one.step == 2 for one in follower.progress.values()))


def test_rows_of_servers_between_which_buckets_move() -> None:
    with server() as a, server() as b, server() as c, ServerStore([a.address, b.address]) as store:
        store.declare([CONFIG])
        copies = Copies()
        with following(copies, *writers(a, b), find_writer=lambda address: writer_at(address, address)) as follower:
            for seed in range(3):
                push(store, np.arange(3000), seed)
            store.rebalance([b.address, c.address])
            for seed in range(3, 6):
                push(store, np.random.default_rng(seed).integers(0, 4000, 500), seed)
            until(lambda: copies.rows() == rows_of(store))
            assert c.address in follower.progress
            store.rebalance([a.address, b.address])
            push(store, np.arange(100), 9)
            until(lambda: copies.rows() == rows_of(store))


def test_a_server_that_is_started_again_is_followed_without_reading_all_rows(tmp_path: Path) -> None:
    copies = Copies()
    one = server(tmp_path / "ps")
    port = one.port
    try:
        with ServerStore([one.address]) as store:
            store.declare([CONFIG])
            with following(copies, *writers(one)) as follower:
                (progress,) = follower.progress.values()
                seed = 0
                while progress.durable < 3:
                    push(store, np.arange(1000), seed := seed + 1)
                    until(lambda: copies.rows() == rows_of(store))
                one.close()
                one = server(tmp_path / "ps", port)
                until(lambda: progress.resyncs + progress.rewinds == 2)
                push(store, np.arange(500, 1500), 100)
                until(lambda: copies.rows() == rows_of(store))
                # Its process published from its beginning, because the earlier one was followed.
                assert progress.rewinds == 1
    finally:
        one.close()


def test_dense_parameters_of_servers_are_followed() -> None:
    with server() as a, server() as b, ServerStore([a.address, b.address]) as store:
        store.declare([CONFIG])
        values = {"w": torch.ones(3), "v": torch.zeros(2, 2)}
        ServerParameters(store, values, DenseOptimizer.of(torch.optim.SGD))
        copies = Copies()
        with following(copies, *writers(a, b)):
            until(lambda: {name for weights in copies.weights for name in weights} == {"v", "w"})
            found = {name: array for weights in copies.weights for name, array in weights.items()}
            assert found["w"].tolist() == [1.0, 1.0, 1.0]
