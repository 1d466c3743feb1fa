"""Danger: an initializer of the right shape and the wrong scale, which costs convergence and never an error.

All draws are deterministic (fixed seed and ids), so the statistical bounds hold on every run or on none; they are
five standard errors wide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from comparison import int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import (
    BatchSoftmaxInitializer,
    Constant,
    HeNormal,
    HeUniform,
    Ones,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    XavierNormal,
    XavierUniform,
    Zeros,
)

DIM, ROWS = 12, 20_000
N = DIM * ROWS


def draws(initializer: Any, dim: int = DIM, rows: int = ROWS) -> np.ndarray:  # noqa: ANN401 - any initializer config
    config = TableConfig(name="t", seed=5, segments=(Segment(dim=dim, initializer=initializer),))
    return EmbeddingTable(config).lookup(int64(range(-rows // 2, rows // 2))).numpy().astype(np.float64)


def assert_moments(x: np.ndarray, mean: float, std: float, kurtosis: float) -> None:
    assert abs(x.mean() - mean) < 5 * std / np.sqrt(x.size)
    standard_error = std * np.sqrt((kurtosis - 1) / 4 / x.size)
    assert abs(x.std() - std) < 5 * standard_error
    # Neither elements of a row nor neighbouring ids may be correlated: a shifted stream would be.
    z = (x - mean) / std
    assert abs((z[:, 1:] * z[:, :-1]).mean()) < 5 / np.sqrt(z[:, 1:].size)
    assert abs((z[1:] * z[:-1]).mean()) < 5 / np.sqrt(z[1:].size)
    assert abs((z[1:, :-1] * z[:-1, 1:]).mean()) < 5 / np.sqrt(z[1:, 1:].size)


def assert_distribution(x: np.ndarray, cdf: Any) -> None:  # noqa: ANN401 - a function of an array
    """Kolmogorov-Smirnov distance; beyond 2.5 / sqrt(n) with probability 1e-5."""
    ordered = np.sort(x.ravel())
    expected = cdf(ordered)
    ranks = np.arange(1, x.size + 1) / x.size
    distance = np.maximum(np.abs(expected - ranks), np.abs(expected - ranks + 1 / x.size)).max()
    assert distance < 2.5 / np.sqrt(x.size)


def normal_cdf(x: np.ndarray) -> np.ndarray:
    grid = np.linspace(-7, 7, 280_001)
    density = np.exp(-grid * grid / 2) / np.sqrt(2 * np.pi)
    return np.interp(x, grid, np.cumsum(density) * (grid[1] - grid[0]))


UNIFORM, NORMAL = 9 / 5, 3.0  # kurtosis


@pytest.mark.parametrize(("initializer", "value"), [(Zeros(), 0.0), (Ones(), 1.0), (Constant(value=-2.5), -2.5)])
def test_constant_values(initializer: Any, value: float) -> None:  # noqa: ANN401
    assert np.unique(draws(initializer, rows=10)).tolist() == [value]


def test_batch_softmax_starts_at_the_interval() -> None:
    assert np.unique(draws(BatchSoftmaxInitializer(init_step_interval=12), dim=1, rows=10)).tolist() == [12.0]


def test_random_uniform_fills_low_to_high_and_excludes_high() -> None:
    x = draws(RandomUniform(low=-0.5, high=1.5))
    assert x.min() >= -0.5
    assert x.max() < 1.5
    assert_moments(x, 0.5, 2 / np.sqrt(12), UNIFORM)
    assert_distribution(x, lambda v: (v + 0.5) / 2)


def test_random_uniform_of_an_empty_interval_is_its_bound() -> None:
    assert np.unique(draws(RandomUniform(low=0.25, high=0.25), rows=10)).tolist() == [0.25]


@pytest.mark.parametrize(("low", "high"), [(16777215.0, 16777216.0), (1.0, float(np.nextafter(np.float32(1), 2)))])
def test_random_uniform_excludes_high_even_when_rounding_would_reach_it(low: float, high: float) -> None:
    x = draws(RandomUniform(low=low, high=high), rows=2000)
    assert x.min() >= low
    assert x.max() < high


def test_random_normal() -> None:
    x = draws(RandomNormal(mean=0.5, std=2.0))
    assert np.isfinite(x).all()
    assert_moments(x, 0.5, 2.0, NORMAL)
    assert_distribution((x - 0.5) / 2, normal_cdf)
    assert np.abs(x - 0.5).max() > 3.5 * 2, "240,000 draws without one beyond 3.5 deviations: the tail is cut"


def test_truncated_normal_is_cut_at_two_deviations_and_renormalised() -> None:
    x = draws(TruncatedNormal(mean=0.5, std=2.0))
    assert np.abs(x - 0.5).max() <= 4.0 * (1 + 1e-6)
    assert np.abs(x - 0.5).max() > 3.99
    mass = 0.9544997361036416
    inside = np.exp(-2.0) / np.sqrt(2 * np.pi)
    assert_moments(x, 0.5, 2 * np.sqrt(1 - 4 * inside / mass), 2.4)
    assert_distribution((x - 0.5) / 2, lambda v: (normal_cdf(v) - (1 - mass) / 2) / mass)


@pytest.mark.parametrize("gain", [1.0, 2.5])
@pytest.mark.parametrize("dim", [4, DIM])
def test_xavier_uniform(gain: float, dim: int) -> None:
    x = draws(XavierUniform(gain=gain), dim=dim)
    bound = gain * np.sqrt(3 / dim)
    assert np.abs(x).max() <= bound * (1 + 1e-6)
    assert np.abs(x).max() > bound * 0.999
    assert_moments(x, 0.0, gain / np.sqrt(dim), UNIFORM)


@pytest.mark.parametrize("gain", [1.0, 2.5])
def test_xavier_normal(gain: float) -> None:
    assert_moments(draws(XavierNormal(gain=gain)), 0.0, gain / np.sqrt(DIM), NORMAL)


def test_he_uniform() -> None:
    x = draws(HeUniform())
    assert np.abs(x).max() <= np.sqrt(6 / DIM) * (1 + 1e-6)
    assert np.abs(x).max() > np.sqrt(6 / DIM) * 0.999
    assert_moments(x, 0.0, np.sqrt(2 / DIM), UNIFORM)


def test_he_normal() -> None:
    assert_moments(draws(HeNormal()), 0.0, np.sqrt(2 / DIM), NORMAL)


@pytest.mark.parametrize("initializer", [RandomNormal(mean=1.5, std=0.0), TruncatedNormal(mean=1.5, std=0.0)])
def test_a_deviation_of_zero_is_the_mean(initializer: Any) -> None:  # noqa: ANN401
    assert np.unique(draws(initializer, rows=10)).tolist() == [1.5]
