"""Danger: a model learns from labels that are not in the data. Each transform against a row-by-row oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from batch_rows import random_batch, to_rows
from monolith.data import INVALID_LABEL
from monolith.data.transforms import (
    AddAction,
    AddLabel,
    FilterByValue,
    LabelNormalization,
    LabelUpperBound,
    ScatterLabel,
    TaskLabel,
)
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch, Ragged


@pytest.fixture(params=[0, 1, 300])
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(np.random.default_rng(11), request.param)


def test_invalid_label_is_the_lowest_float() -> None:
    assert np.float32(INVALID_LABEL) == np.finfo(np.float32).min


def test_add_action(batch: Batch) -> None:
    where = FilterByValue(column="req_time", op="ge", operand=50)
    out = AddAction(where=where, action=77)(batch)
    expected = [row["actions"] + ([77] if row["req_time"] >= 50 else []) for row in to_rows(batch)]
    assert out["actions"].to_lists() == expected
    with pytest.raises(InvalidArgumentError, match="Ragged"):
        AddAction(where=where, action=7, actions="req_time")(batch)


def test_add_label(batch: Batch) -> None:
    text, seed = "0,1:2:0.5;3::0.25;4:1,2", 9
    tasks = [({0, 1}, {2}, 0.5), ({3}, set(), 0.25), ({4}, {1, 2}, 1.0)]
    out = AddLabel(text, negative_value=0.5, new_sample_rate=0.4, seed=seed)(batch)
    rows = to_rows(batch)
    draws = np.random.default_rng((seed, 0)).random((len(tasks), len(rows)))
    for place, (row, labels) in enumerate(zip(rows, out["label"].tolist(), strict=True)):
        expected = [row["label"] if row["label"] > 0 else INVALID_LABEL]
        for (positive, negative, rate), draw in zip(tasks, draws, strict=True):
            actions = set(row["actions"])
            if actions & positive:
                expected.append(1.0)
            elif (negative and not actions & negative) or draw[place] >= rate:
                expected.append(INVALID_LABEL)
            else:
                expected.append(0.5)
        assert labels == expected
    assert out["sample_rate"].tolist() == [pytest.approx(0.4)] * len(rows)


def test_add_label_makes_a_first_label_where_there_is_none() -> None:
    out = AddLabel("1")({"actions": Ragged.from_lists([[1], []])})
    assert out["label"].tolist() == [[1.0], [0.0]]


def test_negatives_are_kept_at_the_stated_rate() -> None:
    out = AddLabel("1::0.3", seed=4)({"actions": Ragged.from_lists([[]] * 20_000)})
    kept = int((out["label"] == 0).sum())
    assert abs(kept - 6000) < 4 * math.sqrt(20_000 * 0.3 * 0.7)


def test_add_label_draws_on_after_a_restart() -> None:
    batch = {"actions": Ragged.from_lists([[]] * 50)}
    first = AddLabel("1::0.5", seed=1)
    first(batch)
    second = AddLabel("1::0.5", seed=999)
    second.load_state_dict(first.state_dict())
    following = first(batch)["label"].tolist()
    assert second(batch)["label"].tolist() == following
    assert first(batch)["label"].tolist() != following


@pytest.mark.parametrize("text", ["", ":1", "1:2:3:4", "a", "1::2", "1::-0.5", "1:x", "1::nan"])
def test_wrong_tasks_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected 'actions:actions:rate'"):
        TaskLabel.parse(text)


def test_a_sample_rate_without_a_logarithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="new_sample_rate"):
        AddLabel("1", new_sample_rate=0.0)


def test_scatter_label(batch: Batch) -> None:
    out = ScatterLabel(places={1: 2, 3: 0})(batch)
    for row, labels in zip(to_rows(batch), out["label"].tolist(), strict=True):
        expected = [INVALID_LABEL] * 3
        if row["chnid"] in (1, 3):
            expected[{1: 2, 3: 0}[row["chnid"]]] = row["label"]
        assert labels == expected


@pytest.mark.parametrize("shape", ["[rows]", "[rows, 3]"])
def test_label_upper_bound(batch: Batch, shape: str) -> None:
    if shape == "[rows, 3]":
        batch = {**batch, "label": torch.stack([batch["label"]] * 3, dim=1)}
    out = LabelUpperBound(bounds=(1.0, 0.5))(batch)["label"]
    assert out.shape == batch["label"].shape
    for before, after in zip(
        batch["label"].reshape(-1, 3 if shape != "[rows]" else 1).tolist(), out.tolist(), strict=True
    ):
        bounded = [min(label, bound) for label, bound in zip(before, (1.0, 0.5, math.inf), strict=False)]
        assert (after if isinstance(after, list) else [after]) == bounded


NORMALIZE = {
    "log": lambda y, v: math.log(max(y + v, 0)) if y + v > 0 else -math.inf,
    "scale": lambda y, v: y / v,
    "scale2int": lambda y, v: int(y / v),
    "pow": lambda y, v: (y + 1) ** v,
    "repow": lambda y, v: y**v if y > 0 else 0.0,
    "scalelog": lambda y, v: math.log(y / v + 1) if y / v + 1 > 0 else -math.inf,
}


@pytest.mark.parametrize("method", NORMALIZE)
@pytest.mark.parametrize("value", [0.5, 1.0, 2.0])
def test_label_normalization(method: str, value: float) -> None:
    labels = [-3.0, -1.0, -0.25, 0.0, 0.5, 1.0, 7.5]
    if method == "pow":
        labels = [y for y in labels if y >= -1]
    out = LabelNormalization(steps=((method, value),))({"label": torch.tensor(labels)})["label"]
    assert out.tolist() == pytest.approx([NORMALIZE[method](y, value) for y in labels], abs=1e-6)


def test_normalization_steps_follow_each_other_and_leave_invalid_labels_alone() -> None:
    labels = torch.tensor([[4.0, INVALID_LABEL]])
    out = LabelNormalization(steps=(("scale", 2.0), ("log", 1.0)))({"label": labels})["label"]
    assert out[0, 0].item() == pytest.approx(math.log(3))
    assert out[0, 1].item() == INVALID_LABEL
    with pytest.raises(ConfigError):
        LabelNormalization(steps=(("scale", 0.0),))
