"""Danger: replaying an old stream expires rows by the clock, or learning rates of a run without an end fall to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monolith import EmbeddingBagCollection, Feature
from monolith.errors import ConfigError
from monolith.features.batch import Batch
from monolith.state.restore_points import restore_points
from monolith.table import SGD, Zeros
from monolith.testing.rank_threads import run_ranks
from monolith.train import RunConfig, Trainer
from rank_runs import RankRun
from waiting_run import IdCounts

HOUR = 3600
LONG_AGO = 3001 * HOUR


class Expiring(torch.nn.Module):
    """Rows that live for two hours."""

    def __init__(self) -> None:
        super().__init__()
        sgd = SGD(learning_rate=1.0)
        feature = Feature(name="id", dim=1, optimizer=sgd, initializer=Zeros(), expire_seconds=2 * HOUR)
        self.embeddings = EmbeddingBagCollection([feature])

    def forward(self, batch: Batch) -> Any:  # noqa: ANN401
        return self.embeddings(batch)["id"]


def batches(hours: int) -> list[Batch]:
    """One batch an hour, each with an id of its own, of long ago."""
    return [
        {"id": torch.tensor([n]), "label": torch.ones(1), "time": torch.tensor([LONG_AGO + n * HOUR])}
        for n in range(hours)
    ]


def test_expired_rows_are_removed_by_event_time() -> None:
    trainer = Trainer(Expiring(), config=RunConfig(event_time="time", evict_event_secs=HOUR))
    trainer.fit(batches(10))
    assert sorted(trainer.tables()["id"][0].entries().ids.tolist()) == [8, 9]


def test_ranks_remove_them_together() -> None:
    run = RankRun(model=Expiring, source=lambda: batches(10), run={"event_time": "time", "evict_event_secs": HOUR})
    trainers = [run.trainer(chief=not rank) for rank in range(2)]
    trained = run_ranks(2, lambda mesh: run.on(mesh, trainers[mesh.rank]))
    left = sorted(id_ for one in trained for id_ in one.tables["id"].entries().ids.tolist())
    assert left == [8, 9]


def test_without_the_setting_nothing_is_removed() -> None:
    trainer = Trainer(Expiring(), config=RunConfig(event_time="time"))
    trainer.fit(batches(10))
    assert trainer.table_stats()["id"].rows == 10


def test_checkpoints_come_at_the_same_places_however_fast_the_data_is_read(tmp_path: Path) -> None:
    config = RunConfig(
        event_time="time", save_checkpoints_event_secs=4 * HOUR, save_checkpoints_secs=0, model_dir=str(tmp_path)
    )
    Trainer(Expiring(), config=config).fit(batches(10))
    # The multiples of four hours, and the end.
    first = next(n for n in range(1, 5) if (LONG_AGO // HOUR + n) % 4 == 0)
    expected = [step for step in (first + 1, first + 5, first + 9) if step <= 10]
    assert [point.step for point in restore_points(str(tmp_path))] == sorted({*expected, 10})


def test_event_time_needs_a_column() -> None:
    with pytest.raises(ConfigError, match="evict_event_secs: needs event_time"):
        RunConfig(evict_event_secs=60)


@pytest.mark.parametrize(
    ("hold", "rates"), [(None, [1.0, 0.5, 0.25, 0.125, 0.0625]), (2, [1.0, 0.5, 0.25, 0.25, 0.25])]
)
def test_schedules_follow_the_global_step_or_are_held(hold: int | None, rates: list[float]) -> None:
    class Halving(IdCounts):
        def __init__(self) -> None:
            super().__init__()
            rows = {"optimizer": SGD(learning_rate=1.0), "initializer": Zeros()}
            feature = Feature(name="id", dim=1, learning_rate=lambda step: 0.5**step, **rows)
            self.embeddings = EmbeddingBagCollection([feature])

    model = Halving()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    config = RunConfig(hold_schedules_at=hold, clip_norm=None)
    trainer = Trainer(model, optimizer, scheduler=scheduler, config=config)
    trainer.fit([{"id": torch.tensor([n]), "label": torch.ones(1)} for n in range(5)])
    rows = trainer.tables()["id"][0].entries()
    by_id = dict(zip(rows.ids.tolist(), (-rows.values[:, 0]).tolist(), strict=True))
    assert [by_id[n] for n in range(5)] == rates
    assert -model.batches.item() == sum(rates)
