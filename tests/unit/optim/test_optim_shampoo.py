"""Danger: Shampoo with an axis mixed up, a root of the wrong order or a schedule off by one still lowers the loss. It is held
against a version in NumPy that builds whole matrices and multiplies axes by einsum.
"""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest
import torch

from monolith.optim import Shampoo
from monolith.optim.optimizers import apply_sparse_precond, eigen_inverse_root


def inverse_root(matrix: np.ndarray, p: int, head: int, tail: int, damping: float) -> np.ndarray:
    """The whole approximate matrix ** (-1 / p)."""
    values, vectors = np.linalg.eigh(matrix)
    roots = np.maximum(values, damping) ** (-1 / p)
    n = len(values)
    if head + tail > n:
        head, tail, first = n, 0, 0
    else:
        above = np.flatnonzero(values > damping)
        first = above[0] if len(above) else 0
        first = min(first, n - head - tail)
    kept = [*range(first, first + head), *range(n - tail, n)]
    others = [roots[i] for i in range(first + head, n - tail)]
    offset = np.mean(others) if others else 0.0
    return sum(((roots[i] - offset) * np.outer(vectors[:, i], vectors[:, i]) for i in kept), offset * np.eye(n))


class Reference:
    """One parameter of rank >= 1 under the rule, in float64."""

    def __init__(self, w: np.ndarray, settings: dict[str, Any]) -> None:
        self.w, self.h, self.step = w, settings, 0
        self.s = [np.zeros((n, n)) for n in w.shape]
        self.g, self.p = list(self.s), list(self.s)
        self.d, self.m, self.pm = (np.zeros_like(w) for _ in range(3))

    def update(self, gradient: np.ndarray) -> None:
        h, rank, letters = self.h, gradient.ndim, string.ascii_lowercase[: gradient.ndim]
        direction = gradient
        for axis, letter in enumerate(letters):
            other = letters.replace(letter, "z")
            if self.step % h["tau_2"] == 0:
                self.g[axis] = np.einsum(f"{letters},{other}->{letter}z", gradient, gradient)
            keep, take = (h["beta_2"], 1 - h["beta_2"]) if h["beta_2"] < 1 else (1, 1)
            self.s[axis] = keep * self.s[axis] + take * self.g[axis]
            first = self.step == h["warmup"] + 1
            if self.step > h["warmup"] and (self.step % h["tau_1"] == 0 or first):
                pairs = h["eigen_head"], h["eigen_tail"]
                self.p[axis] = inverse_root(self.s[axis], 2 * rank, *pairs, h["damping_epsilon"])
            direction = np.einsum(f"{letters},{letter}z->{other}", direction, self.p[axis])
        self.d = self.d + gradient**2
        self.m = h["beta_1"] * self.m + (1 - h["beta_1"]) * gradient / np.sqrt(self.d + 1e-30)
        self.pm = h["beta_1"] * self.pm + (1 - h["beta_1"]) * direction
        second = self.pm * np.linalg.norm(self.m) / (np.linalg.norm(self.pm) + 1e-10)
        share = np.clip(self.step / h["warmup"] - 1, 0, 1) if h["warmup"] else float(self.step > 0)
        self.w = self.w - h["lr"] * ((1 - share) * self.m + share * second)
        self.step += 1


SETTINGS: dict[str, Any] = {
    "lr": 0.1,
    "beta_1": 0.9,
    "beta_2": 1.0,
    "warmup": 4,
    "tau_1": 3,
    "tau_2": 2,
    "eigen_head": 100,
    "eigen_tail": 100,
    "damping_epsilon": 1e-3,
}
VARIANTS = [
    {},
    {"beta_2": 0.8},
    {"eigen_head": 1, "eigen_tail": 1},
    {"eigen_head": 2, "eigen_tail": 0},
    {"eigen_head": 0, "eigen_tail": 3},
    {"tau_1": 1, "tau_2": 1},
    {"warmup": 0},
    # The warm-up ends long before the first multiple of tau_1.
    {"warmup": 2, "tau_1": 50},
    {"damping_epsilon": 5.0, "eigen_head": 2, "eigen_tail": 1},
]


