"""Danger: code above the tables asks a store for its class, and the next kind of store is forgotten in one of the branches."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import monolith
from monolith import EmbeddingTable
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.table import Bags, Gradient, LocalStore, Store
from monolith.table.store import Position, RestoreChoices
from monolith.testing import sgd_table_config

PACKAGE = Path(monolith.__file__).parent
ITEM = sgd_table_config(1, name="item")
BAGS = Bags(table="item", ids=np.array([1, 2]), offsets=np.array([0, 1, 2]))


def asks_for_a_class(tree: ast.AST) -> Iterator[int]:
    """Lines that ask which kind of store something is. Whether it is a `Store` at all may be asked."""
    for node in ast.walk(tree):
        named = {
            n.id if isinstance(n, ast.Name) else n.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Name | ast.Attribute)
        }
        check = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        )
        kinds = {name for name in named if name.endswith(("Store", "ServerGroup", "BucketGroup"))} - {"Store"}
        if check and kinds:
            yield node.lineno  # type: ignore[attr-defined]
        if isinstance(node, ast.Name | ast.Attribute | ast.FunctionDef) and "served_stores" in named:
            yield node.lineno


def test_nobody_outside_of_table_asks_for_the_class_of_a_store() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "table"
        for line in asks_for_a_class(ast.parse(path.read_text()))
    ]
    assert found == [], "what these need belongs into the Store protocol"


def test_the_scan_sees_each_way_of_asking() -> None:
    asking = (
        "isinstance(store, LocalStore)\nisinstance(a.b, table.ServerStore | Other)\nserved_stores(stores)\n"
        "issubclass(c, MyStore)\n"
    )
    assert sorted(set(asks_for_a_class(ast.parse(asking)))) == [1, 2, 3, 4]
    assert (
        list(asks_for_a_class(ast.parse("isinstance(storage, Folder)\nstore.remote\nisinstance(value, Store)\n"))) == []
    )


@pytest.fixture
def local() -> Store:
    return LocalStore([EmbeddingTable(ITEM)])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Store]:
    with (
        ParameterServer(ServerConfig(folder=tmp_path / "servers/0", log_flush_secs=None)) as one,
        ParameterServer(ServerConfig(folder=tmp_path / "servers/1", log_flush_secs=None)) as two,
        ServerStore([one.address, two.address], [ITEM], config=ClientConfig(worker="w")) as store,
    ):
        yield store


def test_rows_are_either_here_or_remote(local: Store, served: Store) -> None:
    assert isinstance(local, Store)
    assert isinstance(served, Store)
    assert (local.remote, list(local.tables)) == (False, ["item"])
    assert (served.remote, dict(served.tables)) == (True, {})
    assert local.collective == served.collective == frozenset()


def test_what_is_remote_saves_and_restores_itself(local: Store, served: Store, tmp_path: Path) -> None:
    choices: RestoreChoices = {"allow_new_tables": True}
    assert local.begin_save(str(tmp_path / "model.ckpt-1"), step=1).finish() == ()
    local.begin_restore(str(tmp_path / "model.ckpt-1"), only_fresh=False, **choices)()
    served.assign("item", [1, 2], torch.tensor([[1.0], [2.0]]))
    save = served.begin_save(str(tmp_path / "model.ckpt-1"), step=1)
    assert [Path(entry.name).parts[:2] for entry in save.finish()] == [("servers", "0"), ("servers", "1")]
    assert dict(save.dense) == {}


def test_only_what_is_remote_can_lose_rows_without_the_run(local: Store, served: Store) -> None:
    assert local.lost("", trained=True) == []
    assert served.lost("", trained=False) == []
    assert len(served.lost("", trained=True)) == 2
    served.mark_initialised()
    assert served.lost("model.ckpt-1", trained=True) == []


def test_positions_are_recorded_by_servers_for_workers_with_a_name(local: Store, served: Store) -> None:
    gradient = Gradient(bags=BAGS, values=torch.ones(2, 1))
    for store in (local, served):
        store.prefetch([BAGS])
        store.lookup([BAGS])
        store.apply([gradient], position=Position(batches=3))
    assert local.progress() is None
    now = served.progress()
    assert now is not None
    assert (now.behind, now.last_batch) == (None, 3)
    assert isinstance(served, ServerStore)
    with ServerStore(served.addresses, [ITEM], config=ClientConfig(worker="w")) as successor:
        after = successor.progress()
        assert after is not None
        assert after.behind is not None
        assert (after.behind.batches, after.last_batch) == (3, 3)
    with ServerStore(served.addresses, [ITEM]) as nameless:
        assert nameless.progress() is None
