"""Danger: joined transforms differ from the single ones applied by hand, or a resumed pipeline from an uninterrupted one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batch_rows import random_batch, to_rows
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.data.transforms import (
    AddLabel,
    Compose,
    FilterByAction,
    FilterByExpression,
    FilterByLabel,
    FilterByValue,
    LogicalOr,
    NegativeSample,
    Transformed,
    UpsamplePositives,
)
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, BatchColumn


@pytest.fixture(params=[0, 1, 300])
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(np.random.default_rng(23), request.param)


def test_compose_applies_in_order(batch: Batch) -> None:
    both = Compose([FilterByLabel(thresholds=(0.0,)), FilterByAction(has_actions=(1, 2))])
    expected = [row for row in to_rows(batch) if row["label"] >= 0 and {1, 2} & set(row["actions"])]
    assert to_rows(both(batch)) == expected
    assert Compose([])(batch) is batch


def test_logical_or_takes_the_first_surviving_copy(batch: Batch) -> None:
    def stamped(value: int, keep: FilterByValue) -> Compose:
        def stamp(rows: Batch) -> Batch:
            return {**rows, "stamp": torch.full((len(rows["label"]),), value)}

        return Compose([keep, stamp])

    first = stamped(1, FilterByValue(column="req_time", op="lt", operand=50))
    second = stamped(2, FilterByValue(column="chnid", op="eq", operand=2))
    expected = []
    for row in to_rows(batch):
        if row["req_time"] < 50:
            expected.append({**row, "stamp": 1})
        elif row["chnid"] == 2:
            expected.append({**row, "stamp": 2})
    assert to_rows(LogicalOr(first, second)(batch)) == expected


def test_logical_or_nests(batch: Batch) -> None:
    chosen = [FilterByValue(column="chnid", op="eq", operand=channel) for channel in (0, 1, 3)]
    expected = [row for row in to_rows(batch) if row["chnid"] != 2]
    assert to_rows(LogicalOr(LogicalOr(chosen[0], chosen[1]), chosen[2])(batch)) == expected


def test_logical_or_refuses_a_transform_that_repeats_rows() -> None:
    with pytest.raises(InvalidArgumentError, match="repeats"):
        LogicalOr(UpsamplePositives(copies=2), FilterByLabel(thresholds=(9.0,)))(
            {"label": torch.ones(2), "sample_rate": torch.ones(2)}
        )


CONFIG = ClickStreamConfig(batch_size=50, batches=8, users=20, items=20)


def pipeline() -> Transformed:
    return Transformed(
        ClickStream(CONFIG), FilterByExpression(expression="len(tag_ids) > 1"), NegativeSample(0.7, seed=5)
    )


def plain(batches: object) -> list[list[dict]]:
    return [to_rows(batch) for batch in batches]  # type: ignore[attr-defined]


def test_a_transformed_source_skips_empty_batches_and_resumes() -> None:
    whole = plain(pipeline())
    assert len(whole) == 8
    first = pipeline()
    for _ in zip(range(3), first, strict=False):
        pass
    second = pipeline()
    second.load_state_dict(first.state_dict())
    assert plain(second) == whole[3:]
    assert list(Transformed(ClickStream(CONFIG), FilterByLabel(thresholds=(2.0,)))) == []


def test_shards_have_their_own_data_and_draws() -> None:
    parts = [plain(pipeline().shard(index, 2)) for index in (0, 1)]
    again = [plain(pipeline().shard(index, 2)) for index in (0, 1)]
    assert parts == again
    assert [len(part) for part in parts] == [4, 4]
    times: list[set] = [{row["event_time"] for batch in part for row in batch} for part in parts]
    assert times[0]
    assert times[1]


def test_a_state_of_other_transforms_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="transforms"):
        Compose([AddLabel("1")]).load_state_dict({})
    with pytest.raises(InvalidArgumentError, match="state_dict"):
        Transformed([]).state_dict()
    with pytest.raises(InvalidArgumentError, match="sharded"):
        Transformed([]).shard(0, 1)


def test_no_transform_changes_the_batch_it_was_given(batch: Batch) -> None:
    before, columns = to_rows(batch), dict[str, BatchColumn](batch)
    Compose([AddLabel("1:2:0.5"), NegativeSample(0.5), FilterByAction(has_actions=(1,))])(batch)
    assert to_rows(batch) == before
    assert all(batch[name] is column for name, column in columns.items())