@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 4, 5)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_through_warm_up_blend_and_beyond_follow_the_formula(
    shape: tuple[int, ...], variant: dict[str, Any]
) -> None:
    rng = np.random.default_rng(1)
    settings = SETTINGS | variant
    reference = Reference(rng.normal(size=shape), settings)
    weight = torch.nn.Parameter(torch.from_numpy(reference.w.copy()))
    optimizer = Shampoo([weight], **settings)
    for _ in range(14):
        gradient = rng.normal(size=shape)
        reference.update(gradient)
        weight.grad = torch.from_numpy(gradient)
        optimizer.step()
        np.testing.assert_allclose(weight.detach().numpy(), reference.w, rtol=1e-7, atol=1e-9)
    state = optimizer.state[weight]
    for name, want in (("d", reference.d), ("m", reference.m), ("pm", reference.pm)):
        np.testing.assert_allclose(state[name].numpy(), want, rtol=1e-7, atol=1e-9)
    for axis in range(len(shape)):
        np.testing.assert_allclose(state[f"s{axis}"].numpy(), reference.s[axis], rtol=1e-9)
        np.testing.assert_allclose(state[f"g{axis}"].numpy(), reference.g[axis], rtol=1e-9)


def test_slots_have_the_shapes_of_the_original() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 8))
    weight.grad = torch.ones_like(weight)
    optimizer = Shampoo([weight], eigen_head=2, eigen_tail=3)
    optimizer.step()
    shapes = {name: tuple(slot.shape) for name, slot in optimizer.state[weight].items()}
    per_axis = {"s0": (3, 3), "g0": (3, 3), "pvec0": (3, 3), "pval0": (3,), "o0": ()}
    per_axis |= {"s1": (8, 8), "g1": (8, 8), "pvec1": (8, 5), "pval1": (5,), "o1": ()}
    assert shapes == {"step": (), "d": (3, 8), "m": (3, 8), "pm": (3, 8), **per_axis}


def test_a_scalar_is_a_vector_of_one() -> None:
    weights = [torch.nn.Parameter(torch.tensor(value)) for value in (1.0, [1.0])]
    optimizer = Shampoo(weights, lr=0.05, warmup=2, tau_1=1, tau_2=1)
    for _ in range(9):
        optimizer.zero_grad()
        sum(weight.square().sum() for weight in weights).backward()
        optimizer.step()
    assert weights[0].item() == weights[1].item() < 0.9


@pytest.mark.parametrize("p", [2, 4, 6])
def test_all_eigenvectors_give_the_inverse_root(p: int) -> None:
    factor = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = factor @ factor.T + torch.eye(6)
    vectors, values, offset = eigen_inverse_root(matrix, p, head=3, tail=3, damping=1e-9)
    root = vectors @ values.diag() @ vectors.T + offset * torch.eye(6)
    torch.testing.assert_close(torch.linalg.matrix_power(root, p) @ matrix, torch.eye(6, dtype=torch.float64))


def test_what_is_left_out_gets_the_mean_of_its_roots_and_tiny_eigenvalues_are_not_the_head() -> None:
    eigenvalues = torch.tensor([1e-9, 1.0, 4.0, 16.0, 25.0, 100.0])
    vectors, values, offset = eigen_inverse_root(eigenvalues.diag(), 2, head=1, tail=1, damping=1e-3)
    assert offset.item() == pytest.approx((1 / 2 + 1 / 4 + 1 / 5) / 3)
    assert vectors.abs().argmax(0).tolist() == [1, 5]
    assert (values + offset).tolist() == pytest.approx([1.0, 0.1])


def test_without_any_eigenvalue_above_damping_all_directions_are_scaled_alike() -> None:
    vectors, values, offset = eigen_inverse_root(torch.zeros(5, 5), 2, head=1, tail=1, damping=0.25)
    torch.testing.assert_close(vectors @ values.diag() @ vectors.T + offset * torch.eye(5), 2 * torch.eye(5))


def test_preconditioning_every_axis_once_restores_their_order() -> None:
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    result = tensor
    for n in tensor.shape:
        result = apply_sparse_precond(result, torch.eye(n), torch.ones(n), torch.tensor(1.0))
    torch.testing.assert_close(result, 8 * tensor)
