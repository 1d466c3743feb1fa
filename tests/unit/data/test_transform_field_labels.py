"""Danger: a row teaches another head than its own, or a label that is not in the data. Each transform against a row-by-row
oracle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from batch_rows import ragged, random_batch, to_rows
from monolith.data import INVALID_LABEL
from monolith.data.transforms import FillMultiRankOutput, MultiLabelGen, SpecialStrategy, StrategyRule, UseFieldAsLabel
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch, Ragged


@pytest.fixture(params=[0, 1, 300])
def batch(request: pytest.FixtureRequest) -> Batch:
    rng, rows = np.random.default_rng(17), request.param
    extra = {
        "special_strategies": ragged(rng, rows, 5, longest=2),
        "rank": torch.from_numpy(rng.integers(-1, 30, size=rows)),
        "is_draw": torch.from_numpy(rng.integers(2, size=rows)),
        "cid": Ragged.from_lists([list(rng.choice([b"a", b"ab", b""])) for _ in range(rows)], dtype=torch.uint8),
    }
    return random_batch(rng, rows) | extra


def label_by_action(row: dict, priority: tuple[int, ...]) -> float:
    ranked = sorted((a for a in row["actions"] if a in priority), key=priority.index)
    action = (ranked or row["actions"] or [None])[0]
    return {1: 1.0, 3: 1.0, 2: -1.0}.get(action, INVALID_LABEL)


@pytest.mark.parametrize("priority", [(), (2, 3)])
@pytest.mark.parametrize(
    ("field", "heads", "tasks"), [("chnid", {1: 2, 3: 0}, 3), ("cid", {"a": 1, "ab": 0}, 2), ("chnid", {2: 1}, 5)]
)
def test_multi_label_gen(batch: Batch, field: str, heads: dict, tasks: int, priority: tuple[int, ...]) -> None:
    generate = MultiLabelGen(
        head_to_index=heads,
        head_field=field,
        pos_actions=(1, 3),
        neg_actions=(2, 3),
        neg_label=-1.0,
        action_priority=priority,
        task_num=5 if tasks == 5 else None,
    )
    expected = []
    for row in to_rows(batch):
        labels = [INVALID_LABEL] * tasks
        head = bytes(row[field]).decode() if field == "cid" else row[field]
        if head in heads:
            labels[heads[head]] = label_by_action(row, priority)
        expected.append(labels)
    before = to_rows(batch)
    out = generate(batch)["label"]
    assert list(out.shape) == [len(before), tasks]
    assert out.tolist() == expected
    assert to_rows(batch) == before


def test_multi_label_gen_of_the_label_that_is_there(batch: Batch) -> None:
    out = MultiLabelGen(head_to_index={0: 0, 2: 1}, use_origin_label=True)(batch)["label"]
    for row, labels in zip(to_rows(batch), out.tolist(), strict=True):
        place = {0: 0, 2: 1}.get(row["chnid"])
        assert labels == [row["label"] if task == place else INVALID_LABEL for task in range(2)]


@pytest.mark.parametrize("threshold", [None, 60.0])
def test_use_field_as_label(batch: Batch, threshold: float | None) -> None:
    options = {} if threshold is None else {"overwrite_invalid_value": True, "label_threshold": threshold}
    wide = {**batch, "label": torch.stack([batch["label"], batch["label"] + 40], dim=1)}
    out = UseFieldAsLabel(field="req_time", **options)(wide)["label"]
    for row, labels in zip(to_rows(wide), out.tolist(), strict=True):
        value = 0 if threshold is not None and row["req_time"] >= threshold else row["req_time"]
        assert labels == [max(label, value) for label in row["label"]]
    assert UseFieldAsLabel(field="req_time")(batch)["label"].shape == batch["label"].shape


RANKS: dict[str, Callable[[dict], float]] = {
    "is_draw": lambda row: float(row["is_draw"]),
    "chnid": lambda row: float(row["chnid"] if row["chnid"] < 2 else 2),
    "rank": lambda row: float(min(row["rank"], 9)),
}


@pytest.mark.parametrize("by", RANKS)
def test_fill_multi_rank_output(batch: Batch, by: str) -> None:
    out = FillMultiRankOutput(by=by, rank_num=10)(batch)["label"]
    assert out.tolist() == [[row["label"], RANKS[by](row)] for row in to_rows(batch)]
    del batch["label"]
    assert FillMultiRankOutput(by=by, rank_num=10)(batch)["label"].tolist() == [[RANKS[by](r)] for r in to_rows(batch)]


@pytest.mark.parametrize("keep_empty", [False, True])
def test_special_strategy(batch: Batch, keep_empty: bool) -> None:
    strategies, rules, seed = (3, 1, 0), {3: (0.5, None), 1: (0.75, 9.0)}, 4
    transform = SpecialStrategy(strategies, "3:0.5, 1:0.75:9", keep_empty=keep_empty, seed=seed)
    rows = to_rows(batch)
    draws = np.random.default_rng((seed, 0)).random(len(rows))
    expected = []
    for row, draw in zip(rows, draws, strict=True):
        here = [strategy for strategy in strategies if strategy in row["special_strategies"]]
        if here:
            rate, label = rules.get(here[0], (1.0, None))
            if draw < rate:
                expected.append(row if label is None else {**row, "label": label})
        elif not row["special_strategies"] and keep_empty:
            expected.append(row)
    assert to_rows(transform(batch)) == expected
    assert to_rows(batch) == rows
    assert len(rows) < 300 or 0 < len(expected) < 300


def test_special_strategy_goes_on_from_a_saved_state(batch: Batch) -> None:
    first = SpecialStrategy((1, 2), "1:0.5,2:0.5", seed=1)
    first(batch)
    state = first.state_dict()
    second = SpecialStrategy((1, 2), {1: StrategyRule(sample_rate=0.5), 2: StrategyRule(sample_rate=0.5)}, seed=8)
    second.load_state_dict(state)
    assert to_rows(second(batch)) == to_rows(first(batch))


WRONG: dict[str, Callable[[], object]] = {
    "actions beside the origin label": lambda: MultiLabelGen(
        head_to_index={1: 0}, use_origin_label=True, pos_actions=(1,)
    ),
    "no positive action": lambda: MultiLabelGen(head_to_index={1: 0}, neg_actions=(1,)),
    "neither": lambda: MultiLabelGen(head_to_index={1: 0}),
    "too few tasks": lambda: MultiLabelGen(head_to_index={1: 3}, pos_actions=(1,), task_num=3),
    "no strategies": lambda: SpecialStrategy(()),
    "a rate above 1": lambda: SpecialStrategy((1,), "1:1.5"),
    "a rule without a strategy": lambda: SpecialStrategy((1,), "2:0.5"),
    "a rule without a rate": lambda: SpecialStrategy((1,), "1"),
    "a rule with too much": lambda: SpecialStrategy((1,), "1:1:1:1"),
    "no ranks": lambda: FillMultiRankOutput(by="rank", rank_num=0),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_text_heads_for_a_column_of_numbers_are_refused() -> None:
    generate = MultiLabelGen(head_to_index={"a": 0}, pos_actions=(1,))
    with pytest.raises(InvalidArgumentError, match="expected text"):
        generate({"chnid": torch.tensor([1]), "actions": Ragged.from_lists([[1]])})
