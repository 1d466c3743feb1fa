"""Danger: an id sent to a shard that does not own it, or a row that is returned for another id."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith import InvalidArgumentError
from monolith.features import Ragged
from monolith.features.kernels import ragged_split_by_indices, reorder_by_indices, split_by_indices, split_by_shard

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@given(ids=st.lists(INT64, max_size=60), num_shards=st.integers(min_value=1, max_value=70))
def test_the_shard_is_the_unsigned_remainder_and_the_order_is_stable(ids: list[int], num_shards: int) -> None:
    split = split_by_shard(torch.tensor(ids, dtype=torch.int64), num_shards)
    expected: list[list[int]] = [[] for _ in range(num_shards)]
    for id_ in ids:
        expected[id_ % 2**64 % num_shards].append(id_)
    assert [shard.tolist() for shard in split.by_shard()] == expected
    assert split.sizes.tolist() == [len(shard) for shard in expected]
    assert [ids[place] for place in split.order.tolist()] == split.ids.tolist()
    assert split.restore(split.ids).tolist() == ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (16,), (4, 5), (0,)])
def test_rows_of_any_kind_come_back_to_their_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = torch.randint(0, 100, (50, *shape)).to(dtype)
    split = split_by_shard(torch.randint(-(2**62), 2**62, (50,)), 7)
    assert torch.equal(split.restore(rows[split.order]), rows)


def test_restore_and_split_are_differentiable_twice() -> None:
    split = split_by_shard(torch.arange(12) * 7, 5)
    rows = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(split.restore, (rows,))
    assert torch.autograd.gradgradcheck(split.restore, (rows,))
    indices = torch.arange(12) % 4
    assert torch.autograd.gradcheck(lambda x: split_by_indices(indices, x, 4), (rows,))


def test_reference_golden_split_by_indices() -> None:
    parts, positions = ragged_split_by_indices([0, 1, 0, 1], Ragged.from_lists([[4, 3, 2], [1]]), 2)
    assert [part.to_lists() for part in parts] == [[[4, 2], []], [[3], [1]]]
    assert [part.to_lists() for part in positions] == [[[0, 2], []], [[1], [3]]]


@given(
    rows=st.lists(st.lists(st.tuples(INT64, st.integers(min_value=0, max_value=3)), max_size=6), max_size=8),
)
def test_ragged_split_agrees_with_a_loop(rows: list[list[tuple[int, int]]]) -> None:
    flat = [entry for row in rows for entry in row]
    ragged = Ragged.from_lists([[value for value, _ in row] for row in rows])
    parts, positions = ragged_split_by_indices(torch.tensor([i for _, i in flat], dtype=torch.int64), ragged, 4)
    for number, (part, position) in enumerate(zip(parts, positions, strict=True)):
        assert part.to_lists() == [[value for value, index in row if index == number] for row in rows]
        assert ragged.values[position.values].tolist() == part.values.tolist()
        assert position.offsets.tolist() == part.offsets.tolist()


def test_reference_golden_reorder_but_for_the_order_inside_a_shard() -> None:
    # The original gives [3, 0 | 1 | 5, 2]: the same groups, each reversed. We keep the order of first occurrence.
    ids = torch.tensor([0, 1, 2, 2, 3, 5])
    ordered, sizes = reorder_by_indices(ids, ids % 3, 3)
    assert sizes.tolist() == [2, 1, 2]
    assert ordered.tolist() == [0, 3, 1, 2, 5]
    original = [3, 0, 1, 5, 2]
    assert [sorted(group.tolist()) for group in ordered.split(sizes.tolist())] == [
        sorted(original[:2]),
        sorted(original[2:3]),
        sorted(original[3:]),
    ]


def test_empty_batches() -> None:
    split = split_by_shard([], 3)
    assert split.sizes.tolist() == [0, 0, 0]
    assert split.restore(torch.empty(0, 4)).shape == (0, 4)
    assert [part.shape for part in split_by_indices([], torch.empty(0, 4), 2)] == [(0, 4), (0, 4)]
    assert [part.tolist() for part in reorder_by_indices([], [], 2)] == [[], [0, 0]]


def test_wrong_arguments_are_named() -> None:
    for wrong in (0, -1, 2**32):
        with pytest.raises(InvalidArgumentError, match=f"num_shards: expected 1..4294967295, got {wrong}"):
            split_by_shard([1], wrong)
    with pytest.raises(InvalidArgumentError, match=r"indices\[1\] is 2, expected 0\.\.1"):
        split_by_indices([0, 2], torch.ones(2), 2)
    with pytest.raises(InvalidArgumentError, match=r"rows: expected \[2, \.\.\.\]"):
        split_by_indices([0, 1], torch.ones(3), 2)
    with pytest.raises(InvalidArgumentError, match="indices: expected 4 entries"):
        ragged_split_by_indices([0], Ragged.from_lists([[4, 3, 2], [1]]), 2)
    with pytest.raises(InvalidArgumentError, match="shard_ids: expected 2 entries"):
        reorder_by_indices([1, 2], [0], 2)
    with pytest.raises(InvalidArgumentError, match=r"rows: expected \[1, \.\.\.\]"):
        split_by_shard([1], 2).restore(torch.ones(2))
