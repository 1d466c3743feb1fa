"""Danger: sampling shifts the click rate without recording by how much, so predictions are wrong by a constant."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from batch_rows import ragged, random_batch, to_rows
from monolith.data.transforms import InstanceReweight, NegativeSample, UpsamplePositives
from monolith.data.transforms.sampling import most_prior_action
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch


@pytest.fixture(params=[0, 1, 400])
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(np.random.default_rng(13), request.param)


def most_prior(actions: list[int], priority: tuple[int, ...]) -> int | None:
    listed = [action for action in actions if action in priority]
    return min(listed, key=priority.index) if listed else None


@pytest.mark.parametrize("record", ["sample_rate", "weight", None])
def test_negative_sample(batch: Batch, record: str | None) -> None:
    batch = {**batch, "sample_rate": torch.full((len(batch["label"]),), 0.5)}
    out = NegativeSample(0.6, threshold=1.0, record=record, seed=2)(batch)
    expected = []
    for row, draw in zip(to_rows(batch), np.random.default_rng((2, 0)).random(len(batch["label"])), strict=True):
        negative = row["label"] < 1.0
        if negative and draw < 0.6:
            continue
        if record == "sample_rate":
            row["sample_rate"] = pytest.approx(0.5 * 0.4)
        if record == "weight":
            row["instance_weight"] = pytest.approx(1 / 0.4 if negative else 1.0)
        expected.append(row)
    assert to_rows(out) == expected


def test_negative_sample_by_action(batch: Batch) -> None:
    priority, rates = (3, 1), {3: 1.0, 1: 0.0, 2: 1.0}
    sample = NegativeSample(0.5, action_priority=priority, action_drop_rates=rates, record="weight", seed=6)
    expected = []
    for row, draw in zip(to_rows(batch), np.random.default_rng((6, 0)).random(len(batch["label"])), strict=True):
        rate = rates.get(most_prior(row["actions"], priority), 0.5)
        negative = row["label"] < 0.5
        if not negative or draw >= rate:
            expected.append({**row, "instance_weight": 1 / (1 - rate) if negative else 1.0})
    assert to_rows(sample(batch)) == expected


def test_negative_sample_looks_at_the_label_of_its_index() -> None:
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    out = NegativeSample(1.0, label_index=1, record=None)({"label": labels})
    assert out["label"].tolist() == [[0.0, 1.0]]
    with pytest.raises(InvalidArgumentError, match="index 2"):
        NegativeSample(0.5, label_index=2)({"label": labels})


def test_the_recorded_rate_takes_the_shift_of_the_log_odds_out() -> None:
    rng = np.random.default_rng(0)
    label = torch.from_numpy((rng.random(200_000) < 0.1).astype(np.float32))
    transforms = {"down": NegativeSample(0.8, seed=1), "up": UpsamplePositives(copies=5)}
    for name, transform in transforms.items():
        out = transform({"label": label})
        rate, sampled = out["sample_rate"].unique().tolist(), float(out["label"].mean())
        assert rate == [pytest.approx(0.2)], name
        corrected = math.log(sampled / (1 - sampled)) + math.log(rate[0])
        assert corrected == pytest.approx(math.log(1 / 9), abs=0.03), name


def test_upsample_positives(batch: Batch) -> None:
    out = UpsamplePositives(copies=3, threshold=1.0)(batch)
    expected = []
    for row in to_rows(batch):
        expected += [{**row, "sample_rate": pytest.approx(1 / 3)}] * (3 if row["label"] >= 1.0 else 1)
    assert to_rows(out) == expected


def copies_of(actions: list[int], weights: dict[int, int], priority: tuple[int, ...], method: str) -> int:
    copies = 1 if actions else 0
    for action in actions:
        if action in priority and action != most_prior(actions, priority):
            continue
        if action in weights:
            copies = copies + weights[action] if method == "add" else copies * weights[action]
    return copies


def reweighted(row: dict, weights: dict, labels: dict, priority: tuple[int, ...], method: str) -> tuple[int, float]:
    """Copies and label of one row, in the words of the docstring."""

    def rank(actions: list[int]) -> float:
        prior = most_prior(actions, priority)
        if prior is not None:
            return priority.index(prior)
        return 1000 if actions else 2000

    now, before = row["actions"], row["pre_actions"]
    if rank(before) <= rank(now):
        return (1 if not now and not before else 0), row["label"]
    label = labels.get(most_prior(now, priority), row["label"])
    earlier = labels.get(most_prior(before, priority))
    count = copies_of(now, weights, priority, method)
    if earlier is None:
        return count, label
    count_before = copies_of(before, weights, priority, method)
    if earlier != label:
        return count_before + count, label
    if count_before > count:
        return count_before - count, -label
    return count - count_before, label


@pytest.mark.parametrize("method", ["add", "multiply"])
@pytest.mark.parametrize("labels", [{1: 1, 2: -1, 0: -1}, {1: 1, 2: 1}, {}])
def test_instance_reweight(method: str, labels: dict[int, int]) -> None:
    rng = np.random.default_rng(17)
    batch = {**random_batch(rng, 500), "pre_actions": ragged(rng, 500, 5, longest=2)}
    weights, priority = {1: 3, 2: 2, 4: 2, 0: 1}, (1, 2, 0)
    transform = InstanceReweight(weights=weights, labels=labels, action_priority=priority, method=method)
    expected = []
    for row in to_rows(batch):
        copies, label = reweighted(row, weights, labels, priority, method)
        expected += [{**row, "label": label}] * copies
    assert to_rows(transform(batch)) == expected
    assert len(expected) > 200


def test_instance_reweight_without_earlier_actions(batch: Batch) -> None:
    del batch["pre_actions"]
    transform = InstanceReweight(weights={1: 2}, action_priority=(1,))
    expected = []
    for row in to_rows(batch):
        copies, label = reweighted({**row, "pre_actions": []}, {1: 2}, {}, (1,), "add")
        expected += [{**row, "label": label}] * copies
    assert to_rows(transform(batch)) == expected


@pytest.mark.parametrize("priority", [(), (3, 1), (9,)])
def test_most_prior_action(batch: Batch, priority: tuple[int, ...]) -> None:
    action, known = most_prior_action(batch["actions"], priority)
    for row, got, has in zip(to_rows(batch), action.tolist(), known.tolist(), strict=True):
        first = row["actions"][0] if row["actions"] else None
        expected = most_prior(row["actions"], priority) if priority else first
        assert (got if has else None) == expected


def test_the_state_of_the_draws_is_saved() -> None:
    batch = {"label": torch.zeros(100), "row": torch.arange(100)}
    first, second = NegativeSample(0.5, seed=1), NegativeSample(0.5, seed=2)
    first(batch)
    second.load_state_dict(first.state_dict())
    assert first(batch)["row"].tolist() == second(batch)["row"].tolist()
    with pytest.raises(InvalidArgumentError, match="state_dict"):
        second.load_state_dict({"rng": {"bit_generator": "other"}})


def test_workers_draw_apart() -> None:
    batch = {"label": torch.zeros(100), "row": torch.arange(100)}
    whole = NegativeSample(0.5, seed=1)
    kept = [whole.for_shard(index)(batch)["row"].tolist() for index in (0, 1, 1)]
    assert kept[0] != kept[1]
    assert kept[1] == kept[2]


def test_what_cannot_be_corrected_is_refused() -> None:
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="drop_rate"):
            NegativeSample(wrong)
    with pytest.raises(ConfigError, match="logarithm"):
        NegativeSample(1.0)
    with pytest.raises(ConfigError, match="differ by action"):
        NegativeSample(0.5, action_drop_rates={1: 0.1})
    with pytest.raises(InvalidArgumentError, match="seed"):
        NegativeSample(0.5, seed=-1)
