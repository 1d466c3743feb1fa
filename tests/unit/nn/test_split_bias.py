"""Danger: bias and vectors of a lookup are mixed up, or their gradients are, or a shape at the edge is taken for another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith import _core
from monolith.errors import InvalidArgumentError
from monolith.nn.kernels import split_bias

# No rows; a bias alone; more and fewer floats than are copied at once; enough rows for several threads.
SHAPES = [(0, 5), (3, 1), (1, 2), (4, 5), (7, 18), (20_001, 17)]


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_those_of_torch(shape: tuple[int, int]) -> None:
    rows = torch.randn(shape)
    bias, vectors = split_bias(rows)
    assert torch.equal(bias, rows[:, :1])
    assert torch.equal(vectors, rows[:, 1:])
    assert bias.is_contiguous()
    assert vectors.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_put_together(shape: tuple[int, int]) -> None:
    rows = torch.randn(shape, requires_grad=True)
    weights = torch.randn(shape)
    bias, vectors = split_bias(rows)
    loss = (bias * weights[:, :1]).sum() + (vectors * weights[:, 1:]).sum()
    (grad,) = torch.autograd.grad(loss, rows)
    assert torch.equal(grad, weights)


def test_a_part_that_nobody_used_has_no_gradient() -> None:
    rows = torch.randn(3, 4, requires_grad=True)
    split_bias(rows)[1].sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.tensor([[0.0, 1.0, 1.0, 1.0]] * 3))


def test_the_gradient_can_be_differentiated() -> None:
    rows = torch.randn(3, 4, requires_grad=True)
    bias, vectors = split_bias(rows)
    (grad,) = torch.autograd.grad(bias.square().sum() + vectors.pow(3).sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), rows)
    torch.testing.assert_close(second, torch.cat([torch.full((3, 1), 2.0), 6 * rows.detach()[:, 1:]], dim=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers_are_left_to_torch(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 4).to(dtype)
    bias, vectors = split_bias(rows)
    assert torch.equal(torch.cat([bias, vectors], dim=1), rows)
    assert vectors.dtype == dtype


def test_rows_that_are_not_in_one_piece() -> None:
    rows = torch.randn(4, 6).t()
    bias, vectors = split_bias(rows)
    assert torch.equal(torch.cat([bias, vectors], dim=1), rows)


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="12 numbers are not 4 rows of a bias and 7 numbers"):
        _core.split_bias(floats(4, 3), floats(4, 1), floats(1, 7))
    with pytest.raises(InvalidArgumentError, match="4 rows of a bias and 9 numbers do not make 13"):
        _core.join_bias(floats(4, 1), floats(3, 3), floats(1, 13))
