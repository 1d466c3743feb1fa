"""Danger: a model computes with copies of values that its parameters no longer have, or reads a copy of a copy."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from monolith.features.batch import Batch
from monolith.original.cached_variables import CachedVariables
from monolith.serve import load
from monolith.train import Estimator, Head, RunConfig, Trainer

BATCH: Batch = {"x": torch.ones(2, 1), "y": torch.zeros(2)}
HEAD = Head(name="out", label="y", kind="regression")


class Scale(nn.Module):
    """Multiplies its column by a number, 5 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.linear.weight, 5.0)

    def forward(self, batch: Batch) -> torch.Tensor:
        out: torch.Tensor = self.linear(batch["x"])
        return out.squeeze(1)


class CachedScale(nn.Module):
    """A model with cached layers, as a user writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = CachedVariables(Scale())

    def forward(self, batch: Batch) -> torch.Tensor:
        out: torch.Tensor = self.cached(batch)
        return out

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def set_weight(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        next(module.parameters()).fill_(value)


def training_read(cached: CachedVariables) -> float:
    return cached.train()(BATCH)[0].item()


def test_training_after_a_load_reads_what_was_loaded() -> None:
    cached = CachedVariables(Scale())
    cached.load_state_dict({"module.linear.weight": torch.tensor([[7.0]])})
    assert training_read(cached) == 7.0


@pytest.mark.parametrize("part", ["", "linear"])
def test_a_load_of_the_module_or_of_a_part_of_it_counts_too(part: str) -> None:
    cached = CachedVariables(Scale())
    inner = cached.module.get_submodule(part)
    name = f"{'' if part else 'linear.'}weight"
    inner.load_state_dict({name: torch.tensor([[7.0]])})
    assert training_read(cached) == 7.0


def test_what_was_fetched_before_a_load_does_not_come_back() -> None:
    cached = CachedVariables(Scale())
    cached.fetch()
    cached.load_state_dict({"module.linear.weight": torch.tensor([[7.0]])})
    cached.assign()
    assert training_read(cached) == 7.0


def test_outside_training_the_parameters_are_read() -> None:
    cached = CachedVariables(Scale())
    set_weight(cached, 7.0)
    assert (training_read(cached), cached.eval()(BATCH)[0].item(), training_read(cached)) == (5.0, 7.0, 5.0)


@pytest.mark.parametrize("inner", [False, True])
def test_copies_move_with_their_parameters_and_keep_their_values(inner: bool) -> None:
    cached = CachedVariables(Scale())
    set_weight(cached, 7.0)
    (cached.module if inner else cached).to(torch.float64)
    out = cached({"x": torch.ones(1, 1, dtype=torch.float64)})
    assert (out.dtype, out.item()) == (torch.float64, 5.0)
    out.sum().backward()
    assert next(cached.parameters()).grad.dtype == torch.float64


def test_a_deep_copy_follows_its_own_parameters() -> None:
    original = CachedVariables(Scale())
    twin = copy.deepcopy(original)
    twin.load_state_dict({"module.linear.weight": torch.tensor([[7.0]])})
    assert (training_read(original), training_read(twin)) == (5.0, 7.0)


def test_a_parameter_that_is_added_later_is_cached_too() -> None:
    cached = CachedVariables(nn.ParameterDict({"a": nn.Parameter(torch.ones(1))}))
    cached.module["b"] = nn.Parameter(torch.ones(1))
    cached._follow_parameters()
    assert list(cached._read) == ["a", "b"]


def test_wrapping_twice_is_refused() -> None:
    scale = Scale()
    cached = CachedVariables(scale)
    for module in (scale, scale.linear, cached, nn.Sequential(cached), copy.deepcopy(cached)):
        with pytest.raises(ValueError, match="already been cached"):
            CachedVariables(module)


def test_a_restored_run_trains_evaluates_predicts_and_exports_what_was_saved(tmp_path: Path) -> None:
    first = CachedScale()
    set_weight(first, 3.0)
    trainer = Trainer(first, first.configure_optimizer(), heads=[HEAD], config=config(tmp_path))
    trainer.fit([BATCH], steps=1)
    saved = next(first.parameters()).item()
    assert saved not in (3.0, 5.0)

    estimator = Estimator(CachedScale(), heads=[HEAD], config=config(tmp_path))
    assert next(iter(estimator.predict([BATCH])))["out"].item() == saved
    assert estimator.evaluate([BATCH])["out/mse"] == pytest.approx(saved**2)
    exported = estimator.export_saved_model(str(tmp_path / "export"), example=BATCH)
    assert load(exported).predict({"x": BATCH["x"]})["out"].tolist() == [saved, saved]

    again = CachedScale()
    trainer = Trainer(again, again.configure_optimizer(), heads=[HEAD], config=config(tmp_path))
    trainer.restore(training=True)
    assert training_read(again.cached) == saved


def config(folder: Path) -> RunConfig:
    return RunConfig(model_dir=str(folder / "run"))
