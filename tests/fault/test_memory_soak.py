"""Danger: a table that trains for weeks and grows by a row's worth of memory for every id it has ever seen."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import Adagrad, Expiry
from monolith.testing import sgd_table_config


def resident() -> int:
    """Bytes of memory this process really holds, without what malloc keeps of what was freed.

    Other tests run in this process before: in a heap of a gigabyte with holes, malloc alone moves by megabytes.
    """
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak(*, rows: int, warm_up: int, cycles: int, allowance: int) -> None:
    """Insert `rows` new ids per cycle, evict those of two cycles ago, erase some; after `warm_up` memory must stay."""
    config = TableConfig(name="t", segments=(Segment(dim=16, optimizer=Adagrad()),), expiry=Expiry(default=2))
    table, rng, grads = EmbeddingTable(config), np.random.default_rng(1), torch.ones(rows, 16)
    payload = rows * 2 * 16 * 4
    highest = start = 0
    for now in range(warm_up + cycles):
        ids = torch.from_numpy(rng.integers(-(2**63), 2**63, rows))
        table.apply_gradients(ids, grads, event_time=now)
        table.erase(ids[: rows // 10])
        table.lookup(ids)
        table.evict()
        assert len(table) <= 2 * rows
        if now == warm_up - 1:
            start = resident()
        elif now >= warm_up:
            highest = max(highest, resident())
    assert highest - start < allowance, f"grew by {(highest - start) >> 20} MiB"
    # What a leak of every row would have cost: the bound above must be far below it.
    assert cycles * payload > 4 * allowance
    table.clear()


def test_resident_memory_stays_flat_while_ids_come_and_go() -> None:
    soak(rows=20_000, warm_up=10, cycles=40, allowance=20 << 20)


@pytest.mark.slow
def test_resident_memory_stays_flat_for_long() -> None:
    soak(rows=200_000, warm_up=20, cycles=1_000, allowance=100 << 20)


def test_clear_gives_memory_back_to_the_system() -> None:
    table, ids, values = EmbeddingTable(sgd_table_config(64)), torch.arange(300_000), torch.ones(300_000, 64)
    payload = 300_000 * 64 * 4
    # What the thread keeps for its next call, and what the allocator keeps of small pieces, is there after the first time.
    table.assign(ids, values)
    table.clear()
    before = resident()
    table.assign(ids, values)
    # Part of it may be memory that earlier tests gave back to the allocator only.
    assert resident() - before > payload / 2
    table.clear()
    assert resident() - before < payload / 8


def test_a_dropped_table_gives_its_memory_back() -> None:
    sizes, ids, values = [], torch.arange(100_000), torch.ones(100_000, 64)
    for _ in range(8):
        table = EmbeddingTable(sgd_table_config(64))
        table.assign(ids, values)
        del table
        sizes.append(resident())
    # Eight tables of 25 MB.
    assert max(sizes[2:]) - sizes[1] < 20 << 20


def test_saving_and_loading_leaves_nothing_behind(tmp_path: Path) -> None:
    table = EmbeddingTable(sgd_table_config(16))
    table.assign(torch.arange(50_000), torch.ones(50_000, 16))
    sizes = []
    for _ in range(20):
        table.save(tmp_path / "t")
        EmbeddingTable.load(tmp_path / "t")
        sizes.append(resident())
    # A file has 3 MB. What is left behind stays, and what threads of other tests take for a moment does not.
    assert min(sizes[15:]) - sizes[4] < 16 << 20
    assert len(list(tmp_path.iterdir())) == 1


def test_refused_calls_leave_nothing_behind() -> None:
    table = EmbeddingTable(sgd_table_config(16))
    ids, wrong = torch.arange(20_000), torch.ones(20_000, 17)
    sizes = []
    for _ in range(60):
        with pytest.raises(ValueError, match="grads"):
            table.apply_gradients(ids, wrong)
        sizes.append(resident())
    assert max(sizes[10:]) - sizes[9] < 16 << 20
    assert len(table) == 0
