"""Danger: rows that somebody asked to remove stay on one of several servers or ranks, or a repeated request counts twice."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable
from monolith.errors import ConfigError, InvalidArgumentError, OwnershipChangedError
from monolith.ps import ClientConfig, ParameterServer, ServerStore
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import Push, TableWrite
from monolith.ranks.rank_store import RankStore
from monolith.table import LocalStore, Store
from monolith.testing import sgd_table_config
from rank_tables import run_stores

ITEM = sgd_table_config(2, name="item")
IDS = np.arange(-50, 50) * 2**40 + 3


def local(check: Callable[[Store], None]) -> None:
    check(LocalStore([EmbeddingTable(ITEM)]))


def servers(check: Callable[[Store], None]) -> None:
    with ParameterServer() as one, ParameterServer() as two, ServerStore([one.address, two.address], [ITEM]) as store:
        check(store)


def ranks(check: Callable[[Store], None]) -> None:
    def rank(store: RankStore) -> None:
        if store.agreement.mesh.rank == 0:
            check(store)

    run_stores(2, rank, [ITEM])  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [local, servers, ranks])
def test_rows_are_removed_wherever_they_are(kind: Callable[[Callable[[Store], None]], None]) -> None:
    def check(store: Store) -> None:
        store.assign("item", IDS, torch.ones(100, 2))
        assert store.erase("item", [*IDS[:30], *IDS[:30], 1, 2]) == 30
        assert store.lookup_entry("item", IDS).found.tolist() == [False] * 30 + [True] * 70
        assert store.stats()["item"].rows == 70
        assert store.erase("item", IDS[:30]) == 0
        assert store.erase("item", []) == 0
        with pytest.raises((InvalidArgumentError, ConfigError), match=r"no 'user'|not declared 'user'"):
            store.erase("user", IDS)

    kind(check)


def test_a_server_removes_at_most_once_and_only_what_it_owns() -> None:
    with ParameterServer() as server, ServerStore([server.address], [ITEM], config=ClientConfig(worker="w")) as store:
        store.assign("item", IDS, torch.ones(100, 2))
        push = Push(worker="w", epoch=store.epoch, sequence=50)
        write = TableWrite(push=push, table="item", map=1).model_dump_json()
        link = store.links[0]
        assert json.loads(link.call(Call.ERASE, write, [IDS[:10]]).text) == {"erased": 10}
        store.assign("item", IDS, torch.ones(100, 2))
        # The same push again, as after a lost answer: the same answer, and the new rows stay.
        assert json.loads(link.call(Call.ERASE, write, [IDS[:10]]).text) == {"erased": 10}
        assert store.stats()["item"].rows == 100
        other = TableWrite(push=Push(worker="w", epoch=store.epoch, sequence=51), table="item", map=99)
        with pytest.raises(OwnershipChangedError):
            link.call(Call.ERASE, other.model_dump_json(), [IDS])
        wrong = TableWrite(push=Push(worker="w", epoch=store.epoch, sequence=52), table="item", map=1)
        with pytest.raises(InvalidArgumentError, match="ids"):
            link.call(Call.ERASE, wrong.model_dump_json(), [IDS.astype(np.float32)])
        assert store.stats()["item"].rows == 100
