"""Danger: a wrong argument that crashes, is silently reinterpreted, or fails after half the batch was applied. Each
case must raise `InvalidArgumentError` naming the argument, and leave the table bit for bit as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from comparison import float32, int64, snapshot
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import InvalidArgumentError
from monolith.table import Adagrad, DelayCompensation

# Two segments, dim 3 in all. Ids 1 and 2 have rows; 3 has none and must not get one.
IDS = int64([1, 3])
GOOD = float32(np.ones((2, 3)))
SPLITS = int64([0, 1, 2])
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def table() -> EmbeddingTable:
    parts = (Segment(dim=1, optimizer=Adagrad()), Segment(dim=2, optimizer=Adagrad()))
    table = EmbeddingTable(TableConfig(name="t", segments=parts))
    table.apply_gradients(int64([1, 2]), torch.ones(2, 3), event_time=5)
    return table


Call = Callable[[EmbeddingTable], Any]
CASES: dict[str, tuple[str, Call]] = {
    # ids
    "float32 ids": ("ids", lambda t: t.lookup(torch.tensor([1.0]))),
    "float64 ids": ("ids", lambda t: t.lookup(np.array([1.0]))),
    "bool ids": ("ids", lambda t: t.lookup(torch.tensor([True]))),
    "int32 ids": ("ids", lambda t: t.lookup(np.array([1], np.int32))),
    "uint64 ids": ("ids", lambda t: t.lookup(np.array([2**63], np.uint64))),
    "string ids": ("ids", lambda t: t.lookup(np.array(["a"]))),
    "no ids": ("ids", lambda t: t.lookup(None)),
    "an id of 64 unsigned bits": ("ids", lambda t: t.lookup([2**63])),
    "ids of several lengths": ("ids", lambda t: t.lookup([[1], [2, 3]])),
    "float ids to train": ("ids", lambda t: t.apply_gradients(IDS.double(), GOOD)),
    "float ids to pool": ("ids", lambda t: t.lookup_pooled(IDS.float(), SPLITS)),
    "float ids to assign": ("ids", lambda t: t.assign(IDS.float(), GOOD)),
    "float ids to erase": ("ids", lambda t: t.erase(int64([1]).float())),
    "float ids to reinitialize": ("ids", lambda t: t.reinitialize(IDS.float())),
    "float ids to contain": ("ids", lambda t: t.contains(IDS.float())),
    "float ids of entries": ("ids", lambda t: t.lookup_entry(IDS.float())),
    "matrix of ids to pool": ("ids", lambda t: t.lookup_pooled(IDS[None], SPLITS)),
    # gradients and values
    "gradients too wide": ("grads", lambda t: t.apply_gradients(IDS, torch.ones(2, 4))),
    "gradients too narrow": ("grads", lambda t: t.apply_gradients(IDS, torch.ones(2, 2))),
    "too few gradients": ("grads", lambda t: t.apply_gradients(IDS, torch.ones(1, 3))),
    "too many gradients": ("grads", lambda t: t.apply_gradients(IDS, torch.ones(3, 3))),
    "flat gradients": ("grads", lambda t: t.apply_gradients(IDS, torch.ones(6))),
    "double gradients": ("grads", lambda t: t.apply_gradients(IDS, GOOD.double())),
    "half gradients": ("grads", lambda t: t.apply_gradients(IDS, GOOD.half())),
    "integer gradients": ("grads", lambda t: t.apply_gradients(IDS, GOOD.long())),
    "complex gradients": ("grads", lambda t: t.apply_gradients(IDS, GOOD.cfloat())),
    "no gradients": ("grads", lambda t: t.apply_gradients(IDS, None)),
    "pooled gradients of the wrong dim": (
        "grads",
        lambda t: t.apply_pooled_gradients(IDS, SPLITS, torch.ones(2, 2)),
    ),
    "a pooled gradient per id": (
        "grads",
        lambda t: t.apply_pooled_gradients(IDS, int64([0, 2]), torch.ones(2, 3)),
    ),
    "double pooled gradients": ("grads", lambda t: t.apply_pooled_gradients(IDS, SPLITS, GOOD.double())),
    "values of the wrong dim": ("values", lambda t: t.assign(IDS, torch.ones(2, 4))),
    "too few values": ("values", lambda t: t.assign(IDS, torch.ones(1, 3))),
    "double values": ("values", lambda t: t.assign(IDS, GOOD.double())),
    "amounts of the wrong dim": ("values", lambda t: t.assign_add(IDS, torch.ones(2, 4))),
    "double amounts": ("values", lambda t: t.assign_add(IDS, GOOD.double())),
    "snapshot of the wrong shape": (
        "snapshot",
        lambda t: t.apply_gradients(IDS, GOOD, snapshot=torch.ones(1, 3)),
    ),
    "double snapshot": ("snapshot", lambda t: t.apply_gradients(IDS, GOOD, snapshot=GOOD.double())),
    # learning rates
    "a NaN rate": ("learning_rates", lambda t: t.apply_gradients(IDS, GOOD, learning_rates=[0.1, NAN])),
    "an infinite rate": ("learning_rates", lambda t: t.apply_gradients(IDS, GOOD, learning_rates=[INF, 0.1])),
    "a negative rate": ("learning_rates", lambda t: t.apply_gradients(IDS, GOOD, learning_rates=[0.1, -0.1])),
    "a rate beyond float32": (
        "learning_rates",
        lambda t: t.apply_gradients(IDS, GOOD, learning_rates=[0.1, 1e39]),
    ),
    "too few rates": ("learning_rates", lambda t: t.apply_gradients(IDS, GOOD, learning_rates=[0.1])),
    "too many rates": ("learning_rates", lambda t: t.apply_gradients(IDS, GOOD, learning_rates=[0.1] * 3)),
    "no rates": ("learning_rates", lambda t: t.apply_gradients(IDS, GOOD, learning_rates=[])),
    "rates in words": ("learning_rates", lambda t: t.apply_gradients(IDS, GOOD, learning_rates=["a", "b"])),
    "a NaN rate, pooled": (
        "learning_rates",
        lambda t: t.apply_pooled_gradients(IDS, SPLITS, GOOD, learning_rates=[NAN, 0.1]),
    ),
    "too few rates, pooled": (
        "learning_rates",
        lambda t: t.apply_pooled_gradients(IDS, SPLITS, GOOD, learning_rates=[0.1]),
    ),
    # steps and times
    "a negative step": ("step", lambda t: t.apply_gradients(IDS, GOOD, step=-1)),
    "a step beyond int64": ("step", lambda t: t.apply_gradients(IDS, GOOD, step=2**63)),
    "a negative step, pooled": ("step", lambda t: t.apply_pooled_gradients(IDS, SPLITS, GOOD, step=-1)),
    "a negative time": ("event_time", lambda t: t.apply_gradients(IDS, GOOD, event_time=-1)),
    "a time beyond 32 bits": ("event_time", lambda t: t.apply_gradients(IDS, GOOD, event_time=2**32)),
    "a time in milliseconds": ("event_time", lambda t: t.assign(IDS, GOOD, event_time=1_700_000_000_000)),
    "a NaN time": ("event_time", lambda t: t.assign(IDS, GOOD, event_time=NAN)),
    "a fractional time": ("event_time", lambda t: t.assign(IDS, GOOD, event_time=1.5)),
    "a time in words": ("event_time", lambda t: t.assign(IDS, GOOD, event_time="now")),
    "a negative time to add": ("event_time", lambda t: t.assign_add(IDS, GOOD, event_time=-1)),
    "a negative time to reinitialize": ("event_time", lambda t: t.reinitialize(IDS, event_time=-1)),
    "a negative time, pooled": (
        "event_time",
        lambda t: t.apply_pooled_gradients(IDS, SPLITS, GOOD, event_time=-1),
    ),
    "a negative now": ("now", lambda t: t.evict(now=-1)),
    "a now beyond 32 bits": ("now", lambda t: t.evict(now=2**32)),
    # modes
    "an unknown pooling": ("mode", lambda t: t.lookup_pooled(IDS, SPLITS, mode="max")),
    "no pooling": ("mode", lambda t: t.lookup_pooled(IDS, SPLITS, mode=None)),
    "an unknown pooling of gradients": (
        "mode",
        lambda t: t.apply_pooled_gradients(IDS, SPLITS, GOOD, mode="max"),
    ),
    "an unknown treatment of duplicates": (
        "duplicates",
        lambda t: t.apply_gradients(IDS, GOOD, duplicates="last"),
    ),
    "a batch size of zero": ("batch_size", lambda t: list(t.iter_batches(0))),
    "a negative batch size": ("batch_size", lambda t: list(t.iter_batches(-1))),
}

# What offsets may not be, for two ids.
BAD_SPLITS: dict[str, Any] = {
    "not starting at 0": int64([1, 2]),
    "starting below 0": int64([-1, 2]),
    "decreasing": int64([0, 2, 1, 2]),
    "overshooting in between": int64([0, 3, 2]),
    "ending before the ids": int64([0, 1]),
    "ending after the ids": int64([0, 3]),
    "far beyond": int64([0, 2**62]),
    "wrapping around": int64([0, -(2**63), 2]),
    "empty": int64([]),
    "a matrix": int64([0, 2])[None],
    "of floats": torch.tensor([0.0, 2.0]),
    "of 32 bits": torch.tensor([0, 2], dtype=torch.int32),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_argument(table: EmbeddingTable, name: str) -> None:
    argument, call = CASES[name]
    assert_refused(table, argument, call)


@pytest.mark.parametrize("name", BAD_SPLITS)
def test_wrong_offsets(table: EmbeddingTable, name: str) -> None:
    splits = BAD_SPLITS[name]
    bags = max(splits.numel() - 1, 0)
    assert_refused(table, "offsets", lambda t: t.lookup_pooled(IDS, splits))
    assert_refused(table, "offsets", lambda t: t.apply_pooled_gradients(IDS, splits, torch.ones(bags, 3)))


def test_delay_compensation_without_a_snapshot_is_refused() -> None:
    segment = Segment(dim=3, optimizer=DelayCompensation(base=Adagrad(), lambda_=0.1))
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    assert_refused(table, "snapshot", lambda t: t.apply_gradients(IDS, GOOD))
    assert_refused(table, "snapshot", lambda t: t.apply_pooled_gradients(IDS, SPLITS, GOOD))


def test_a_table_needs_a_config() -> None:
    for wrong in (None, {"name": "t"}, Segment(dim=1), "t"):
        with pytest.raises((InvalidArgumentError, TypeError)):
            EmbeddingTable(wrong)


def test_the_calls_used_above_are_right_when_their_arguments_are(table: EmbeddingTable) -> None:
    # Otherwise a case could be refused for a reason of its own.
    table.apply_gradients(IDS, GOOD, learning_rates=[0.1, 0.1], step=2**63 - 1, event_time=2**32 - 1, snapshot=GOOD)
    table.apply_pooled_gradients(IDS, SPLITS, GOOD, mode="mean", learning_rates=[0.1, 0.1], step=0, event_time=0)
    table.lookup_pooled(IDS, int64([0, 2]), mode="sqrtn")
    table.assign(IDS, GOOD, event_time=0)
    table.assign_add(IDS, GOOD, event_time=0)
    table.reinitialize(IDS, event_time=0)
    table.evict(now=0)
    assert len(table) == 3


def assert_refused(table: EmbeddingTable, argument: str, call: Call) -> None:
    before, clock = snapshot(table), table.stats().max_event_time
    with pytest.raises(InvalidArgumentError) as error:
        call(table)
    assert argument in str(error.value)
    assert snapshot(table) == before, "a refused call changed the table"
    assert table.stats().max_event_time == clock
    assert isinstance(error.value, ValueError), "callers who know nothing of Monolith catch ValueError"
