"""Danger: tools that inspect a row (history of an id, debugging, migration) reading another id's slot or a made-up
one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from comparison import assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import Adagrad, Adam, BatchSoftmax, FixedR8
from monolith.testing import every_optimizer

# The names of the original's dump, where it had one; a scalar slot has width 1.
SLOTS = {
    "sgd": {},
    "momentum": {"n": 5},
    "adagrad": {"norm": 5},
    "dynamic_wd_adagrad": {"norm": 5},
    "rowwise_adagrad": {"norm": 1},
    "adadelta": {"accum": 5, "accum_update": 5},
    "adam": {"m": 5, "v": 5, "beta1_power": 1, "beta2_power": 1},
    "amsgrad": {"m": 5, "v": 5, "vhat": 5, "beta1_power": 1, "beta2_power": 1},
    "adamom": {"m": 5, "v": 5, "c": 1},
    "rmsprop": {"n": 5},
    "rmsprop_v2": {"n": 5},
    "ftrl": {"zero": 5, "norm": 5},
    "group_ftrl": {"zero": 5, "norm": 5},
    "group_adagrad": {"grad_square_sum": 1},
    "moving_average": {},
    "batch_softmax": {"global_step": 1},
    "delay_compensation": {"norm": 5},
}


@pytest.mark.parametrize("name", every_optimizer())
def test_slot_names_and_widths(name: str) -> None:
    optimizer = every_optimizer()[name]
    dim = 1 if isinstance(optimizer, BatchSoftmax) else 5
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=dim, optimizer=optimizer),)))
    table.reinitialize(int64([1]))
    for ids in ([1], [1, 2, 3], []):
        slots = table.lookup_entry(int64(ids)).slots
        expected = {f"0/{slot}": (len(ids), width) for slot, width in SLOTS[optimizer.kind].items()}
        assert {slot: tuple(values.shape) for slot, values in slots.items()} == expected
        for slot, values in slots.items():
            assert values.dtype == (torch.int64 if slot == "0/global_step" else torch.float32)


def test_slots_of_each_segment_are_named_by_its_position() -> None:
    parts = (Segment(dim=2, optimizer=Adagrad()), Segment(dim=3, optimizer=Adam()), Segment(dim=2, optimizer=Adagrad()))
    table = EmbeddingTable(TableConfig(name="t", segments=parts))
    table.apply_gradients(int64([1]), float32([[1.0, 1.0, 9.0, 9.0, 9.0, 2.0, 2.0]]))
    slots = table.lookup_entry(int64([1])).slots
    assert list(slots) == ["0/norm", "1/m", "1/v", "1/beta1_power", "1/beta2_power", "2/norm"]
    assert_equal(slots["0/norm"], np.full((1, 2), np.float32(0.1) + np.float32(1)))
    assert_equal(slots["2/norm"], np.full((1, 2), np.float32(0.1) + np.float32(4)))


def test_unseen_ids_are_marked_and_zero() -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=2, optimizer=Adagrad()),)))
    table.assign(int64([1]), float32([[1.0, 2.0]]), event_time=6)
    entries = table.lookup_entry(int64([9, 1, 8, 1]))
    assert entries.ids.tolist() == [9, 1, 8, 1]
    assert entries.found.tolist() == [False, True, False, True]
    assert entries.values.tolist() == [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [1.0, 2.0]]
    assert entries.times.tolist() == [0, 6, 0, 6]
    assert entries.slots["0/norm"][0].tolist() == [0.0, 0.0]
    assert (entries.ids.dtype, entries.found.dtype, entries.times.dtype) == (torch.int64, torch.bool, torch.int64)
    assert len(table) == 1


def test_values_are_the_stored_weights_not_what_a_lookup_reads() -> None:
    segment = Segment(dim=1, compressor=FixedR8())
    table = EmbeddingTable(TableConfig(name="t", segments=(segment,)))
    table.assign(int64([1]), float32([[0.501]]))
    assert table.lookup_entry(int64([1])).values.item() == float(np.float32(0.501))
    assert table.lookup(int64([1])).item() == 0.5


def test_the_latest_time_fits() -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=1),)))
    table.reinitialize(int64([1]), event_time=2**32 - 1)
    assert table.lookup_entry(int64([1])).times.tolist() == [2**32 - 1]
