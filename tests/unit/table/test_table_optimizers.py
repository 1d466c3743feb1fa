"""Danger: a kernel that is nearly right. A missing term, a stale slot or a wrong lane trains a slightly worse model
and no one notices, so every optimizer is held against the oracle over many steps, widths and hyperparameters,
slots included.

Tolerance: both sides compute in float32 but may order and fuse operations differently. Over at most eight steps
that costs a few units in the last place (6e-8 each), so 1e-5 relative leaves room for a hundred of them; 1e-6
absolute covers results that cancel to almost nothing. The same oracle in float64 stays within a fifth of these
bounds. Two exceptions: FTRL divides a difference of square roots by the learning rate, hence rates of at least 0.05
and a wider bound; Adam's v cancels to noise under its square root when beta2 is small, hence 0.5 and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comparison import assert_same_rows, pair
from monolith import Segment, TableConfig
from monolith.table import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamom,
    Amsgrad,
    BatchSoftmax,
    BatchSoftmaxInitializer,
    DelayCompensation,
    DynamicWdAdagrad,
    Ftrl,
    GroupAdagrad,
    GroupFtrl,
    Momentum,
    MovingAverage,
    RandomUniform,
    RMSprop,
    RMSpropV2,
    RowwiseAdagrad,
)
from monolith.testing import every_optimizer
from oracle import RULES

RTOL, ATOL = 1e-5, 1e-6
FTRL_ATOL = 1e-5


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers float32 holds exactly, so that both sides start from the same hyperparameters."""
    return st.floats(float(np.float32(low)), float(np.float32(high)), width=32, allow_subnormal=False)


fractions = floats(0.0, 0.98)
second_moments = floats(0.5, 0.98)
decays = st.sampled_from([0.0, 0.0625]) | floats(0.0, 0.2)
epsilons = floats(1e-3, 1.0)
accumulators = floats(0.01, 2.0)
penalties = st.just(0.0) | floats(0.0, 1.5)

BASES: dict[str, st.SearchStrategy[Any]] = {
    "sgd": st.builds(SGD),
    "momentum": st.builds(Momentum, momentum=fractions, nesterov=st.booleans(), weight_decay=decays),
    "adagrad": st.builds(Adagrad, initial_accumulator_value=accumulators, weight_decay=decays),
    "dynamic_wd_adagrad": st.builds(
        DynamicWdAdagrad,
        initial_accumulator_value=accumulators,
        weight_decay=decays,
        decouple_weight_decay=st.booleans(),
    ),
    "rowwise_adagrad": st.builds(
        RowwiseAdagrad, initial_accumulator_value=accumulators, epsilon=epsilons, weight_decay=decays
    ),
    "adadelta": st.builds(Adadelta, averaging_ratio=fractions, epsilon=epsilons, weight_decay=decays),
    "adam": st.builds(
        Adam, beta1=fractions, beta2=second_moments, epsilon=epsilons, nesterov=st.booleans(), weight_decay=decays
    ),
    "amsgrad": st.builds(
        Amsgrad, beta1=fractions, beta2=second_moments, epsilon=epsilons, nesterov=st.booleans(), weight_decay=decays
    ),
    "adamom": st.builds(Adamom, ada_decay=fractions, mom_decay=fractions, epsilon=epsilons, weight_decay=decays),
    "rmsprop": st.builds(RMSprop, momentum=fractions, weight_decay=decays),
    "rmsprop_v2": st.builds(RMSpropV2, momentum=fractions, weight_decay=decays),
    "ftrl": st.builds(Ftrl, initial_accumulator_value=accumulators, beta=penalties, l1=penalties, l2=penalties),
    "group_ftrl": st.builds(
        GroupFtrl, initial_accumulator_value=accumulators, beta=penalties, l1=penalties, l2=penalties
    ),
    "group_adagrad": st.builds(
        GroupAdagrad,
        initial_accumulator_value=st.just(0.0) | accumulators,
        beta=penalties,
        l2=penalties,
        weight_decay=decays,
    ),
    "moving_average": st.builds(MovingAverage, momentum=fractions),
    "batch_softmax": st.builds(BatchSoftmax),
}


