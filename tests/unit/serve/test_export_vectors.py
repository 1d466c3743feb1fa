"""Danger: a tower that is exported alone asks for the columns of the other one, or its vectors differ from those of training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.features import Feature
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head
from monolith.serve import export_model, load

BATCH = {"user": torch.arange(20), "item": torch.arange(20) * 7, "age": torch.rand(20, 1)}


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features = [
            Feature(name="user", dim=4),
            Feature(name="item", dim=4),
            Feature(name="friend", shared_with="user"),
        ]
        self.embeddings = EmbeddingBagCollection(features)
        self.user_tower, self.item_tower = nn.Linear(5, 3), nn.Linear(4, 3)

    def user_vector(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.user_tower(torch.cat([self.embeddings(batch)["user"], batch["age"]], dim=1))

    def item_vector(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.item_tower(self.embeddings(batch)["item"])

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.user_vector(batch) * self.item_vector(batch)).sum(1)


def test_each_tower_needs_its_own_columns_only(tmp_path: Path) -> None:
    model = TwoTowers()
    batch = {**BATCH, "friend": torch.arange(20)}
    model.embeddings(batch)["user"].sum().backward()
    model.embeddings.step()
    expected = {name: getattr(model, name)(batch) for name in ("user_vector", "item_vector")}
    for name, columns in (("user_vector", ("user", "age")), ("item_vector", ("item",))):
        predictor = load(export_model(model, batch, tmp_path / name, vectors=name))
        assert predictor.signature.columns == columns
        (output,) = predictor.signature.outputs
        assert (output.name, output.kind, output.shape) == (name, "vector", (3,))
        found = predictor.predict({column: BATCH[column] for column in columns})[name]
        assert torch.equal(found, expected[name].detach())
    assert not list((tmp_path / "item_vector").rglob("user.table"))
    # Named as in training, so they follow a run.
    assert {"item_tower.weight", "item_tower.bias"} <= set(predictor.weights)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has no method 'vector'"):
        export_model(TwoTowers(), {**BATCH, "friend": torch.arange(20)}, tmp_path, vectors="vector")
    with pytest.raises(InvalidArgumentError, match="not both"):
        export_model(TwoTowers(), BATCH, tmp_path)
    with pytest.raises(InvalidArgumentError, match="not both"):
        export_model(TwoTowers(), BATCH, tmp_path, heads=[Head(name="click")], vectors="user_vector")
