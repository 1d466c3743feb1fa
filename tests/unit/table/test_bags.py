"""Danger: bags that change after they were checked: a store on servers keeps how it has split them, the core trusts them."""

from __future__ import annotations

import numpy as np
import pytest

from monolith import InvalidArgumentError
from monolith.table import Bags


def test_bags_cannot_be_written_to_and_the_arrays_of_the_caller_can() -> None:
    ids, offsets = np.array([1, 2, 3]), np.array([0, 1, 3])
    bags = Bags(table="t", ids=ids, offsets=offsets)
    for array in (bags.ids, bags.offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    assert ids.flags.writeable
    assert offsets.flags.writeable


def test_arrays_with_gaps_are_copied() -> None:
    bags = Bags(table="t", ids=np.arange(8)[::2], offsets=np.arange(5)[::2])
    assert bags.ids.flags.c_contiguous
    assert bags.offsets.flags.c_contiguous
    assert (bags.ids.tolist(), bags.offsets.tolist()) == ([0, 2, 4, 6], [0, 2, 4])


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1, 2], [0, 1], r"bags of table 't': offsets\[1\] is 1, expected 2"),
        ([1, 2], [1, 2], r"bags of table 't': offsets\[0\]"),
        ([1, 2], [0, 2, 1, 2], r"bags of table 't': offsets\[2\]"),
        ([1, 2], [], "bags of table 't': offsets is empty"),
        ([1.0, 2.0], [0, 2], "ids of table 't': expected int64, got float64"),
        ([[1, 2]], [0, 2], "ids of table 't': expected one dimension"),
        ([1, 2], [[0, 2]], "offsets of table 't': expected one dimension"),
    ],
)
def test_wrong_bags_are_refused_when_they_are_made(ids: list[object], offsets: list[object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Bags(table="t", ids=np.array(ids), offsets=np.array(offsets, dtype=np.int64))
