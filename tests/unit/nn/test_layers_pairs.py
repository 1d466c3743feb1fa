"""Danger: the core's products of pairs differ from torch's, in value, in gradient, or in what else can be done with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import monolith
from monolith.nn import kernels
from monolith.nn.kernels import dot_pairs, sum_pairs

Pairs = Callable[[torch.Tensor], torch.Tensor]

# More and fewer vectors, and floats, than the core takes at once; none at all.
SHAPES = [
    (0, 5, 4),
    (3, 1, 4),
    (3, 2, 0),
    (2, 2, 1),
    (3, 9, 7),
    (2, 17, 8),
    (4, 27, 16),
    (2, 34, 41),
    (700, 26, 17),
]


def by_torch(monkeypatch: pytest.MonkeyPatch, function: Pairs, x: torch.Tensor) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "core_can_use", lambda _: False)
        return function(x)


def with_dense(x: torch.Tensor) -> torch.Tensor:
    """The first vector as the dense one: gradients of both are in that of x."""
    return dot_pairs(x[:, 1:], x[:, 0])


FUNCTIONS = [dot_pairs, with_dense, sum_pairs]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_torchs(
    function: Pairs, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape, requires_grad=True)
    # In double, so that an error of ours is not excused by one of theirs.
    exact = x.detach().double().requires_grad_()
    ours, theirs = function(x), by_torch(monkeypatch, function, exact)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    weights = torch.randn(ours.shape)
    (grad,) = torch.autograd.grad(ours, x, weights)
    (expected,) = torch.autograd.grad(theirs, exact, weights.double())
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_penalty_on_the_gradient_has_a_gradient(function: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    def penalty_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    x = torch.randn(2, 5, 3, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    ours = penalty_gradient(x, function(x))
    torch.testing.assert_close(
        ours.double(), penalty_gradient(exact, by_torch(monkeypatch, function, exact)), rtol=1e-4, atol=1e-2
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_bits_do_not_depend_on_the_number_of_threads(function: Pairs) -> None:
    x = torch.randn(1000, 26, 16, requires_grad=True)
    before = monolith.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            monolith.set_num_threads(threads)
            y = function(x)
            results.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
    finally:
        monolith.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_views_are_read_as_they_are_seen(function: Pairs) -> None:
    x = torch.randn(4, 3, 5)
    turned = x.transpose(1, 2)
    assert torch.equal(function(turned), function(turned.contiguous()))


def test_no_vectors_have_no_pairs() -> None:
    x = torch.randn(3, 0, 4, requires_grad=True)
    dense = torch.randn(3, 4, requires_grad=True)
    assert dot_pairs(x).shape == (3, 0)
    assert sum_pairs(x).tolist() == [[0.0]] * 3
    alone = dot_pairs(x, dense)
    assert torch.equal(alone, dense)
    assert torch.equal(torch.autograd.grad(alone.sum(), dense)[0], torch.ones(3, 4))


def test_a_number_that_is_not_one_stays_in_its_pairs() -> None:
    x = torch.ones(2, 4, 3)
    x[0, 2, 1] = torch.nan
    x.requires_grad_()
    products = dot_pairs(x)
    assert products.isnan().tolist() == [[False, True, True, False, False, True], [False] * 6]
    (grad,) = torch.autograd.grad(products, x, torch.ones_like(products))
    # Row 2 of the first example is multiplied by the others only, so its own gradient is a number.
    assert grad.isnan().any(2).tolist() == [[True, True, False, True], [False] * 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_keep_their_type(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, 4, dtype=dtype)
    assert dot_pairs(x).dtype == sum_pairs(x).dtype == dtype
    assert dot_pairs(x).tolist() == [[4.0] * 3] * 2


def test_a_traced_program_has_torchs_operators() -> None:
    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([function(x) for function in FUNCTIONS], dim=1)

    x = torch.randn(4, 5, 3)
    program = torch.export.export(Both(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    other = torch.randn(7, 5, 3)
    torch.testing.assert_close(program.module()(other), Both()(other))
