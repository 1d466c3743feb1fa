"""Danger: records with another example's label or prediction, or files written by a run that asked for none."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monolith.errors import ConfigError, InvalidArgumentError, StorageError
from monolith.features import Ragged
from monolith.features.batch import Batch
from monolith.train import Head, RunConfig, Trainer
from monolith.train.hooks import DeepInsightHook

HEADS = (
    Head(name="click", label="clicked", mask="seen", sample_rate="rate"),
    Head(name="stay", label="secs", kind="regression"),
)


class Scores(nn.Module):
    heads = HEADS

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"click": batch["z"], "stay": batch["z"]}


def batch_of(rows: int, first_uid: int = 0, **columns: Any) -> Batch:  # noqa: ANN401
    return {
        "uid": torch.arange(first_uid, first_uid + rows),
        "req_time": torch.arange(1000, 1000 + rows),
        "z": torch.linspace(-1, 1, rows),
        "clicked": torch.arange(rows) % 2.0,
        "seen": torch.arange(rows) % 3 > 0,
        "rate": torch.full((rows,), 0.5),
        "secs": torch.arange(rows) * 10.0,
        **columns,
    }


def records(*batches: Batch, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    lines = io.StringIO()
    settings = {"sample_ratio": 1.0, **options}
    hook = DeepInsightHook(lines, model_name="ctr", clock=lambda: 7.0, **settings)
    Trainer(Scores(), hooks=[hook]).fit(batches)
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_a_record_has_what_belongs_to_one_example() -> None:
    first, second = records(batch_of(2, first_uid=40))
    assert first == {
        "model_name": "ctr",
        "step": 1,
        "train_time": 7.0,
        "uid": 40,
        "req_time": 1000,
        "labels": {"click": None, "stay": 0.0},
        "predictions": {"click": pytest.approx(1 / (1 + math.e)), "stay": -1.0},
        "sample_rates": {"click": 0.5, "stay": 1.0},
    }
    assert (second["uid"], second["labels"]) == (41, {"click": 1.0, "stay": 10.0})


def test_the_sample_is_the_same_in_every_run_and_about_as_large_as_asked() -> None:
    whole = records(batch_of(4000), sample_ratio=0.05)
    parts = records(batch_of(2000), batch_of(2000, 2000, req_time=torch.arange(3000, 5000)), sample_ratio=0.05)
    assert [record["uid"] for record in whole] == [record["uid"] for record in parts]
    assert 180 < len(whole) < 220
    assert records(batch_of(100), sample_ratio=0.0) == []


def test_chosen_heads_and_extra_columns() -> None:
    city = Ragged.from_lists([[1, 2], []])
    first, second = records(
        batch_of(2, city=city, age=torch.tensor([3, 4])), heads=["stay"], extra_fields=["city", "age"]
    )
    assert first["predictions"] == {"stay": -1.0}
    assert (first["extra"], second["extra"]) == ({"city": [1, 2], "age": 3}, {"city": [], "age": 4})


def test_ids_in_a_ragged_column_and_numbers_that_are_not_finite() -> None:
    uid = Ragged.from_lists([[7], [8]])
    first, second = records(batch_of(2, uid=uid), extra_fields=["rate"])
    assert (first["uid"], second["uid"]) == (7, 8)
    bad = batch_of(1, odd=torch.tensor([float("nan")]))
    assert records(bad, extra_fields=["odd"])[0]["extra"] == {"odd": None}


@pytest.mark.parametrize("missing", ["uid", "req_time"])
def test_a_missing_column_is_named(missing: str) -> None:
    batch = batch_of(2)
    del batch[missing]
    with pytest.raises(InvalidArgumentError, match=f"deep insight: the batch has no column '{missing}'"):
        records(batch)


def test_wrong_settings_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no head 'clik'; there are click, stay"):
        records(batch_of(1), heads=["clik"])
    with pytest.raises(InvalidArgumentError, match="sample_ratio"):
        records(sample_ratio=1.5)
    with pytest.raises(InvalidArgumentError, match="one 'uid' and one 'req_time' per row, got 3 and 2"):
        records(batch_of(2, uid=Ragged.from_lists([[1, 2], [3]])))
    with pytest.raises(ConfigError, match="deep_insight_dir: expected a local folder"):
        Trainer(Scores(), config=RunConfig(deep_insight_dir="s3://bucket/insight"))
    (tmp_path / "file").write_text("")
    config = RunConfig(deep_insight_dir=str(tmp_path / "file"))
    with pytest.raises(StorageError, match="deep insight cannot be written"):
        Trainer(Scores(), config=config).fit([batch_of(1)])


def test_a_run_writes_only_if_its_configuration_says_so(tmp_path: Path) -> None:
    for config in (RunConfig(), RunConfig(deep_insight_dir=str(tmp_path / "off"), deep_insight_sample_ratio=0)):
        Trainer(Scores(), config=config).fit([batch_of(5)])
    assert list(tmp_path.iterdir()) == []
    config = RunConfig(
        deep_insight_dir=str(tmp_path / "on"),
        deep_insight_sample_ratio=1,
        deep_insight_target="click,",
        model_name="ctr",
    )
    for _ in range(2):
        Trainer(Scores(), config=config).fit([batch_of(5)])
    (path,) = (tmp_path / "on").iterdir()
    assert path.name.startswith("ctr-")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["uid"] for record in found] == [0, 1, 2, 3, 4] * 2
    assert list(found[0]["labels"]) == ["click"]
