"""Danger: calls that are right alone and wrong together: an erase before a growth, an eviction between two steps, a
load in the middle. Random sequences of every call run on the table and on the oracle, and after each one
everything is compared.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from comparison import (
    INT64_MAX,
    INT64_MIN,
    assert_close,
    assert_equal,
    assert_same_rows,
    fid,
    int64,
    pair,
    snapshot,
)
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import SGD, Adagrad, Adam, Constant, Expiry, FixedR8, Fp16, Ftrl, Momentum, OneBit, RandomUniform
from oracle import DictTable

# Few enough to meet again and again; slots 0, 1, 5 and 32767 expire differently.
ALPHABET = [0, -1, 1, 2, 3, INT64_MIN, INT64_MAX, fid(1, 0), fid(1, 9), fid(5, 1), fid(5, 2), 2**32, 7_919, -7_919]
EXPIRY = Expiry(default=100, slots={1: 10, 5: 0, 32767: 60})
BULK = 400  # enough rows at once to make the index grow

NEAREST: dict[str, Any] = {"precision": "fp16", "stochastic_rounding": False}
TRAINING = {
    # Sums of multiples of 1/8 with power-of-two rates: compared bit for bit.
    "exact": (
        Segment(dim=3, initializer=Constant(value=0.5), optimizer=SGD(learning_rate=1.0)),
        Segment(dim=2, initializer=Constant(value=1.0), optimizer=SGD(learning_rate=0.5), **NEAREST),
    ),
    "many kinds": (
        Segment(dim=9, initializer=RandomUniform(low=-1.0, high=1.0), optimizer=Adagrad(learning_rate=0.1)),
        Segment(dim=1, optimizer=Adam(learning_rate=0.1)),
        Segment(dim=4, optimizer=Ftrl(learning_rate=0.1, l1=0.01, beta=1.0)),
    ),
    "read paths": (
        Segment(dim=2, optimizer=Momentum(learning_rate=0.1), compressor=FixedR8()),
        Segment(dim=3, optimizer=SGD(learning_rate=0.1), compressor=OneBit(step_size=3, amplitude=0.5)),
    ),
}
SERVING = {
    "serving": (
        Segment(dim=2, compressor=FixedR8(range=2.0)),
        Segment(dim=3, compressor=Fp16()),
        Segment(dim=2, compressor=OneBit(amplitude=0.25)),
    ),
}

ids_lists = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=12)
seeds = st.integers(0, 2**32 - 1)
times = st.integers(0, 300)
steps = st.integers(0, 12)
poolings = st.sampled_from(["sum", "mean", "sqrtn"])


class Calls(RuleBasedStateMachine):
    """What training and serving tables share."""

    configs: dict[str, tuple[Segment, ...]]
    mode = "training"
    table: EmbeddingTable
    oracle: DictTable

    def __init__(self) -> None:
        super().__init__()
        self.universe = list(ALPHABET)

    @initialize(data=st.data(), zeros=st.booleans())
    def start(self, data: st.DataObject, zeros: bool) -> None:
        self.kind = data.draw(st.sampled_from(sorted(self.configs)))
        config = TableConfig(
            name="t",
            seed=3,
            segments=self.configs[self.kind],
            mode=self.mode,
            unseen="zeros" if zeros else "initializer",
            expiry=EXPIRY,
            skip_zero_rows=self.mode == "serving" and zeros,
        )
        self.table, self.oracle = pair(config)

    def numbers(self, seed: int, rows: int) -> np.ndarray:
        """Values in [-1, 1]; multiples of 1/8, so that sums are exact."""
        return (np.random.default_rng(seed).integers(-8, 9, (rows, self.oracle.config.dim)) / 8).astype(np.float32)

    @rule(ids=ids_lists, seed=seeds, time=times)
    def assign(self, ids: list[int], seed: int, time: int) -> None:
        values = self.numbers(seed, len(ids)) * (seed % 7 != 0)
        self.table.assign(int64(ids), torch.from_numpy(values), event_time=time)
        self.oracle.assign(ids, values, event_time=time)

    @rule(ids=ids_lists, seed=seeds, time=times)
    def assign_add(self, ids: list[int], seed: int, time: int) -> None:
        values = self.numbers(seed, len(ids))
        self.table.assign_add(int64(ids), torch.from_numpy(values), event_time=time)
        self.oracle.assign_add(ids, values, event_time=time)

    @rule(ids=ids_lists, time=times)
    def reinitialize(self, ids: list[int], time: int) -> None:
        status = self.table.reinitialize(int64(ids), event_time=time)
        assert_equal(status, self.oracle.reinitialize(ids, event_time=time))

    @rule(ids=ids_lists)
    def erase(self, ids: list[int]) -> None:
        assert_equal(self.table.erase(int64(ids)), self.oracle.erase(ids))

    @rule(ids=ids_lists)
    def contains(self, ids: list[int]) -> None:
        assert_equal(self.table.contains(int64(ids)), self.oracle.contains(ids))
        assert (ids[0] in self.table) == bool(self.oracle.contains(ids[:1])[0])

    @rule(ids=ids_lists, cuts=st.lists(st.integers(0, 12), max_size=5), mode=poolings)
    def lookup_pooled(self, ids: list[int], cuts: list[int], mode: str) -> None:
        splits = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
        pooled = self.table.lookup_pooled(int64(ids), int64(splits), mode=mode)
        # From the table's own rows: those are compared elsewhere, and quantised ones may differ by a code.
        rows = self.table.lookup(int64(ids)).numpy().astype(np.float64)
        bags = [rows[begin:end] for begin, end in itertools.pairwise(splits)]
        divide = {"sum": lambda n: 1.0, "mean": float, "sqrtn": np.sqrt}[mode]
        expected = [bag.sum(axis=0) / (divide(len(bag)) if len(bag) else 1.0) for bag in bags]
        assert_close(pooled, np.array(expected), mode, rtol=2e-6, atol=2e-6)

    @rule(now=st.none() | st.integers(0, 500))
    def evict(self, now: int | None) -> None:
        assert self.table.evict(now=now) == self.oracle.evict(now=now)

    @rule(offset=st.integers(0, 3), time=times)
    def bulk_insert(self, offset: int, time: int) -> None:
        ids = [fid(offset, 1_000_000 + i) for i in range(BULK)]
        self.table.reinitialize(int64(ids), event_time=time)
        self.oracle.reinitialize(ids, event_time=time)
        self.universe = sorted({*self.universe, *ids[:5]})

    @rule(offset=st.integers(0, 3))
    def bulk_erase(self, offset: int) -> None:
        ids = [fid(offset, 1_000_000 + i) for i in range(0, BULK, 3)]
        assert_equal(self.table.erase(int64(ids)), self.oracle.erase(ids))

    @rule(chance=st.integers(0, 9))
    def clear(self, chance: int) -> None:
        if chance == 0:  # rarely, or there is never much to lose
            self.table.clear()
            self.oracle.clear()

    @rule()
    def save_and_load(self) -> None:
        before = snapshot(self.table)
        with tempfile.TemporaryDirectory() as folder:
            self.table.save(Path(folder) / "t")
            self.table = EmbeddingTable.load(Path(folder) / "t")
        assert snapshot(self.table) == before

    @rule(batch_size=st.sampled_from([1, 50, 10**6]))
    def iterate(self, batch_size: int) -> None:
        ids = [id_ for batch in self.table.iter_batches(batch_size) for id_ in batch.ids.tolist()]
        assert sorted(ids) == sorted(self.oracle.rows)

    @invariant()
    def the_same_rows(self) -> None:
        if not hasattr(self, "table"):
            return
        assert self.table.stats().rows == len(self.oracle)
        assert self.table.stats().max_event_time == self.oracle.newest
        tolerance = {} if self.kind == "exact" else {"rtol": 1e-5, "atol": 2e-6}
        assert_same_rows(self.table, self.oracle, self.universe, **tolerance)
        # Differences in the last place must not add up over a long run.
        self.oracle.adopt(self.table.lookup_entry(int64(self.universe)))


class TrainingCalls(Calls):
    configs = TRAINING

    def options(self, seed: int, step: int, time: int) -> dict[str, Any]:
        rates = np.random.default_rng(seed).choice([0.125, 0.25, 0.5, 1.0], len(self.oracle.segments))
        chosen = None if seed % 3 == 0 else rates.tolist()
        return {"learning_rates": chosen, "step": step, "event_time": time}

    @rule(ids=ids_lists, seed=seeds, step=steps, time=times, duplicates=st.sampled_from(["sum", "sequential"]))
    def apply_gradients(self, ids: list[int], seed: int, step: int, time: int, duplicates: str) -> None:
        grads, options = self.numbers(seed, len(ids)), self.options(seed, step, time)
        self.table.apply_gradients(int64(ids), torch.from_numpy(grads), duplicates=duplicates, **options)
        self.oracle.apply_gradients(ids, grads, duplicates=duplicates, **options)

    @rule(ids=ids_lists, cuts=st.lists(st.integers(0, 12), max_size=5), mode=poolings, seed=seeds, step=steps)
    def apply_pooled_gradients(self, ids: list[int], cuts: list[int], mode: str, seed: int, step: int) -> None:
        if self.kind == "exact":
            mode = "sum"  # a third is not a multiple of 1/8
        splits = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
        grads, options = self.numbers(seed, len(splits) - 1), self.options(seed, step, step * 20)
        self.table.apply_pooled_gradients(int64(ids), int64(splits), torch.from_numpy(grads), mode=mode, **options)
        self.oracle.apply_pooled_gradients(ids, splits, grads, mode=mode, **options)


class ServingCalls(Calls):
    configs = SERVING
    mode = "serving"


def test_training_calls_in_any_order() -> None:
    run_state_machine_as_test(TrainingCalls, settings=settings(max_examples=50, stateful_step_count=30))


def test_serving_calls_in_any_order() -> None:
    run_state_machine_as_test(ServingCalls, settings=settings(max_examples=20, stateful_step_count=30))


@pytest.mark.slow
@pytest.mark.parametrize("machine", [TrainingCalls, ServingCalls])
def test_calls_in_any_order_for_long(machine: type[Calls]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=1_000, stateful_step_count=60, derandomize=False))
