"""Danger: a stale gradient of a feature is corrected with the values of another id or moment, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import ConfigError
from monolith.features import Feature, Ragged
from monolith.features.batch import Batch
from monolith.nn import Embedding, EmbeddingBag, EmbeddingBagCollection
from monolith.table import SGD, Constant, DelayCompensation, LocalStore
from monolith.train import Head, RunConfig, Trainer

RATE, STRENGTH = 0.5, 0.25
COMPENSATED = DelayCompensation(base=SGD(learning_rate=RATE), lambda_=STRENGTH)


def feature(**options: Any) -> Feature:  # noqa: ANN401
    return Feature(name="item", dim=2, initializer=Constant(value=1.0), optimizer=COMPENSATED, **options)


def stepped(value: float, gradient: float, seen: float) -> float:
    """One step of the rule: the gradient was computed at `seen`."""
    return value - RATE * (gradient + STRENGTH * gradient**2 * (value - seen))


def passed(embeddings: EmbeddingBagCollection, items: object, factor: float) -> None:
    (embeddings({"item": items})["item"] * factor).sum().backward()


def late(embeddings: EmbeddingBagCollection) -> list[list[float]]:
    """Ids 1, 2 and 2 are looked up; another step is made before their gradients arrive."""
    passed(embeddings, torch.tensor([1, 2, 2]), 3.0)
    first = embeddings.take_gradients(0)
    passed(embeddings, torch.tensor([2]), 1.0)
    embeddings.step()
    embeddings.store.apply(first)
    return embeddings({"item": torch.tensor([1, 2])})["item"].tolist()


def test_a_gradient_that_comes_late_is_corrected_by_what_changed_since() -> None:
    one, two = late(EmbeddingBagCollection([feature()]))
    assert one == [stepped(1.0, 3.0, 1.0)] * 2
    moved = stepped(1.0, 1.0, 1.0)
    assert two == [stepped(moved, 6.0, 1.0)] * 2
    assert two != [moved - RATE * 6.0] * 2


def test_a_gradient_in_time_is_the_base_optimizers() -> None:
    plain = Feature(name="item", dim=2, initializer=Constant(value=1.0), optimizer=SGD(learning_rate=RATE))
    rows = Ragged.from_lists([[1, 2], [], [2, 2, 3]])
    answers = []
    for one in (plain, feature()):
        embeddings = EmbeddingBagCollection([one.model_copy(update={"pooling": "mean"})])
        for factor in (1.0, -2.0):
            passed(embeddings, rows, factor)
            embeddings.step()
        answers.append(embeddings({"item": torch.tensor([1, 2, 3])})["item"])
    torch.testing.assert_close(*answers)


def test_gradients_of_two_passes_each_have_their_own_moment() -> None:
    embeddings = EmbeddingBagCollection([feature()])
    passed(embeddings, torch.tensor([1]), 1.0)
    passed(embeddings, torch.tensor([2]), 2.0)
    embeddings.step()
    assert embeddings({"item": torch.tensor([1, 2])})["item"][:, 0].tolist() == [0.5, 0.0]


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection([feature(bias=True)])

    def forward(self, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = self.embeddings(batch)["item"]
        return found[:, 0]


def test_postponed_pushes_of_a_trainer_are_corrected() -> None:
    data = [{"item": torch.tensor([1]), "y": torch.zeros(1)}] * 4
    config = RunConfig(enable_embedding_postpush=True, clip_norm=None)
    model = Score()
    Trainer(model, heads=[Head(label="y", kind="regression")], config=config).fit(data)
    value, waiting = 1.0, None
    for _ in range(4):
        seen = value
        if waiting is not None:
            value = stepped(value, *waiting)
        waiting = (2 * seen, seen)
    assert waiting is not None
    expected = stepped(value, *waiting)
    assert model(data[0]).item() == pytest.approx(expected)


def test_rows_that_are_elsewhere_are_refused_before_training() -> None:
    class Elsewhere:
        def __init__(self, store: LocalStore) -> None:
            self.configs, self.remote = store.configs, True

    embeddings = EmbeddingBagCollection([feature()])
    with pytest.raises(ConfigError, match="feature 'item' has DelayCompensation"):
        EmbeddingBagCollection([feature()], Elsewhere(embeddings.store))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="another optimizer"):
        embeddings.use_store(Elsewhere(embeddings.store))  # type: ignore[arg-type]


def test_modules_over_one_table_keep_what_they_read() -> None:
    def new_table() -> EmbeddingTable:
        segment = Segment(dim=1, initializer=Constant(value=1.0), optimizer=COMPENSATED)
        return EmbeddingTable(TableConfig(name="t", segments=(segment,)))

    expected = stepped(stepped(1.0, 1.0, 1.0), 3.0, 1.0)
    ids, splits = torch.tensor([5]), torch.tensor([0, 1])
    for module in (Embedding(new_table()), EmbeddingBag(new_table())):
        inputs = (ids,) if isinstance(module, Embedding) else (ids, splits)
        slow, quick = module(*inputs), module(*inputs)
        quick.sum().backward()
        (slow * 3.0).sum().backward()
        assert module.table.lookup(ids).item() == expected


def test_pooled_gradients_are_spread_over_their_ids() -> None:
    segment = Segment(dim=1, initializer=Constant(value=1.0), optimizer=COMPENSATED)
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    seen = np.zeros((4, 1), np.float32)
    table.apply_pooled_gradients([1, 2, 3, 4], [0, 4], np.full((1, 1), 4.0, np.float32), mode="sqrtn", snapshot=seen)
    assert table.lookup([1, 4]).tolist() == [[stepped(1.0, 2.0, 0.0)]] * 2