@dataclass(frozen=True)
class Call:
    """One `apply_gradients`."""

    seed: int
    ids: list[int]
    zeros: bool
    rate: float
    steps: int
    time: int
    duplicates: str

    def grads(self, dim: int) -> np.ndarray:
        """Gradients in [-2, 2], some exactly 0: an untouched element still takes its step."""
        rng = np.random.default_rng(self.seed)
        grads = rng.uniform(-2, 2, (len(self.ids), dim)).astype(np.float32)
        return grads * (rng.random(grads.shape) < 0.5) if self.zeros else grads


calls = st.builds(
    Call,
    seed=st.integers(0, 2**32 - 1),
    ids=st.lists(st.sampled_from([0, 1, 2, -1, 2**40]), min_size=1, max_size=6),
    zeros=st.booleans(),
    rate=floats(0.05, 0.5),
    steps=st.integers(0, 100),
    time=st.integers(0, 2**32 - 1),
    duplicates=st.sampled_from(["sum", "sequential"]),
)
# Around the widths of vector registers, where a kernel switches from lanes to its scalar tail.
dims = st.sampled_from([1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33])


def check(optimizer: Any, dim: int, history: list[Call]) -> None:  # noqa: ANN401 - any optimizer config
    kind = optimizer.base.kind if optimizer.kind == "delay_compensation" else optimizer.kind
    initializer = RandomUniform(low=-1.0, high=1.0)
    if kind == "batch_softmax":
        dim, initializer = 1, BatchSoftmaxInitializer(init_step_interval=7)
    segment = Segment(dim=dim, initializer=initializer, optimizer=optimizer)
    table, oracle = pair(TableConfig(name="t", segments=(segment,)))
    step = 0
    for call in history:
        step += call.steps
        grads, ids = call.grads(dim), np.array(call.ids, np.int64)
        # A stale read: what delay compensation corrects. Equal ids get equal snapshots, as one lookup would give them.
        stale = (oracle.lookup(ids) * np.float32(0.75)).astype(np.float32)
        options: dict[str, Any] = {
            "learning_rates": [call.rate],
            "step": step,
            "event_time": call.time,
            "duplicates": call.duplicates,
        }
        if optimizer.kind == "delay_compensation":
            table.apply_gradients(
                torch.from_numpy(ids), torch.from_numpy(grads), snapshot=torch.from_numpy(stale), **options
            )
            oracle.apply_gradients(ids, grads, snapshot=stale, **options)
        else:
            table.apply_gradients(torch.from_numpy(ids), torch.from_numpy(grads), **options)
            oracle.apply_gradients(ids, grads, **options)
        atol = FTRL_ATOL if "ftrl" in kind else ATOL
        assert_same_rows(table, oracle, [0, 1, 2, -1, 2**40, 99], rtol=RTOL, atol=atol)


@pytest.mark.parametrize("kind", sorted(BASES))
def test_every_optimizer_steps_like_the_oracle(kind: str) -> None:
    @settings(max_examples=40)
    @given(optimizer=BASES[kind], dim=dims, history=st.lists(calls, min_size=1, max_size=8))
    def run(optimizer: Any, dim: int, history: list[Call]) -> None:  # noqa: ANN401 - any optimizer config
        check(optimizer, dim, history)

    run()


@settings(max_examples=60)
@given(
    base=st.one_of(*(BASES[kind] for kind in sorted(BASES))),
    strength=floats(0.0, 0.2),
    dim=dims,
    history=st.lists(calls, min_size=1, max_size=4),
)
def test_delay_compensation_over_any_base_steps_like_the_oracle(
    base: Any,  # noqa: ANN401 - any optimizer config
    strength: float,
    dim: int,
    history: list[Call],
) -> None:
    check(DelayCompensation(base=base, lambda_=strength), dim, history)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(BASES))
def test_every_optimizer_steps_like_the_oracle_for_long(kind: str) -> None:
    @settings(max_examples=2000, derandomize=False)
    @given(optimizer=BASES[kind], dim=dims, history=st.lists(calls, min_size=1, max_size=8))
    def run(optimizer: Any, dim: int, history: list[Call]) -> None:  # noqa: ANN401 - any optimizer config
        check(optimizer, dim, history)

    run()


def test_no_optimizer_is_left_out() -> None:
    kinds = {optimizer.kind for optimizer in every_optimizer().values()}
    assert kinds == {*BASES, "delay_compensation"}
    assert set(RULES) == set(BASES)
