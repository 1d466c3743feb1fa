"""Danger: a model trained on servers cannot be exported, or only by a process with memory for all of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.ps import ParameterServer, ServerStore, tables_of
from monolith.serve import Predictor, export_model, load
from monolith.table import Fp16, Store
from monolith.train import Head

FEATURES = [Feature(name="user", dim=4), Feature(name="item", dim=3, compressor=Fp16())]
IDS = torch.arange(3000)
EXAMPLE: Batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}


class Sum(nn.Module):
    def __init__(self, store: Store | None = None) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(FEATURES, store)

    def forward(self, batch: Batch) -> torch.Tensor:
        found = self.embeddings(batch)
        return torch.cat([found["user"], found["item"]], dim=1).sum(dim=1)  # type: ignore[list-item]


def fill(store: Store) -> None:
    chance = torch.Generator().manual_seed(5)
    for name, dim in (("user", 4), ("item", 3)):
        store.assign(name, IDS, torch.randn(len(IDS), dim, generator=chance))


@contextmanager
def served(count: int = 2) -> Iterator[ServerStore]:
    servers = [ParameterServer() for _ in range(count)]
    try:
        with ServerStore([server.address for server in servers], tables_of(FEATURES)) as store:
            yield store
    finally:
        for server in servers:
            server.close()


def rows(predictor: Predictor) -> dict[str, dict[int, list[float]]]:
    (store,) = predictor.stores.values()
    return {
        name: {int(i): v.tolist() for ids, values in store.iter_rows(name) for i, v in zip(ids, values, strict=True)}
        for name in store.configs()
    }


def test_rows_on_servers_are_exported_as_those_of_one_process(tmp_path: Path) -> None:
    local = Sum()
    fill(local.embeddings.store)
    expected = load(export_model(local, EXAMPLE, tmp_path / "local", heads=[Head(name="ctr")]))
    with served() as store:
        fill(store)
        exported = load(export_model(Sum(store), EXAMPLE, tmp_path / "served", heads=[Head(name="ctr")]))
    assert rows(exported) == rows(expected)
    assert len(rows(exported)["item"]) == len(IDS)
    batch = {"user": torch.arange(2990, 3010), "item": torch.arange(20)}  # seen and unseen
    assert torch.equal(exported.predict(batch)["ctr"], expected.predict(batch)["ctr"])


class Watched:
    """A store whose rows are watched while they are exported."""

    def __init__(self, store: Store) -> None:
        self._store, self.chunks = store, list[int]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def iter_rows(self, table: str, *, chunk: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids, values in self._store.iter_rows(table, chunk=chunk):
            self.chunks.append(len(ids))
            yield ids, values


@pytest.mark.parametrize("kind", ["local", "served"])
def test_an_export_asks_for_few_rows_at_a_time(tmp_path: Path, kind: str) -> None:
    with served() as store:
        watched = Watched(Sum().embeddings.store if kind == "local" else store)
        fill(watched)  # type: ignore[arg-type]
        model = Sum(watched)  # type: ignore[arg-type]
        predictor = load(export_model(model, EXAMPLE, tmp_path, heads=[Head(name="ctr")], chunk=200))
    assert {name: len(found) for name, found in rows(predictor).items()} == {"user": 3000, "item": 3000}
    assert sum(watched.chunks) == 6000
    assert len(watched.chunks) >= 20
    assert max(watched.chunks) < 500, "about 200: a chunk of buckets or index blocks, never the whole table"


def test_rows_come_once_while_buckets_move() -> None:
    with ParameterServer() as one, ParameterServer() as two, ParameterServer() as three:
        both = [one.address, two.address]
        with ServerStore(both, tables_of(FEATURES)) as store, ServerStore(both, tables_of(FEATURES)) as mover:
            fill(store)
            chunks = store.iter_rows("user", chunk=100)
            found = [next(chunks)[0].numpy()]
            mover.rebalance([two.address, three.address])
            found += [ids.numpy() for ids, _ in chunks]
    assert np.sort(np.concatenate(found)).tolist() == IDS.tolist()


def test_a_table_there_is_not() -> None:
    with served(1) as store, pytest.raises(ConfigError, match="'other'"):
        next(store.iter_rows("other"))
    with pytest.raises(InvalidArgumentError, match="'other'"):
        next(Sum().embeddings.store.iter_rows("other"))
