"""Danger: pooled rows or gradients that differ from their definition; an empty bag that gives NaN, as in the original."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith import InvalidArgumentError
from monolith.features import Ragged
from monolith.features.kernels import PoolReduction, pool

MODES: tuple[PoolReduction, ...] = get_args(PoolReduction)


def definition(rows: torch.Tensor, splits: list[int], mode: PoolReduction) -> torch.Tensor:
    pooled = []
    for begin, end in itertools.pairwise(splits):
        bag, n = rows[begin:end], max(end - begin, 1)
        if mode == "l2":
            # Written out so that autograd gives 0, not NaN, where the norm is 0.
            squares = (bag * bag).sum(0)
            pooled.append(torch.where(squares == 0, squares, squares.clamp(min=1e-30).sqrt()))
        else:
            pooled.append(bag.sum(0) / {"sum": 1, "mean": n, "sqrtn": n**0.5}[mode])
    return torch.stack(pooled) if pooled else rows[:0]


@given(
    lengths=st.lists(st.integers(min_value=0, max_value=7), max_size=12),
    dim=st.sampled_from([1, 3, 4, 8, 16, 33, 64, 100]),
    seed=st.integers(min_value=0, max_value=99),
)
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_agree_with_the_definition(
    mode: PoolReduction, lengths: list[int], dim: int, seed: int
) -> None:
    splits = [0]
    for length in lengths:
        splits.append(splits[-1] + length)
    random = torch.Generator().manual_seed(seed)
    ours = torch.randn(splits[-1], dim, generator=random).requires_grad_()
    theirs = ours.detach().double().requires_grad_()
    pooled, expected = pool(ours, splits, mode=mode), definition(theirs, splits, mode)
    torch.testing.assert_close(pooled.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(pooled.shape, generator=random)
    (pooled * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_empty_bags_give_zeros(mode: PoolReduction) -> None:
    rows = torch.empty(0, 3, requires_grad=True)
    pooled = pool(rows, [0, 0, 0], mode=mode)
    assert pooled.tolist() == [[0.0] * 3] * 2
    pooled.sum().backward()
    assert rows.grad is not None
    assert rows.grad.shape == (0, 3)


def test_reduce_sqrtn_of_the_original_is_l2() -> None:
    rows = torch.tensor([[3.0, 0.0], [4.0, 0.0]], requires_grad=True)
    pooled = pool(rows, [0, 2], mode="l2")
    assert pooled.tolist() == [[5.0, 0.0]]
    (pooled * 10).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[6.0, 0.0], [8.0, 0.0]]


def test_the_ragged_of_the_ids_gives_the_bags() -> None:
    ids = Ragged.from_lists([[7], [], [8, 9]])
    assert pool(torch.tensor([[1.0], [2.0], [3.0]]), ids).tolist() == [[1.0], [0.0], [5.0]]


def test_rows_and_gradients_need_not_be_contiguous() -> None:
    rows = torch.arange(12.0).reshape(2, 6).T.requires_grad_()
    pooled = pool(rows, [0, 4, 6])
    torch.testing.assert_close(pooled, torch.stack([rows[:4].sum(0), rows[4:].sum(0)]))
    pooled.T.contiguous().T.sum().backward()


@pytest.mark.parametrize(
    ("rows", "splits", "mode", "message"),
    [
        (torch.ones(2, 1, dtype=torch.float64), [0, 2], "sum", "rows: expected float32"),
        (torch.ones(2), [0, 2], "sum", r"rows: expected float32 \[n, dim\]"),
        (torch.ones(2, 1), [0, 3], "sum", r"offsets\[1\] is 3, expected 2"),
        (torch.ones(2, 1), [0, 2], "max", "mode: expected one of 'sum', 'mean', 'sqrtn', 'l2', got 'max'"),
    ],
)
def test_wrong_arguments(rows: torch.Tensor, splits: list[int], mode: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgumentError, match=message):
        pool(rows, splits, mode=mode)
