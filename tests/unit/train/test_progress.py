"""Danger: a display that shows numbers of other steps than it says, or a JSON line a program cannot read."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.metrics import roc_auc_score

from monolith.train import StepResult, Trainer
from monolith.train.hooks import Hook
from monolith.train.hooks.progress import ProgressHook, ProgressReport, json_lines, rich_lines
from training import ClickModel, Stream


class Record(Hook):
    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.results.append(result)


def run(steps: int, every: int) -> tuple[list[ProgressReport], list[StepResult], Trainer]:
    ticks = iter(range(1000))
    reports: list[ProgressReport] = []
    record = Record()
    model = ClickModel()
    progress = ProgressHook(reports.append, every_steps=every, auc_window=16, clock=lambda: float(next(ticks)))
    trainer = Trainer(model, torch.optim.SGD(model.mlp.parameters(), lr=0.1), hooks=[record, progress])
    trainer.fit(Stream(), steps=steps)
    return reports, record.results, trainer


def test_reports_come_at_intervals_and_at_the_end() -> None:
    reports, results, trainer = run(steps=7, every=3)
    assert [report.step for report in reports] == [3, 6, 7]
    assert [report.examples for report in reports] == [24, 48, 56]
    # The clock advances by one between the ends of two intervals, and the last interval has one step.
    assert [report.examples_per_second for report in reports] == [24.0, 24.0, 8.0]
    losses = [result.loss.item() / result.examples for result in results]
    expected = [np.mean(losses[:3]), np.mean(losses[3:6]), losses[6]]
    assert [report.loss for report in reports] == pytest.approx(expected)
    assert reports[-1].rows == sum(stats.rows for stats in trainer.table_stats().values())
    assert reports[-1].memory_bytes > 10 << 20


def test_auc_is_that_of_the_last_examples_before_they_were_trained_on() -> None:
    reports, results, _ = run(steps=6, every=6)
    labels = torch.cat([result.batch["clicked"] for result in results[-2:]])  # type: ignore[arg-type]
    logits = torch.cat([result.logits["click"] for result in results[-2:]])
    assert list(reports[-1].auc) == ["click"]
    assert reports[-1].auc["click"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-9)


def test_json_lines_can_be_read_even_without_an_auc() -> None:
    report = ProgressReport(
        step=1,
        examples=2,
        examples_per_second=float("inf"),
        loss=0.5,
        auc={"ctr": float("nan")},
        rows=3,
        table_bytes=4,
        memory_bytes=5,
    )
    stream = io.StringIO()
    json_lines(stream)(report)
    json_lines(stream)(report)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first == second
    assert (first["examples_per_second"], first["auc"]["ctr"], first["loss"]) == (None, None, 0.5)


def test_a_person_sees_the_numbers() -> None:
    stream = io.StringIO()
    report = ProgressReport(
        step=1200,
        examples=2,
        examples_per_second=54321.0,
        loss=0.5,
        auc={"ctr": 0.75, "cvr": 0.5},
        rows=1_000_000,
        table_bytes=4,
        memory_bytes=300 << 20,
    )
    rich_lines(Console(file=stream, width=40))(report)
    line = stream.getvalue()
    for part in ("1,200", "0.5", "0.7500 ctr", "0.5000 cvr", "54,321 examples/s", "1,000,000 rows", "300 MiB"):
        assert part in line


def test_a_run_that_failed_is_not_asked_for_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Other processes have a part of the rows, and may be what was lost."""
    reports: list[ProgressReport] = []

    class Fail(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            raise ValueError("a rank was lost")

    model = ClickModel()
    trainer = Trainer(model, torch.optim.SGD(model.mlp.parameters(), lr=0.1))
    trainer.hooks = (ProgressHook(reports.append, every_steps=10), Fail())
    with pytest.raises(ValueError, match="a rank was lost"):
        trainer.fit(Stream(), steps=3)
    assert reports == []
    assert "could not end" not in caplog.text


def test_an_auc_that_is_not_known_yet_is_not_shown() -> None:
    stream = io.StringIO()
    report = ProgressReport(
        step=1,
        examples=2,
        examples_per_second=3.0,
        loss=0.5,
        auc={"ctr": math.nan},
        rows=1,
        table_bytes=4,
        memory_bytes=0,
    )
    rich_lines(Console(file=stream))(report)
    assert "AUC" not in stream.getvalue()
