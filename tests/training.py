"""A small model with dense and sparse parameters, and data for it, shared by the tests of training and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from monolith.features import Feature, Ragged
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection, dense_state_dict
from monolith.table import SGD, Adagrad
from monolith.train import Head, StepResult, Trainer
from monolith.train.hooks import Hook

FEATURES = (
    Feature(name="user", dim=4, optimizer=Adagrad(learning_rate=0.1)),
    Feature(name="item", slot=1, dim=4, optimizer=SGD(learning_rate=0.1), bias=True),
    Feature(name="tags", slot=2, dim=4, optimizer=SGD(learning_rate=0.1), bias=True, pooling="mean"),
)


class ClickModel(nn.Module):
    """Two heads over three features and a dense column."""

    heads = (Head(name="click", label="clicked"), Head(name="stay", label="seconds", kind="regression", weight=0.1))

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embeddings = EmbeddingBagCollection(FEATURES, seed=seed)
        self.mlp = nn.Sequential(nn.Linear(13, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        rows = self.embeddings(batch)
        dense = torch.cat([rows["user"], rows["item"], rows["tags"], batch["age"]], dim=1)
        out = self.mlp(dense)
        return {"click": out[:, 0] + rows["item.bias"].squeeze(1), "stay": out[:, 1]}


def batch_of(number: int, rows: int = 8) -> Batch:
    """Batch `number` of an endless stream; ids repeat between batches."""
    random = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (rows,), generator=random)
    splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return {
        "user": torch.randint(0, 20, (rows,), generator=random),
        "item": torch.randint(0, 10, (rows,), generator=random),
        "tags": Ragged(torch.randint(0, 10, (int(splits[-1]),), generator=random), splits),
        "age": torch.rand(rows, 1, generator=random),
        "clicked": torch.randint(0, 2, (rows,), generator=random).float(),
        "seconds": torch.rand(rows, generator=random),
        "time": torch.full((rows,), 1000 + number),
    }


class Stream:
    """A resumable source of `count` batches."""

    def __init__(self, count: int = 1000) -> None:
        self.count, self.next = count, 0

    def __iter__(self) -> Iterator[Batch]:
        while self.next < self.count:
            self.next += 1
            yield batch_of(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Every number a model has learned: dense tensors, and all rows of all tables in the order of their ids."""
    found = {name: tensor.clone() for name, tensor in dense_state_dict(model).items()}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            for name, table in module.store.tables.items():  # type: ignore[attr-defined]
                entries = table.entries()
                order = entries.ids.argsort()
                columns = {"ids": entries.ids, "values": entries.values, "times": entries.times, **entries.slots}
                found |= {f"{path}/{name}/{key}": column[order] for key, column in columns.items()}
    return found


def assert_same(left: nn.Module, right: nn.Module) -> None:
    """Fail unless two models have learned exactly the same."""
    one, other = everything(left), everything(right)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


class Crash(Hook):
    """Ends a run without any of its own endings, as a killed process would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self.step:
            raise KeyboardInterrupt
