"""Danger: the parts work alone but not in a row: train, evaluate, predict, export and import of the original's test model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from monolith.serve import import_saved_model
from monolith.train import Estimator, RunConfig
from training import assert_same


@pytest.fixture(scope="module")
def ffm() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "ffm.py"
    spec = importlib.util.spec_from_file_location("ffm_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ffm_example"] = module
    spec.loader.exec_module(module)
    return module


def test_examples_are_as_the_original_describes_them(ffm: ModuleType) -> None:
    batch = ffm.examples()
    assert len(batch["label"]) == 64
    assert not batch["label"].any()
    for slot in range(6):
        ids = batch[f"slot_{slot}"].values
        assert set(ids.tolist()) == set(range(5 * slot, 5 * slot + 5))
    assert all(torch.equal(batch[f"slot_{s}"].values, ffm.examples()[f"slot_{s}"].values) for s in range(6))


def test_the_model_computes_the_sum_of_crosses_and_biases(ffm: ModuleType) -> None:
    model = ffm.FFM()
    Estimator(model).train(steps=3)
    batch = ffm.examples()
    tables = model.embeddings.store.tables

    def row(slot: int, of: int) -> tuple[float, list[torch.Tensor]]:
        start, end = batch[f"slot_{slot}"].offsets[of : of + 2].tolist()
        ids = (slot << 48) + batch[f"slot_{slot}"].values[start:end]
        table = tables[model.embeddings.declaration.assignment[f"slot_{slot}"]]
        pooled = table.lookup(ids).double().sum(0)
        has_bias = slot < 3
        return float(pooled[0]) if has_bias else 0.0, list(pooled[has_bias:].split(16))

    def logit(of: int) -> float:
        rows = [row(slot, of) for slot in range(6)]
        crosses = [(0, 0, 3, 0), (0, 1, 4, 0), (1, 0, 5, 0), (2, 0, 3, 1), (2, 1, 5, 1)]
        dots = sum(float(rows[u][1][i] @ rows[v][1][j]) for u, i, v, j in crosses)
        return dots + sum(bias for bias, _ in rows)

    computed = model.eval()(batch)
    assert computed[:10].tolist() == pytest.approx([logit(of) for of in range(10)], abs=1e-4)


def test_local(ffm: ModuleType, tmp_path: Path) -> None:
    estimator = Estimator(ffm.FFM(), RunConfig(model_dir=str(tmp_path)))
    untrained = estimator.evaluate(steps=10)
    assert estimator.train(steps=10) == 10
    trained = estimator.evaluate(steps=10)
    assert trained["ctr/loss"] < 0.1 * untrained["ctr/loss"]
    assert trained["global_step"] == 10

    predictions = torch.stack([row["ctr"] for row in estimator.predict()])
    assert predictions.shape == (64,)
    assert bool((predictions < 0.5).all()), "all labels are 0"

    folder = estimator.export_saved_model()
    assert folder.parent == tmp_path / "exported_models"
    with import_saved_model(tmp_path / "exported_models") as predict:
        for seed in range(10):
            batch = ffm.examples(64, seed)
            (expected,) = estimator.predict([batch], yield_single_examples=False)
            torch.testing.assert_close(predict(batch)["ctr"], expected["ctr"], rtol=0, atol=1e-6)


def test_a_second_process_continues(ffm: ModuleType, tmp_path: Path) -> None:
    Estimator(ffm.FFM(), RunConfig(model_dir=str(tmp_path))).train(steps=4)
    resumed = Estimator(ffm.FFM(), RunConfig(model_dir=str(tmp_path)))
    assert resumed.train(max_steps=10) == 10
    whole = Estimator(ffm.FFM())
    whole.train(steps=10)
    assert_same(resumed.model, whole.model)


def test_two_models_in_one_process_do_not_interfere(ffm: ModuleType, tmp_path: Path) -> None:
    first = Estimator(ffm.FFM(seed=1), RunConfig(model_dir=str(tmp_path / "first")))
    second = Estimator(ffm.FFM(seed=2), RunConfig(model_dir=str(tmp_path / "second")))
    first.train(steps=5)
    second.train(steps=5)
    first.train(steps=5)
    alone = Estimator(ffm.FFM(seed=1))
    alone.train(steps=10)
    assert_same(first.model, alone.model)
    folders = [estimator.export_saved_model() for estimator in (first, second)]
    for estimator, folder in zip((first, second), folders, strict=True):
        (expected,) = estimator.predict(yield_single_examples=False)
        with import_saved_model(folder) as predict:
            torch.testing.assert_close(predict(ffm.examples())["ctr"], expected["ctr"], rtol=0, atol=1e-6)
