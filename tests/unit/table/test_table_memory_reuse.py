"""Danger: removed rows that still take memory. The original leaked every erased row until the table was cleared."""

from __future__ import annotations

import numpy as np
import torch

from comparison import int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import Adagrad, Expiry
from monolith.testing import sgd_table_config


def test_insert_and_erase_rounds_do_not_grow_the_table() -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=16, optimizer=Adagrad()),)))
    sizes = []
    for round_ in range(25):
        # Never the same ids: reuse must not depend on an id coming back.
        ids = torch.arange(20_000) + round_ * 1_000_003
        table.apply_gradients(ids, torch.ones(20_000, 16))
        sizes.append(table.stats().bytes)
        assert table.erase(ids).all()
    assert len(table) == 0
    # Each shard keeps room for the most rows it ever held, a little more than its share; a leak would be 25 times that.
    assert max(sizes) <= sizes[0] * 1.25
    assert max(sizes[15:]) <= max(sizes[:15]) * 1.02


def test_a_sliding_window_of_ids_does_not_grow_the_table() -> None:
    config = TableConfig(name="t", segments=(Segment(dim=16),), expiry=Expiry(default=3))
    table, rng, sizes = EmbeddingTable(config), np.random.default_rng(5), []
    for now in range(60):
        ids = torch.from_numpy(rng.integers(-(2**63), 2**63, 5_000))
        table.assign(ids, torch.ones(5_000, 16), event_time=now)
        table.evict()
        sizes.append(table.stats().bytes)
        assert len(table) <= 3 * 5_000
    assert max(sizes[30:]) <= max(sizes[:30]) * 1.1


def test_overwriting_does_not_grow_the_table() -> None:
    table = EmbeddingTable(sgd_table_config(8))
    ids = torch.arange(10_000)
    table.assign(ids, torch.ones(10_000, 8))
    before = table.stats().bytes
    for _ in range(20):
        table.assign(ids, torch.ones(10_000, 8))
        table.apply_gradients(ids, torch.ones(10_000, 8))
        table.reinitialize(ids)
    assert table.stats().bytes == before


def test_lookups_do_not_grow_the_table() -> None:
    table = EmbeddingTable(sgd_table_config(8))
    table.assign(int64([1]), torch.ones(1, 8))
    before = table.stats().bytes
    for start in range(0, 200_000, 20_000):
        table.lookup(torch.arange(start, start + 20_000))
        table.lookup_entry(torch.arange(start, start + 20_000))
    assert table.stats().bytes == before
    assert len(table) == 1


def test_stats_tell_the_truth() -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=16, optimizer=Adagrad()),)))
    empty = table.stats()
    assert (empty.rows, empty.growths) == (0, 0)
    table.reinitialize(torch.arange(100_000), event_time=9)
    stats = table.stats()
    assert stats.rows == len(table) == 100_000
    assert stats.row_bytes == 2 * 16 * 4
    assert stats.max_event_time == 9
    assert stats.growths > 0
    assert 0 < stats.load <= 1
    assert stats.index_slots >= stats.rows
    # At least what the rows alone take, and not wildly more.
    assert 100_000 * stats.row_bytes <= stats.bytes <= 3 * 100_000 * (stats.row_bytes + 16)


def test_room_made_in_advance_changes_nothing_but_memory() -> None:
    roomy = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=4),), initial_capacity=100_000))
    plain = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=4),)))
    assert len(roomy) == 0
    ids = torch.arange(1000)
    assert torch.equal(roomy.lookup(ids), plain.lookup(ids))
    roomy.reinitialize(torch.arange(150_000))
    assert len(roomy) == 150_000
