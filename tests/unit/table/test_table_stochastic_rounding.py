"""Danger: rounding that is biased, that reaches into other segments (as the original's did), or that draws the same
number again and again, so that an update too small to show never does.

Draws depend on the ids and calls a table has seen, not on time or threads, so these statistics come out the same on
every run; bounds are five deviations.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from comparison import assert_equal, int64
from monolith import EmbeddingTable, Segment, TableConfig, get_num_threads, set_num_threads
from monolith.table import SGD, BatchSoftmax, BatchSoftmaxInitializer, Constant

N = 20_000
IDS = torch.arange(N) * 7_919 - 50_000
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}


def table_of(precision: str, start: float = 1.0, dim: int = 2) -> EmbeddingTable:
    segment = Segment(dim=dim, initializer=Constant(value=start), optimizer=SGD(learning_rate=1.0), precision=precision)
    return EmbeddingTable(TableConfig(name="t", segments=(segment,)))


def neighbours(x: np.ndarray, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """The largest stored number <= x and the smallest >= x."""
    nearest = torch.from_numpy(x).to(TORCH[precision])
    pattern = nearest.view(torch.int16).numpy().astype(np.int32)
    value = nearest.float().numpy()
    down = _value(pattern - np.sign(value).astype(np.int32), precision)
    up = _value(pattern + np.sign(value).astype(np.int32), precision)
    return np.where(value <= x, value, down), np.where(value >= x, value, up)


def _value(pattern: np.ndarray, precision: str) -> np.ndarray:
    return torch.from_numpy(pattern.astype(np.int16)).view(TORCH[precision]).float().numpy()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("share", [0.02, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("start", [1.0, -3.0, 0.01, 2.0**-13])
def test_rounds_up_as_often_as_the_distance_says(precision: str, share: float, start: float) -> None:
    stored = torch.tensor([start]).to(TORCH[precision]).float().item()
    below, above = neighbours(np.array([np.nextafter(np.float32(stored), np.float32(9))]), precision)
    gap = float(above[0] - below[0])
    target = np.float32(below[0] + share * gap)
    share = (float(target) - below[0]) / gap
    table = table_of(precision, start=stored)
    table.apply_gradients(IDS, torch.full((N, 2), stored - float(target)), step=1)
    values = table.lookup(IDS).numpy()
    assert set(np.unique(values).tolist()) == {float(below[0]), float(above[0])}
    ups = (values == above[0]).mean()
    assert abs(ups - share) < 5 * np.sqrt(share * (1 - share) / values.size)
    # The two elements of a row are rounded independently.
    both = (values == above[0]).all(axis=1).mean()
    assert abs(both - share**2) < 5 * np.sqrt(share**2 * (1 - share**2) / N)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_never_off_by_more_than_one_unit(precision: str) -> None:
    rng = np.random.default_rng(5)
    table = table_of(precision, start=0.0)
    weights = torch.from_numpy(rng.normal(size=(N, 2)).astype(np.float32)).to(TORCH[precision]).float()
    table.assign(IDS, weights)
    grads = rng.normal(size=(N, 2)).astype(np.float32) * rng.choice([1e-6, 1e-3, 1.0], (N, 1)).astype(np.float32)
    table.apply_gradients(IDS, torch.from_numpy(grads), step=3)
    exact = weights.numpy() - grads
    down, up = neighbours(exact, precision)
    values = table.lookup(IDS).numpy()
    assert ((values == down) | (values == up)).all()
    assert ((values != down) & (down != up)).any()
    assert ((values != up) & (down != up)).any()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_exact_results_are_not_moved(precision: str) -> None:
    table = table_of(precision)
    table.apply_gradients(IDS, torch.full((N, 2), 0.25), step=1)
    assert_equal(table.lookup(IDS), np.full((N, 2), 0.75))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_many_small_updates_add_up(precision: str) -> None:
    # 400 updates of 1/50 of a unit: lost to the last by nearest rounding, 8 units on average here.
    gap = {"fp16": 2.0**-11, "bf16": 2.0**-8}[precision]
    ids, table = IDS[:2_000], table_of(precision)
    for step in range(400):
        table.apply_gradients(ids, torch.full((2_000, 2), gap / 50), step=step)
    moved = (1 - table.lookup(ids).numpy()) / gap
    # A sum of 400 draws: mean 8, deviation sqrt(8 * 0.98) per element.
    assert abs(moved.mean() - 8) < 5 * np.sqrt(8 / moved.size)
    assert 0.8 * np.sqrt(8) < moved.std() < 1.2 * np.sqrt(8)


@pytest.mark.parametrize("duplicates", ["sum", "sequential"])
def test_many_small_updates_add_up_for_a_caller_who_passes_no_step(duplicates: str) -> None:
    # `step` is optional. If the draw depended on nothing else that changes, an id that once rounds back would for ever.
    gap, ids, table = 2.0**-11, IDS[:2_000], table_of("fp16")
    repeated = ids.repeat_interleave(10) if duplicates == "sequential" else ids
    for _ in range(40 if duplicates == "sequential" else 400):
        table.apply_gradients(repeated, torch.full((len(repeated), 2), gap / 50), duplicates=duplicates)
    moved = (1 - table.lookup(ids).numpy()) / gap
    assert abs(moved.mean() - 8) < 5 * np.sqrt(8 / moved.size)
    assert 0.8 * np.sqrt(8) < moved.std() < 1.2 * np.sqrt(8)


def test_other_segments_are_not_rounded() -> None:
    rounded = Segment(dim=3, initializer=Constant(value=0.0), optimizer=SGD(learning_rate=1.0), precision="fp16")
    plain = Segment(dim=3, initializer=Constant(value=0.0), optimizer=SGD(learning_rate=1.0))
    table = EmbeddingTable(TableConfig(name="t", segments=(plain, rounded, plain)))
    grads = np.random.default_rng(6).normal(size=(500, 9)).astype(np.float32)
    table.apply_gradients(torch.arange(500), torch.from_numpy(grads))
    values = table.lookup(torch.arange(500)).numpy()
    assert_equal(values[:, :3], -grads[:, :3])
    assert_equal(values[:, 6:], -grads[:, 6:])
    halves = values[:, 3:6]
    assert_equal(halves, halves.astype(np.float16).astype(np.float32))
    assert not (halves == -grads[:, 3:6]).any()


def test_the_step_reaches_a_rounded_batch_softmax() -> None:
    # The original's rounding wrapper dropped it, so the estimate stayed at zero.
    segment = Segment(
        dim=1,
        initializer=BatchSoftmaxInitializer(init_step_interval=8),
        optimizer=BatchSoftmax(learning_rate=0.25),
        precision="fp16",
    )
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    table.apply_gradients(int64([1]), torch.zeros(1, 1), step=4)
    assert table.lookup(int64([1])).tolist() == [[7.0]]


def test_the_same_calls_give_the_same_bits_on_any_number_of_threads() -> None:
    before, results = get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            set_num_threads(threads)
            table = table_of("bf16", dim=4)
            for step in range(3):
                grads = np.random.default_rng(step).normal(size=(N, 4)).astype(np.float32)
                table.apply_gradients(IDS, torch.from_numpy(grads), step=step)
            results.append(table.lookup(IDS).numpy())
    finally:
        set_num_threads(before)
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])
