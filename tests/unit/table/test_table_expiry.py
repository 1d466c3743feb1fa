"""Danger: evicting a row that is still alive, which loses a user, or keeping expired ones, which fills the memory. The clock
is event time, so a replay of old data expires as it did live; the limit is that of the id's slot (bits 48..62).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from comparison import INT64_MAX, INT64_MIN, fid, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import Expiry
from monolith.testing import sgd_table_config

DAY = 86400


def table_of(**expiry: object) -> EmbeddingTable:
    return EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=1),), expiry=Expiry(**expiry)))


def write(table: EmbeddingTable, *ids: int, at: int) -> None:
    table.assign(int64(ids), torch.ones(len(ids), 1), event_time=at)


def test_a_row_expires_exactly_at_its_limit() -> None:
    table = table_of(default=100)
    write(table, 1, at=1000)
    assert table.evict(now=1099) == 0
    assert 1 in table
    assert table.evict(now=1100) == 1
    assert 1 not in table
    assert table.evict(now=1100) == 0


def test_a_write_renews_and_an_older_write_ages() -> None:
    table = table_of(default=100)
    write(table, 1, 2, at=1000)
    write(table, 1, at=1050)
    write(table, 2, at=900)
    assert table.evict(now=1040) == 1
    assert (1 in table, 2 in table) == (True, False)


def test_the_clock_is_the_newest_event_time_written() -> None:
    table = table_of(default=100)
    write(table, 1, at=1000)
    assert table.evict() == 0
    write(table, 2, at=1099)
    assert table.evict() == 0
    write(table, 3, at=1100)
    write(table, 3, at=5)
    # 3 was last written with an old time; the clock does not go back.
    assert table.evict() == 2
    assert [id_ in table for id_ in (1, 2, 3)] == [False, True, False]


@pytest.mark.parametrize("call", ["assign_add", "apply_gradients", "reinitialize", "apply_pooled_gradients"])
def test_every_write_moves_the_clock(call: str) -> None:
    table = table_of(default=100)
    write(table, 1, at=1000)
    if call == "reinitialize":
        table.reinitialize(int64([2]), event_time=2000)
    elif call == "apply_pooled_gradients":
        table.apply_pooled_gradients(int64([2]), int64([0, 1]), torch.ones(1, 1), event_time=2000)
    else:
        getattr(table, call)(int64([2]), torch.ones(1, 1), event_time=2000)
    assert table.stats().max_event_time == 2000
    assert table.evict() == 1
    assert 2 in table


def test_the_clock_survives_the_rows_that_set_it(tmp_path: Path) -> None:
    table = table_of(default=100)
    write(table, 1, at=1000)
    write(table, 2, at=5000)
    table.erase(int64([2]))
    table.save(tmp_path / "t")
    loaded = EmbeddingTable.load(tmp_path / "t")
    assert loaded.stats().max_event_time == 5000
    assert loaded.evict() == 1
    assert table.evict() == 1


def test_slots_have_their_own_limits() -> None:
    table = table_of(default=1000, slots={7: 10, 8: 0, 32767: 50})
    ids = {
        "default": fid(6, 1),
        "seven": fid(7, 1),
        "zero": fid(8, 1),
        "last": fid(32767, 1),
        "top bit is not part of the slot": INT64_MIN + fid(7, 2),
        "all ones": -1,  # slot 32767
        "no slot": 5,
        "max": INT64_MAX,  # slot 32767
    }
    write(table, *ids.values(), at=100)

    def alive() -> set[str]:
        return {name for name, id_ in ids.items() if id_ in table}

    assert table.evict(now=100) == 1
    assert alive() == set(ids) - {"zero"}
    assert table.evict(now=110) == 2
    assert alive() == {"default", "last", "all ones", "no slot", "max"}
    assert table.evict(now=150) == 3
    assert alive() == {"default", "no slot"}
    assert table.evict(now=1100) == 2
    assert alive() == set()


def test_a_limit_of_zero_expires_at_once() -> None:
    table = table_of(default=0)
    write(table, 1, at=0)
    assert table.evict() == 1


def test_rows_from_the_future_stay() -> None:
    table = table_of(default=0)
    write(table, 1, at=1000)
    # An unsigned difference would be four billion seconds.
    assert table.evict(now=999) == 0
    assert table.evict(now=1000) == 1


def test_limits_and_times_near_the_end_of_32_bits() -> None:
    table = table_of(default=2**32 - 1)
    write(table, 1, at=0)
    write(table, 2, at=1)
    assert table.evict(now=2**32 - 2) == 0
    assert table.evict(now=2**32 - 1) == 1
    assert 2 in table


def test_the_default_keeps_rows_for_a_hundred_years() -> None:
    table = EmbeddingTable(sgd_table_config(1))
    write(table, 1, at=0)
    write(table, 2, at=36500 * DAY - 1)
    assert table.evict() == 0
    write(table, 2, at=36500 * DAY)
    assert table.evict() == 1


def test_days_are_days() -> None:
    table = EmbeddingTable(
        TableConfig(name="t", segments=(Segment(dim=1),), expiry=Expiry.days(default=2, slots={7: 0.5}))
    )
    write(table, 1, fid(7, 1), at=0)
    assert table.evict(now=DAY // 2 - 1) == 0
    assert table.evict(now=DAY // 2) == 1
    assert table.evict(now=2 * DAY - 1) == 0
    assert table.evict(now=2 * DAY) == 1


def test_many_rows_each_by_its_own_age() -> None:
    rng = np.random.default_rng(4)
    slots = rng.integers(0, 4, 20_000)
    ids = (slots.astype(np.int64) << 48) | np.arange(20_000)
    times = rng.integers(0, 1000, 20_000)
    limits = np.array([700, 10, 300, 0])
    table = table_of(default=700, slots={1: 10, 2: 300, 3: 0})
    for time in np.unique(times):
        chosen = ids[times == time]
        table.assign(torch.from_numpy(chosen), torch.ones(len(chosen), 1), event_time=int(time))
    expired = 900 - times >= limits[slots]
    assert table.evict(now=900) == np.count_nonzero(expired)
    assert table.contains(torch.from_numpy(ids)).numpy().tolist() == (~expired).tolist()


def test_save_may_leave_out_what_evict_would_remove(tmp_path: Path) -> None:
    table = table_of(default=100)
    write(table, 1, at=1000)
    write(table, 2, at=2000)
    table.save(tmp_path / "all")
    table.save(tmp_path / "alive", skip_expired=True)
    assert len(EmbeddingTable.load(tmp_path / "all")) == 2
    alive = EmbeddingTable.load(tmp_path / "alive")
    assert (1 in alive, 2 in alive) == (False, True)
    assert len(table) == 2, "saving changed the table"
