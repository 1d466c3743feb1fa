"""Danger: half-precision rows that drift. Weights must be stored as the nearest half, ties to even, everything else
(the optimizer's state, the arithmetic) must stay float32, and every bit pattern must survive reading.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from comparison import assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import SGD, Adagrad, Constant, Zeros
from oracle import to_bf16, to_fp16

TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROUND = {"fp16": to_fp16, "bf16": to_bf16}


def table_of(precision: str, *, dim: int = 1, start: float = 0.0, stochastic: bool = False) -> EmbeddingTable:
    segment = Segment(
        dim=dim,
        initializer=Constant(value=start),
        optimizer=SGD(learning_rate=1.0),
        precision=precision,
        stochastic_rounding=stochastic,
    )
    return EmbeddingTable(TableConfig(name="t", segments=(segment,)))


def interesting_floats() -> np.ndarray:
    """Float32 numbers of every magnitude, and those on and beside every kind of rounding boundary."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32)
    # The low half alone decides the rounding to bfloat16: exact, just above, tie, beside the tie.
    near = (bits[:4_000] & 0xFFFF0000) | rng.choice(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 4_000)
    halves = rng.uniform(-65_000, 65_000, 4_000).astype(np.float16).astype(np.float32)
    steps = np.spacing(np.abs(rng.uniform(2**-26, 60_000, 4_000)).astype(np.float16)).astype(np.float32)
    ties = halves + rng.choice(np.array([0.5, -0.5], np.float32), 4_000) * steps
    edges = np.array(
        [0.0, -0.0, 65504, 65519.996, 65520, 65536, 2**-14, 2**-15, 2**-24, 2**-25, 1.0001 * 2**-25, 2**-26, 1e-40],
        np.float32,
    )
    with np.errstate(invalid="ignore"):
        values = np.concatenate([bits.view(np.float32), near.view(np.float32), halves, ties, edges, -edges])
    return values[np.isfinite(values)]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_assign_stores_the_nearest_number_ties_to_even(precision: str, stochastic: bool) -> None:
    values = interesting_floats()
    table = table_of(precision, stochastic=stochastic)
    ids = torch.arange(len(values))
    table.assign(ids, torch.from_numpy(values)[:, None])
    stored = table.lookup(ids)[:, 0].numpy()
    expected = torch.from_numpy(values).to(TORCH[precision]).float().numpy()
    # Bit for bit, so that -0.0 stays -0.0.
    assert_equal(stored.view(np.uint32), expected.view(np.uint32))
    assert_equal(stored.view(np.uint32), ROUND[precision](values).view(np.uint32))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_every_finite_pattern_survives(precision: str) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    values = torch.from_numpy(patterns.view(np.int16)).view(TORCH[precision]).float().numpy()
    values = values[np.isfinite(values)]
    table = table_of(precision)
    ids = torch.arange(len(values))
    table.assign(ids, torch.from_numpy(values)[:, None])
    assert_equal(table.lookup(ids)[:, 0].numpy().view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nan_stay_what_they_are(precision: str, value: float) -> None:
    table = table_of(precision)
    table.assign(int64([1]), float32([[value]]))
    assert_equal(table.lookup(int64([1])), [[value]])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_step_is_computed_in_float32_and_rounded_once(precision: str) -> None:
    rng = np.random.default_rng(3)
    weights = ROUND[precision](rng.uniform(-2, 2, (500, 6)).astype(np.float32))
    grads = rng.uniform(-2, 2, (500, 6)).astype(np.float32)
    table = table_of(precision, dim=6)
    ids = torch.arange(500)
    table.assign(ids, torch.from_numpy(weights))
    # At rate 1 the step is one subtraction, so that no fused operation can round differently.
    table.apply_gradients(ids, torch.from_numpy(grads))
    assert_equal(table.lookup(ids), ROUND[precision](weights - grads))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_assign_add_adds_in_float32_and_rounds_once(precision: str) -> None:
    rng = np.random.default_rng(4)
    weights = ROUND[precision](rng.uniform(-2, 2, (500, 3)).astype(np.float32))
    amounts = rng.uniform(-2, 2, (500, 3)).astype(np.float32)
    table = table_of(precision, dim=3)
    ids = torch.arange(500)
    table.assign(ids, torch.from_numpy(weights))
    table.assign_add(ids, torch.from_numpy(amounts))
    assert_equal(table.lookup(ids), ROUND[precision](weights + amounts))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_optimizer_state_stays_float32(precision: str) -> None:
    optimizer = Adagrad(initial_accumulator_value=1.0)
    segment = Segment(dim=1, initializer=Zeros(), optimizer=optimizer, precision=precision)
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    table.apply_gradients(int64([1]), float32([[2.0**-11]]))
    assert table.lookup_entry(int64([1])).slots["0/norm"].tolist() == [[1 + 2.0**-22]]


@pytest.mark.parametrize(("precision", "lost"), [("fp16", 2.0**-12), ("bf16", 2.0**-9)])
def test_nearest_rounding_loses_small_updates_and_fp32_does_not(precision: str, lost: float) -> None:
    # The reason stochastic rounding is the default.
    halves, full = table_of(precision, start=1.0), table_of("fp32", start=1.0)
    for table in (halves, full):
        for _ in range(8):
            table.apply_gradients(int64([1]), float32([[lost / 2]]))
    assert halves.lookup(int64([1])).item() == 1.0
    assert full.lookup(int64([1])).item() == 1 - 4 * lost


def test_half_precision_halves_the_rows() -> None:
    sizes = {p: table_of(p, dim=64).stats().row_bytes for p in ("fp32", "fp16", "bf16")}
    assert sizes == {"fp32": 256, "fp16": 128, "bf16": 128}
