"""Danger: a run that starts from nothing finds rows, optimizer state or positions of an earlier attempt on its servers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.ps import ClientConfig, DenseOptimizer, ParameterServer, ServerConfig, ServerParameters, ServerStore
from monolith.ps.protocol.messages import DeclaredTable
from monolith.table import Adagrad, Bags, Gradient, Segment, SlidingAdmission, TableConfig
from monolith.table.store import Position

ITEM = TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adagrad(learning_rate=0.5)),))
USER = DeclaredTable(
    config=TableConfig(name="user", segments=(Segment(dim=1),)), admission=SlidingAdmission(default_threshold=2)
)
IDS = np.arange(10)


def store_of(server: ParameterServer, epoch: int) -> ServerStore:
    return ServerStore([server.address], [ITEM, USER], config=ClientConfig(worker="w0", epoch=epoch))


def push(store: ServerStore, batch: int) -> None:
    gradients = [
        Gradient(bags=Bags(table=name, ids=IDS, offsets=np.arange(11)), values=torch.ones(10, dim))
        for name, dim in (("item", 2), ("user", 1))
    ]
    store.apply(gradients, step=batch, position=Position(batches=batch))


def test_a_server_that_was_emptied_is_as_when_it_was_new(tmp_path: Path) -> None:
    config = ServerConfig(folder=tmp_path / "ps" / "0")
    with ParameterServer(config) as server, store_of(server, 1) as store:
        ServerParameters(store, {"w": torch.zeros(3)}, DenseOptimizer.of(torch.optim.SGD, lr=0.1))
        store.mark_initialised()
        push(store, 1)
        assert store.moved_on("") == [server.address]
        assert store.moved_on("model.ckpt-1") == [server.address]
        store.begin_restore(None, only_fresh=False)()
        assert store.moved_on("") == []
        assert not store.is_initialised()
        assert [one.rows for one in store.stats().values()] == [0, 0]
        push(store, 1)
        # Neither the count of the admission filter nor the position of the worker is left.
        assert {name: one.rows for name, one in store.stats().items()} == {"item": 10, "user": 0}
        assert store.lookup_entry("item", IDS).slots["0/norm"].unique().tolist() == pytest.approx([1.1])
        store.begin_restore(None, only_fresh=False)()
        assert store.health()[0]["dense"] == 0
    with ParameterServer(config) as again, store_of(again, 2) as store:
        assert [one.rows for one in store.stats().values()] == [0, 0]
        assert store.moved_on("") == []
