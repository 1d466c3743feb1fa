"""Danger: row splits from outside that are believed unchecked; row ids that are not the one object the spec promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith import InvalidArgumentError
from monolith.features import Ragged
from monolith.features.ragged import fused_value_rowids

ROWS = st.lists(st.lists(st.integers(min_value=-(2**63), max_value=2**63 - 1), max_size=20), max_size=20)


def test_spec_rowids_are_cached() -> None:
    rt = Ragged.from_lists([[], [1], [2, 3]])
    rowids = fused_value_rowids(rt)
    assert rowids.tolist() == [1, 2, 2]
    assert fused_value_rowids(rt) is rowids
    assert rt.value_rowids() is rowids


@pytest.mark.parametrize("wrong", [[[1], [2]], torch.tensor([1]), None])
def test_spec_only_ragged_is_accepted(wrong: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match="rt must be RaggedTensor") as error:
        fused_value_rowids(wrong)
    assert "monolith.features.Ragged" in str(error.value)


@given(rows=ROWS)
def test_lists_survive_and_rowids_agree_with_a_loop(rows: list[list[int]]) -> None:
    ragged = Ragged.from_lists(rows)
    assert ragged.to_lists() == rows
    assert len(ragged) == len(rows)
    assert ragged.row_lengths().tolist() == [len(row) for row in rows]
    assert ragged.value_rowids().tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert ragged.value_rowids().dtype == torch.int64


def test_values_of_any_type_and_shape() -> None:
    ragged = Ragged(torch.arange(6.0).reshape(3, 2), np.array([0, 1, 3]))
    assert ragged.to_lists() == [[[0.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]]
    assert Ragged.from_lists([[0.5]], dtype=torch.float64).values.dtype == torch.float64
    assert repr(ragged) == "Ragged(2 rows, 3 values of float32 [2]: [[[0.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]])"


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([], "offsets is empty"),
        ([1, 3], r"offsets\[0\] is 1, expected 0"),
        ([0, 2, 1, 3], r"offsets\[2\] is 1, expected at least 2"),
        ([0, -5, 3], r"offsets\[1\] is -5, expected at least 0"),
        ([0, 2], r"offsets\[1\] is 2, expected 3 \(the number of values\)"),
        ([0, 2**63 - 1], r"offsets\[1\] is 9223372036854775807, expected 3"),
        ([0.0, 3.0], "offsets: expected int64"),
        ([[0, 3]], r"offsets: expected one dimension, got shape \[1, 2\]"),
    ],
)
def test_wrong_splits_are_refused_with_the_place(splits: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgumentError, match=message):
        Ragged(torch.tensor([1, 2, 3]), splits)


def test_scalars_are_no_values() -> None:
    with pytest.raises(InvalidArgumentError, match="values: expected at least one dimension"):
        Ragged(torch.tensor(1), [0, 1])


def test_a_large_one_is_printed_in_one_short_line() -> None:
    shown = repr(Ragged(torch.arange(1000), torch.arange(0, 1001, 10)))
    assert shown.startswith("Ragged(100 rows, 1000 values of int64: [[0, 1, 2, 3, 4, ...], [10, 11, ")
    assert shown.endswith("44, ...], ...])")
    assert repr(Ragged.from_lists([[1, 2], []])) == "Ragged(2 rows, 2 values of int64: [[1, 2], []])"
    assert repr(Ragged(torch.zeros(0, 3), [0])) == "Ragged(0 rows, 0 values of float32 [3]: [])"
