"""Danger: an id whose bucket changes is looked for in a file, or on a server, that does not have it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError
from monolith.table import NUM_BUCKETS, Adam, bucket_of, read_rows_into
from monolith.table.buckets import bucket_owners, bucket_ranges

CONFIG = TableConfig(name="t", segments=(Segment(dim=3),))


@pytest.fixture
def table() -> EmbeddingTable:
    table = EmbeddingTable(CONFIG)
    ids = torch.arange(20_000)
    table.assign(ids, ids[:, None].expand(-1, 3).float(), event_time=1000)
    return table


def test_buckets_are_pinned() -> None:
    # Files and owners depend on these: they may never change.
    assert NUM_BUCKETS == 4096
    ids = [0, 1, -1, 42, -(2**63), 2**63 - 1]
    assert bucket_of(ids).tolist() == [3618, 2320, 3661, 3037, 1153, 678]
    assert bucket_of(ids, 1).tolist() == [0] * 6
    assert bucket_of(ids, 3).tolist() == [2, 1, 2, 2, 0, 0]
    assert bucket_of(ids, 1 << 20).tolist() == [926218, 594082, 937367, 777587, 295404, 173693]


def test_buckets_are_even_and_nested() -> None:
    ids = np.arange(400_000)
    counts = np.bincount(bucket_of(ids), minlength=NUM_BUCKETS)
    assert counts.min() > 40
    assert counts.max() < 180
    assert (bucket_of(ids, 512) == bucket_of(ids) // 8).all()


def test_the_shape_is_kept() -> None:
    assert bucket_of(torch.arange(6).reshape(2, 3)).shape == (2, 3)
    assert bucket_of([]).shape == (0,)


def test_every_bucket_has_one_owner() -> None:
    for count in (1, 2, 3, 7):
        owners = bucket_owners(bucket_ranges(count), count)
        assert owners.tolist() == sorted(owners)
        assert set(owners) == set(range(count))
    for count in (0, NUM_BUCKETS + 1):
        with pytest.raises(InvalidArgumentError, match=rf"expected 1\.\.4096 owners, got {count}"):
            bucket_ranges(count)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([range(11), range(10, 4096)], r"ranges\[1\]: some of range\(10, 4096\) belong to an earlier owner"),
        ([range(7), range(8, 4096)], "nobody owns bucket 7"),
        ([range(4096)], "expected one for each of 2 owners, got 1"),
        ([range(10), range(10, 5000)], r"ranges\[1\]: expected consecutive buckets of 0\.\.4095"),
        ([range(0, 4096, 2), range(1, 4096, 2)], r"ranges\[0\]: expected consecutive buckets"),
    ],
)
def test_owners_that_overlap_or_leave_a_bucket_out_are_refused(ranges: list[range], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bucket_owners(ranges, 2)


@pytest.mark.parametrize("count", [0, -1, 2**63])
def test_impossible_counts_are_refused(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match="count"):
        bucket_of([1], count)


@pytest.mark.parametrize(
    "buckets", [range(4096), range(0), range(5, 6), range(31, 33), range(100, 3001), range(4064, 4096)]
)
def test_a_file_of_buckets_has_exactly_their_rows(table: EmbeddingTable, tmp_path: Path, buckets: range) -> None:
    table.save(tmp_path / "t", buckets=buckets)
    part = EmbeddingTable.load(tmp_path / "t")
    ids = np.arange(20_000)
    mine = np.isin(bucket_of(ids), np.array(buckets))
    assert sorted(part) == ids[mine].tolist()
    assert torch.equal(part.lookup(ids[mine]), table.lookup(ids[mine]))


def test_ranges_put_together_are_the_table(table: EmbeddingTable, tmp_path: Path) -> None:
    bounds = [0, 7, 1024, 2047, 4096]
    for first, last in itertools.pairwise(bounds):
        table.save(tmp_path / f"{first}", buckets=range(first, last))
    copy = EmbeddingTable(CONFIG)
    assert sum(read_rows_into(copy, tmp_path / f"{first}") for first in bounds[:-1]) == 20_000
    ids = torch.arange(20_000)
    assert torch.equal(copy.lookup(ids), table.lookup(ids))
    assert torch.equal(copy.lookup_entry(ids).times, table.lookup_entry(ids).times)


def test_rows_of_a_file_can_be_taken_by_bucket(table: EmbeddingTable, tmp_path: Path) -> None:
    table.save(tmp_path / "t")
    part = EmbeddingTable(CONFIG)
    n = read_rows_into(part, tmp_path / "t", buckets=range(1000, 1100))
    ids = np.arange(20_000)
    assert sorted(part) == ids[np.isin(bucket_of(ids), np.arange(1000, 1100))].tolist()
    assert n == len(part)


def test_reading_rows_replaces_and_keeps(table: EmbeddingTable, tmp_path: Path) -> None:
    table.save(tmp_path / "t")
    other = EmbeddingTable(CONFIG)
    other.assign([1, -7], torch.full((2, 3), 9.0))
    read_rows_into(other, tmp_path / "t")
    assert other.lookup([1, -7]).tolist() == [[1.0] * 3, [9.0] * 3]
    assert len(other) == 20_001


def test_expired_rows_and_buckets_are_left_out_together(tmp_path: Path) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=CONFIG.segments, expiry={"default": 10}))
    table.assign(range(100), torch.zeros(100, 3), event_time=5)
    table.assign(range(0, 100, 2), torch.zeros(50, 3), event_time=50)
    table.save(tmp_path / "t", skip_expired=True, buckets=range(2048))
    kept = sorted(EmbeddingTable.load(tmp_path / "t"))
    assert kept == [id_ for id_ in range(0, 100, 2) if bucket_of([id_])[0] < 2048]


def test_another_layout_is_refused(table: EmbeddingTable, tmp_path: Path) -> None:
    table.save(tmp_path / "t")
    other = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=3, optimizer=Adam()),)))
    with pytest.raises(CorruptFileError, match="holds rows of layout"):
        read_rows_into(other, tmp_path / "t")
    assert len(other) == 0


@pytest.mark.parametrize("buckets", [range(-1, 5), range(5, 4097), range(0, 10, 2), range(9, 3), [1, 2], slice(0, 3)])
def test_impossible_buckets_are_refused(table: EmbeddingTable, tmp_path: Path, buckets: range) -> None:
    with pytest.raises(InvalidArgumentError, match="buckets"):
        table.save(tmp_path / "t", buckets=buckets)
    assert not (tmp_path / "t").exists()
