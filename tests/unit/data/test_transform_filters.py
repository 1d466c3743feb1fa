"""Danger: a filter keeps or drops the wrong rows, or tears the columns of a row apart. Each against a row-by-row oracle."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch

from batch_rows import random_batch, to_rows
from monolith.data.transforms import FilterByAction, FilterByFid, FilterByLabel, FilterByValue, concat_rows, select_rows
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch, Ragged, fid_v2

ROWS = 300


@pytest.fixture(params=[0, 1, ROWS])
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(np.random.default_rng(7), request.param)


def fids_of(row: dict) -> set[int]:
    return {*row["ids"], row["more_ids"]}


def keeps(batch: Batch, transform: Callable[[Batch], Batch], oracle: Callable[[dict], bool]) -> None:
    before = to_rows(batch)
    expected = [row for row in before if oracle(row)]
    assert to_rows(transform(batch)) == expected
    assert to_rows(batch) == before
    if len(before) == ROWS:
        assert 0 < len(expected) < ROWS, "the data do not tell the filter from one that keeps all or none"


FID_CASES = {
    "filter": ({"filter_fids": (1, 8)}, lambda row: not fids_of(row) & {1, 8}),
    "has": ({"has_fids": (2, 7)}, lambda row: bool(fids_of(row) & {2, 7})),
    "select": ({"select_fids": (2, 5)}, lambda row: {2, 5} <= fids_of(row)),
    "actions": ({"has_actions": (3,)}, lambda row: 3 in row["actions"]),
    "time": ({"req_time_min": 40}, lambda row: row["req_time"] >= 40),
    "several": (
        {"filter_fids": (0,), "has_fids": (1, 2, 3), "req_time_min": 10},
        lambda row: 0 not in fids_of(row) and bool(fids_of(row) & {1, 2, 3}) and row["req_time"] >= 10,
    ),
}


@pytest.mark.parametrize(("options", "oracle"), FID_CASES.values(), ids=FID_CASES)
def test_filter_by_fid(batch: Batch, options: dict, oracle: Callable[[dict], bool]) -> None:
    keeps(batch, FilterByFid(columns=("ids", "more_ids"), **options), oracle)


def test_filter_by_slots(batch: Batch) -> None:
    slots = {**batch, "ids": Ragged(batch["ids"].values << 48 | 5, batch["ids"].offsets)}

    def oracle(row: dict) -> bool:
        return {1, 3} <= {fid >> 48 for fid in row["ids"]}

    keeps(slots, FilterByFid(columns=("ids",), select_slots=(1, 3)), oracle)
    assert fid_v2.slot_of(torch.tensor([3 << 48 | 5])).tolist() == [3]


def test_filter_by_action(batch: Batch) -> None:
    keeps(batch, FilterByAction(has_actions=(1, 4)), lambda row: bool({1, 4} & set(row["actions"])))


@pytest.mark.parametrize("filter_equal", [False, True])
def test_filter_by_label(batch: Batch, filter_equal: bool) -> None:
    reaches = operator.gt if filter_equal else operator.ge
    one = FilterByLabel(thresholds=(1.0,), filter_equal=filter_equal)
    keeps(batch, one, lambda row: reaches(row["label"], 1.0))
    two = FilterByLabel(thresholds=(2.5, 0.0), filter_equal=filter_equal)
    wide = {**batch, "label": torch.stack([batch["label"], batch["label"].flip(0)], dim=1)}
    keeps(wide, two, lambda row: reaches(row["label"][0], 2.5) or reaches(row["label"][1], 0.0))


def test_a_ragged_row_with_fewer_labels_than_thresholds_goes(batch: Batch) -> None:
    labels = {**batch, "label": Ragged(batch["ids"].values.float(), batch["ids"].offsets)}
    thresholds = (5.0, 1.0)

    def oracle(row: dict) -> bool:
        return len(row["label"]) >= 2 and (row["label"][0] >= 5 or row["label"][1] >= 1)

    keeps(labels, FilterByLabel(thresholds=thresholds), oracle)


VALUE_CASES = {
    "gt": (50, operator.gt),
    "ge": (50, operator.ge),
    "eq": (50, operator.eq),
    "lt": (50, operator.lt),
    "le": (50, operator.le),
    "neq": (50, operator.ne),
    "between": ((20, 50), lambda value, bounds: bounds[0] <= value < bounds[1]),
    "in": ((3, 50, 60.5), lambda value, listed: value in listed),
    "not-in": ((3, 50, 60.5), lambda value, listed: value not in listed),
}


@pytest.mark.parametrize(("op", "operand", "oracle"), [(op, *case) for op, case in VALUE_CASES.items()])
def test_filter_by_value(batch: Batch, op: str, operand: object, oracle: Callable) -> None:
    batch = {**batch, "req_time": batch["req_time"] // 5 * 5}
    keeps(batch, FilterByValue(column="req_time", op=op, operand=operand), lambda row: oracle(row["req_time"], operand))


SET_CASES = {
    "any": lambda values: bool(values & {1, 3}),
    "all": lambda values: values >= {1, 3},
    "diff": lambda values: bool(values - {1, 3}),
}


@pytest.mark.parametrize("keep_empty", [False, True])
@pytest.mark.parametrize(("op", "oracle"), SET_CASES.items())
def test_filter_by_values_of_a_ragged_column(batch: Batch, op: str, oracle: Callable, keep_empty: bool) -> None:
    transform = FilterByValue(column="actions", op=op, operand=(1, 3), keep_empty=keep_empty)
    keeps(batch, transform, lambda row: oracle(set(row["actions"])) if row["actions"] else keep_empty)


def test_an_integer_column_is_not_compared_by_truncation() -> None:
    batch = {"x": torch.tensor([0, 1])}
    assert FilterByValue(column="x", op="in", operand=(0.5, 1))(batch)["x"].tolist() == [1]


def test_a_float_beside_large_ids_does_not_make_them_equal() -> None:
    batch = {"x": torch.tensor([2**24, 2**24 + 1])}
    assert FilterByValue(column="x", op="in", operand=(0.5, 2**24))(batch)["x"].tolist() == [2**24]


def test_select_rows_and_concat_rows_against_lists(batch: Batch) -> None:
    rng, rows = np.random.default_rng(1), to_rows(batch)
    order = torch.from_numpy(rng.integers(max(len(rows), 1), size=2 * len(rows)))
    assert to_rows(select_rows(batch, order)) == [rows[i] for i in order]
    assert to_rows(concat_rows([batch, select_rows(batch, order), batch])) == rows + [rows[i] for i in order] + rows


WRONG_CONFIGS = {
    "a tuple for one number": lambda: FilterByValue(column="x", op="gt", operand=(1,)),
    "a number for a tuple": lambda: FilterByValue(column="x", op="in", operand=1),
    "three bounds": lambda: FilterByValue(column="x", op="between", operand=(1, 2, 3)),
    "an unknown op": lambda: FilterByValue(column="x", op="like", operand=1),
    "no thresholds": lambda: FilterByLabel(thresholds=()),
    "an impossible slot": lambda: FilterByFid(columns=("x",), select_slots=(32768,)),
}


@pytest.mark.parametrize("make", WRONG_CONFIGS.values(), ids=WRONG_CONFIGS)
def test_wrong_configs_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


WRONG_BATCHES = {
    "a missing column": (FilterByAction(has_actions=(1,)), {"action": torch.tensor([1])}, "did you mean 'action'"),
    "too few labels": (FilterByLabel(thresholds=(1.0, 1.0)), {"label": torch.ones(2)}, "at least 2 labels"),
    "a set op on numbers": (FilterByValue(column="x", op="any", operand=(1,)), {"x": torch.ones(2)}, "for Ragged"),
    "a number op on sets": (
        FilterByValue(column="x", op="gt", operand=1),
        {"x": Ragged.from_lists([[1]])},
        "for Ragged",
    ),
    "a matrix": (FilterByValue(column="x", op="gt", operand=1), {"x": torch.ones(2, 2)}, "one number per row"),
}


@pytest.mark.parametrize(("transform", "batch", "message"), WRONG_BATCHES.values(), ids=WRONG_BATCHES)
def test_wrong_batches_are_refused(transform: Callable, batch: Batch, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        transform(batch)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="a bool for each of 2 rows"):
        select_rows({"x": torch.ones(2)}, torch.tensor([True]))
    with pytest.raises(InvalidArgumentError, match="columns of batches"):
        concat_rows([{"x": torch.ones(2)}, {"y": torch.ones(2)}])
    with pytest.raises(InvalidArgumentError, match="one kind"):
        concat_rows([{"x": torch.ones(2)}, {"x": Ragged.from_lists([[1]])}])
    with pytest.raises(InvalidArgumentError, match="at least one"):
        concat_rows([])
