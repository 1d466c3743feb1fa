"""Danger: a hook that lets NaN into the weights, writes curves or traces that cannot be opened, or stops a step off."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monolith.errors import DivergedError, InvalidArgumentError
from monolith.features import Ragged
from monolith.train import Estimator, RunConfig, Trainer
from monolith.train.hooks import (
    ColumnStatistics,
    FeatureStatisticsHook,
    Hook,
    LoggingHook,
    NanGuardHook,
    ProfilerHook,
    StopAtStepHook,
    TensorBoardHook,
    column_statistics,
)
from training import ClickModel, Stream, assert_same, batch_of


def trainer_of(*hooks: Hook, **config: Any) -> Trainer:  # noqa: ANN401 - fields of RunConfig
    model = ClickModel()
    return Trainer(model, torch.optim.SGD(model.mlp.parameters(), lr=0.1), hooks=hooks, config=RunConfig(**config))


def test_stop_at_step_counts_from_the_restored_step(tmp_path: Path) -> None:
    where = {"model_dir": str(tmp_path)}
    assert trainer_of(StopAtStepHook(num_steps=3), **where).fit(Stream()) == 3
    assert trainer_of(StopAtStepHook(num_steps=3), **where).fit(Stream()) == 6
    assert trainer_of(StopAtStepHook(last_step=8), **where).fit(Stream()) == 8
    assert trainer_of(StopAtStepHook(last_step=8), **where).fit(Stream()) == 8


@pytest.mark.parametrize("limit", ["num_steps", "last_step"])
def test_no_step_is_a_limit_too(limit: str) -> None:
    assert trainer_of(StopAtStepHook(**{limit: 0})).fit(Stream()) == 0


@pytest.mark.parametrize("options", [{}, {"num_steps": 1, "last_step": 1}, {"num_steps": -1}])
def test_stop_at_step_needs_one_limit(options: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="StopAtStepHook"):
        StopAtStepHook(**options)


def exploding(number: int) -> dict[str, Any]:
    return {**batch_of(number), "age": torch.full((8, 1), float("inf"))}


@pytest.mark.parametrize("postpush", [False, True])
def test_nan_guard_keeps_nan_out_of_every_weight(postpush: bool) -> None:
    guarded = trainer_of(enable_embedding_postpush=postpush)
    with pytest.raises(DivergedError, match=r"step 3: the loss is (nan|inf)"):
        guarded.fit([batch_of(0), batch_of(1), exploding(2)])
    clean = trainer_of(enable_embedding_postpush=postpush)
    clean.fit([batch_of(0), batch_of(1)])
    assert_same(guarded.model, clean.model)
    assert guarded.step == 2


def test_nan_guard_looks_at_gradients_too() -> None:
    trainer = trainer_of(NanGuardHook(), stop_on_nan=False)
    trainer.model.mlp[2].weight.register_hook(lambda grad: grad * float("nan"))  # type: ignore[index, union-attr, operator]
    with pytest.raises(DivergedError, match="norm of the gradients is nan"):
        trainer.fit([batch_of(0)])
    assert_same(trainer.model, ClickModel())


def test_without_the_guard_nan_spreads() -> None:
    trainer = trainer_of(stop_on_nan=False)
    trainer.fit([exploding(0)])
    assert not all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def test_tensorboard_reads_the_curves_back(tmp_path: Path) -> None:
    trainer = trainer_of(TensorBoardHook(tmp_path, every_steps=2))
    trainer.fit(Stream(), steps=6)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "auc/click",
        "examples_per_second",
        "loss",
        "global_gradient_norm",
        *(f"rows/{name}" for name in trainer.table_stats()),
    }
    assert [event.step for event in events.Scalars("loss")] == [2, 4, 6]
    assert events.Scalars("rows/user")[-1].value == trainer.table_stats()["user"].rows
    # Per example: at first that of a coin, whatever the size of a batch.
    assert 0.3 < events.Scalars("loss")[0].value < 1.2


def test_a_run_without_a_step_leaves_no_empty_event_file(tmp_path: Path) -> None:
    trainer_of(TensorBoardHook(tmp_path)).fit(Stream(), max_steps=0)
    assert not list(tmp_path.iterdir())


def test_an_evaluation_is_a_point_beside_the_curves_of_training(tmp_path: Path) -> None:
    estimator = Estimator(ClickModel(), RunConfig(model_dir=str(tmp_path)))
    estimator.train(Stream(4))
    metrics = estimator.evaluate(Stream(3))
    events = EventAccumulator(str(tmp_path / "eval"))
    events.Reload()
    point = events.Scalars("click/auc")[0]
    assert (point.step, point.value) == (4, pytest.approx(metrics["click/auc"]))


def test_profiler_traces_at_its_steps_and_when_asked(tmp_path: Path) -> None:
    hook = ProfilerHook(tmp_path, start=2, num_steps=1, period=4)
    trainer = trainer_of(hook)
    trainer.fit(Stream(), steps=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-3.json", "trace-7.json"]
    trace = json.loads((tmp_path / "trace-3.json").read_text())
    assert any("addmm" in str(event.get("name")) for event in trace["traceEvents"])


def test_profiler_hears_a_request_and_a_file(tmp_path: Path) -> None:
    hook = ProfilerHook(tmp_path, num_steps=2)
    trainer = trainer_of(hook)
    trainer.fit(Stream(), steps=1)
    assert list(tmp_path.iterdir()) == []
    hook.request()
    trainer.fit(Stream(), steps=3)
    assert [path.name for path in tmp_path.iterdir()] == ["trace-3.json"]
    (tmp_path / "PROFILE").touch()
    trainer.fit(Stream(), steps=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-3.json", "trace-5.json"]


def test_statistics_of_a_column() -> None:
    ids = Ragged.from_lists([[7, 7, 8], [], [9], []])
    assert column_statistics(ids) == ColumnStatistics(rows=4, values=4, empty=0.5, distinct=0.75, mean=None, invalid=0)
    numbers = torch.tensor([1.0, float("nan"), 3.0, float("inf")])
    assert column_statistics(numbers) == ColumnStatistics(
        rows=4, values=4, empty=0.0, distinct=None, mean=2.0, invalid=2
    )
    nothing = column_statistics(Ragged.from_lists([]))
    assert (nothing.rows, nothing.distinct) == (0, None)


def test_statistics_are_written_at_their_steps() -> None:
    written: list[tuple[int, list[str]]] = []
    hook = FeatureStatisticsHook(every_steps=3, write=lambda step, columns: written.append((step, list(columns))))
    trainer_of(hook).fit(Stream(), steps=7)
    assert written == [(3, list(batch_of(0))), (6, list(batch_of(0)))]


def test_logging_says_where_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="monolith")
    trainer_of(LoggingHook(every_steps=2), FeatureStatisticsHook(every_steps=4)).fit(Stream(5))
    lines = [record.message for record in caplog.records]
    assert lines[0] == "training starts at step 0"
    assert [line.partition(": loss")[0] for line in lines if ": loss" in line] == ["step 2", "step 4"]
    assert any("step 4: column tags" in line for line in lines)
    assert lines[-1] == "training ended at step 5: the data ended"
