"""Danger: files large enough to be read past the page cache, in several blocks and by several threads at once, lose rows, mix
them up, or are believed though they are damaged.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable, get_num_threads, set_num_threads
from monolith.errors import CorruptFileError
from monolith.table import read_rows_into
from monolith.testing import sgd_table_config

ROWS = 80_000


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = EmbeddingTable(sgd_table_config(64))
    ids = torch.arange(ROWS) * 7_919
    table.assign(ids, ids.to(torch.float32)[:, None] + torch.arange(64), event_time=5)
    path = tmp_path_factory.mktemp("large") / "t.table"
    assert table.save(path) > 20_000_000
    return path


def forget_cached(path: Path) -> Path:
    """Let the kernel forget what it has of a file, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def assert_all_rows(table: EmbeddingTable) -> None:
    ids = torch.arange(ROWS) * 7_919
    assert len(table) == ROWS
    assert torch.equal(table.lookup(ids), ids.to(torch.float32)[:, None] + torch.arange(64))


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_a_large_file_loads_whole_cached_or_not(saved: Path, threads: int) -> None:
    set_num_threads(threads)
    assert_all_rows(EmbeddingTable.load(forget_cached(saved)))
    saved.read_bytes()
    assert_all_rows(EmbeddingTable.load(saved))


def test_its_buckets_are_read_one_part_after_the_other(saved: Path) -> None:
    table = EmbeddingTable(sgd_table_config(64))
    for buckets in (range(1000), range(1000, 1001), range(1001, 4096)):
        read_rows_into(table, forget_cached(saved), buckets)
    assert_all_rows(table)


def test_its_checksum_is_asked_for_before_rows_are_read(saved: Path) -> None:
    table = EmbeddingTable(sgd_table_config(64))
    with pytest.raises(CorruptFileError, match="its checksum is wrong"):
        read_rows_into(table, saved, checksum="crc32c:00000000")
    assert len(table) == 0


def test_a_flipped_bit_is_refused_wherever_it_is(saved: Path, tmp_path: Path) -> None:
    data, chance = np.fromfile(saved, dtype=np.uint8), random.Random(3)
    damaged = tmp_path / "damaged.table"
    for _ in range(12):
        place = chance.randrange(data.size)
        data[place] ^= 1 << chance.randrange(8)
        data.tofile(damaged)
        with pytest.raises(CorruptFileError):
            EmbeddingTable.load(forget_cached(damaged))
        data[place] = saved.read_bytes()[place]
