"""Danger: a checkpoint of n shards restored onto m loses ids, doubles them, or puts them into the wrong shard."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from checkpoint_tables import new_table, rows_of, train
from monolith import EmbeddingTable
from monolith.log import ChangeLog
from monolith.state import plan_restore, read_manifest, restore_tables, write_checkpoint
from monolith.table import AdmissionFilter, SlidingAdmission, bucket_of, bucket_ranges

IDS = range(-300, 300)


def train_shards(shards: list[EmbeddingTable], ids: range, *, step: int = 0) -> None:
    for shard, owned in zip(shards, bucket_ranges(len(shards)), strict=True):
        train(shard, [id_ for id_ in ids if bucket_of([id_])[0] in owned], step=step)


def sharded(count: int) -> list[EmbeddingTable]:
    return [new_table() for _ in range(count)]


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.parametrize("saved", [1, 2, 3, 5])
def test_any_number_of_shards_restores_any_checkpoint(tmp_path: Path, saved: int, logged: bool) -> None:
    shards = sharded(saved)
    log = ChangeLog(tmp_path / "log", shards) if logged else None
    train_shards(shards, IDS)
    path = tmp_path / "model.ckpt-1"
    write_checkpoint(path, state={}, step=1, tables=shards, log=log, full=True)
    if log is not None:
        train_shards(shards, range(50), step=1)
        path = tmp_path / "model.ckpt-2"
        write_checkpoint(path, state={}, step=2, tables=shards, log=log)
        log.close()
    for count in (1, 2, 3, 4, 8):
        copies = sharded(count)
        report = restore_tables(path, copies)
        assert rows_of(*copies) == rows_of(*shards)
        assert report.parent == (2 if logged else 0)
        for copy, owned in zip(copies, bucket_ranges(count), strict=True):
            assert all(int(bucket_of([id_])[0]) in owned for id_ in copy)


def test_shards_with_other_borders_lose_nothing(tmp_path: Path) -> None:
    odd, even = new_table(), new_table()
    train(odd, range(1, 200, 2))
    train(even, range(0, 200, 2))
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[odd, even])
    copy = new_table()
    restore_tables(tmp_path / "model.ckpt-1", [copy])
    assert rows_of(copy) == rows_of(odd, even)


def test_one_shard_alone_takes_its_buckets(tmp_path: Path) -> None:
    shards = sharded(4)
    train_shards(shards, IDS)
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=shards)
    for shard, owned in zip(shards, bucket_ranges(4), strict=True):
        restarted = new_table()
        restore_tables(tmp_path / "model.ckpt-1", [restarted], buckets=owned)
        assert rows_of(restarted) == rows_of(shard)
        assert restarted.state() == shard.state()


def test_files_are_by_bucket_so_that_a_shard_reads_its_own(tmp_path: Path) -> None:
    shards = sharded(4)
    train_shards(shards, IDS)
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=shards)
    names = [name.rpartition("/")[2] for name in read_manifest(tmp_path / "model.ckpt-1").tables["user"].files]
    assert names == ["0000-1023.0.table", "1024-2047.1.table", "2048-3071.2.table", "3072-4095.3.table"]


def test_counts_of_a_filter_follow_their_ids_where_they_can(tmp_path: Path) -> None:
    def filtered(count: int) -> list[EmbeddingTable]:
        config = SlidingAdmission(capacity=1000, default_threshold=1)
        return [new_table(admission=AdmissionFilter(config)) for _ in range(count)]

    for saved, now in itertools.product((1, 2, 4), repeat=2):
        shards, copies = filtered(saved), filtered(now)
        train_shards(shards, range(100))
        path = tmp_path / f"model.ckpt-{saved}-{now}"
        write_checkpoint(path, state={}, step=1, tables=shards)
        report = restore_tables(path, copies)
        train_shards(copies, range(100))
        kept = saved <= now  # one filter can be copied to several shards, but several cannot be joined
        assert sum(map(len, copies)) == (100 if kept else 0)
        assert ("admission counts start again" in "".join(report.notes)) is not kept
        assert report.notes == plan_restore(path, copies).notes
