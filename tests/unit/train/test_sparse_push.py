"""Danger: late sparse updates that depend on timing, are applied twice, or are lost at the end of a run."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import InvalidArgumentError
from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.table import SGD, LocalStore, Zeros
from monolith.train import Head, RunConfig, Trainer
from training import ClickModel, Stream, assert_same


class OneNumber(nn.Module):
    """Predicts one trained number w for every row; with labels y the gradient of a step is 2 (w - y)."""

    heads = (Head(name="w", label="y", kind="regression"),)

    def __init__(self, schedule: object = None) -> None:
        super().__init__()
        feature = Feature(
            name="id", dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=0.25), learning_rate=schedule
        )
        self.embeddings = EmbeddingBagCollection([feature])

    def forward(self, batch: Batch) -> Tensor:
        return self.embeddings(batch)["id"]  # type: ignore[return-value]

    @property
    def w(self) -> float:
        store = self.embeddings.store
        assert isinstance(store, LocalStore)
        return store.tables["id"].lookup([7]).item()


TARGETS = [1.0, -2.0, 3.0, 0.5]


def data() -> list[Batch]:
    return [{"id": torch.tensor([7]), "y": torch.tensor([y])} for y in TARGETS]


def test_each_lookup_misses_exactly_the_step_before() -> None:
    model = OneNumber()
    trainer = Trainer(model, config=RunConfig(enable_embedding_postpush=True, clip_norm=None))
    applied, kept = 0.0, 0.0
    for step, batch in enumerate(data()):
        result = trainer.train_step(batch)
        assert result.logits["w"].item() == pytest.approx(applied), f"step {step}"
        # What was kept arrives beside this backward; this step's own gradient is the next to be kept.
        gradient = 2 * (applied - TARGETS[step])
        applied, kept = applied - 0.25 * kept, gradient
        assert model.w == pytest.approx(applied), f"after step {step}: n - 1 updates are in"
    trainer.push.drain()
    assert model.w == pytest.approx(applied - 0.25 * kept)


def test_the_end_of_a_run_applies_the_last_update() -> None:
    model = OneNumber()
    Trainer(model, config=RunConfig(enable_embedding_postpush=True)).fit(data()[:1])
    assert model.w == pytest.approx(0.5)


def test_a_failed_run_applies_what_it_kept_and_leaves_no_thread() -> None:
    model, before = OneNumber(), set(threading.enumerate())
    batches = [*data()[:1], {"id": torch.tensor([7]), "y": torch.tensor([float("nan")])}]
    with pytest.raises(InvalidArgumentError, match="finite numbers, got nan"):
        Trainer(model, config=RunConfig(enable_embedding_postpush=True)).fit(batches)
    assert model.w == pytest.approx(0.5)
    assert [t.name for t in set(threading.enumerate()) - before if t.name.startswith("monolith")] == []


def test_a_schedule_is_asked_for_the_step_of_the_gradient() -> None:
    asked: list[int] = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.25

    model = OneNumber(schedule)
    Trainer(model, config=RunConfig(enable_embedding_postpush=True)).fit(data())
    assert asked == [0, 1, 2, 3]


def test_an_error_of_the_store_reaches_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LocalStore, gradients: object, **options: object) -> None:
        raise RuntimeError("store is gone")

    monkeypatch.setattr(LocalStore, "apply", refuse)
    with pytest.raises(RuntimeError, match="store is gone"):
        Trainer(OneNumber(), config=RunConfig(enable_embedding_postpush=True)).fit(data())


def test_two_runs_are_equal_bit_for_bit() -> None:
    models = []
    for _ in range(2):
        model = ClickModel()
        config = RunConfig(enable_embedding_postpush=True, embedding_prefetch_capacity=2)
        Trainer(model, torch.optim.Adam(model.mlp.parameters()), config=config).fit(Stream(), steps=20)
        models.append(model)
    assert_same(*models)
