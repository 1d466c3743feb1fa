"""Danger: a front end without tables reads table files, or answers from a store whose rows are of another shape."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError
from monolith.features import Batch, Feature, Ragged
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head
from monolith.serve import export_model, load
from monolith.serve.manifest import CollectionSpec
from monolith.table import Bags, EmbeddingTable, LocalStore, Store


class Sides(nn.Module):
    heads = (Head(name="out", kind="regression"),)

    def __init__(self) -> None:
        super().__init__()
        self.left = EmbeddingBagCollection([Feature(name="user", dim=4, bias=True), Feature(name="tags", dim=2)])
        self.right = EmbeddingBagCollection(
            [Feature(name="item", dim=4, stack="s"), Feature(name="place", dim=4, stack="s")]
        )

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        left, right = self.left(batch), self.right(batch)
        return (left["user"] * right["s"].sum(1)).sum(1) + left["user.bias"].squeeze(1) + left["tags"].sum(1)


def batch_of(rows: int) -> Batch:
    ids = {name: torch.arange(rows) % 7 for name in ("user", "item", "place")}
    return {**ids, "tags": Ragged.from_lists([[1, 2]] * rows)}


class Elsewhere(LocalStore):
    """Rows in another process, as far as a caller can see: it answers with a list of tensors."""

    remote = True

    def lookup(self, requests: Sequence[Bags]) -> Sequence[Tensor]:
        return [super(Elsewhere, self).lookup([bags])[0] for bags in requests]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    model = Sides().eval()
    for collection in (model.left, model.right):
        for table in collection.store.tables.values():
            table.assign(np.arange(5), torch.randn(5, table.dim))
    return export_model(model, batch_of(3), tmp_path, heads=model.heads)


def test_a_store_elsewhere_answers_like_the_table_files(exported: Path, tmp_path: Path) -> None:
    here = load(exported)
    asked: list[str] = []

    def store(spec: CollectionSpec) -> Store:
        asked.append(spec.path)
        return Elsewhere([EmbeddingTable.load(tables / file) for file in spec.tables.values()])

    tables = tmp_path / "elsewhere"
    shutil.copytree(exported, tables)
    shutil.rmtree(exported / "tables")
    with pytest.raises(CorruptFileError, match="the file is missing"):
        load(exported)
    front_end = load(exported, store=store)
    assert asked == ["left", "right"]
    assert all(found.remote for found in front_end.stores.values())
    for rows in (1, 4, 4):
        for batch in (batch_of(rows), {**batch_of(rows), "tags": torch.arange(rows)}):
            assert torch.equal(front_end.predict(batch)["out"], here.predict(batch)["out"])


def test_the_other_files_are_checked_still(exported: Path) -> None:
    text = (exported / "signature.json").read_text()
    (exported / "signature.json").write_text(text + " ")
    with pytest.raises(CorruptFileError, match=r"signature\.json"):
        load(exported, store=lambda spec: LocalStore([]))


def test_a_store_without_the_tables_is_not_a_damaged_export(exported: Path) -> None:
    with pytest.raises(ConfigError, match="it has no table"):
        load(exported, store=lambda spec: LocalStore([]))


def test_errors_of_a_store_reach_the_caller(exported: Path) -> None:
    def unreachable(spec: CollectionSpec) -> Store:
        raise InvalidArgumentError("shards: nobody answers")

    with pytest.raises(InvalidArgumentError, match="nobody answers"):
        load(exported, store=unreachable)
