"""Danger: moving a model onto servers silently leaves rows or gradients behind."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Feature
from monolith.nn import EmbeddingBagCollection
from monolith.ps import ParameterServer, ServerStore, tables_of
from monolith.table import SGD, EmbeddingTable, LocalStore, Zeros
from monolith.testing import sgd_table_config

FEATURES = [Feature(name="user", dim=2, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))]
BATCH = {"user": torch.tensor([1, 2])}


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(FEATURES)


def train(embeddings: EmbeddingBagCollection) -> list[list[float]]:
    embeddings(BATCH)["user"].sum().backward()
    embeddings.step()
    return embeddings(BATCH)["user"].tolist()  # type: ignore[union-attr]


def test_an_untrained_collection_moves_and_trains_there() -> None:
    embeddings = collection()
    with ParameterServer() as server, ServerStore([server.address], tables_of(FEATURES)) as store:
        embeddings.use_store(store)
        assert train(embeddings) == [[-1.0, -1.0], [-1.0, -1.0]]
        assert store.stats()["user"].rows == 2


def test_rows_on_servers_stay_there_when_the_way_to_them_changes() -> None:
    embeddings = collection()
    with ParameterServer() as server:
        with ServerStore([server.address], tables_of(FEATURES)) as store:
            embeddings.use_store(store)
            train(embeddings)
        with ServerStore([server.address], tables_of(FEATURES)) as again:
            embeddings.use_store(again)
            assert train(embeddings) == [[-2.0, -2.0], [-2.0, -2.0]]


def test_rows_in_this_process_are_not_left_behind() -> None:
    embeddings = collection()
    train(embeddings)
    other = collection().store
    with pytest.raises(InvalidArgumentError, match="2 rows in this process"):
        embeddings.use_store(other)
    assert embeddings.store is not other


def test_gradients_that_wait_are_not_left_behind() -> None:
    embeddings, other = collection(), collection().store
    embeddings(BATCH)["user"].sum().backward()
    with pytest.raises(InvalidArgumentError, match="gradients wait"):
        embeddings.use_store(other)
    embeddings.discard_gradients()
    embeddings.use_store(other)
    assert embeddings.store is other


def test_a_store_with_other_tables_is_refused() -> None:
    embeddings = collection()
    before = embeddings.store
    with pytest.raises(ConfigError, match="no table 'user'"):
        embeddings.use_store(LocalStore([EmbeddingTable(sgd_table_config(2, name="item"))]))
    assert embeddings.store is before
