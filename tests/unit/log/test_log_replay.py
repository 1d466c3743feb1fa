"""Danger: a log restores another table than the one that was trained: a change missed, doubled, out of order, in
the wrong table, or of the wrong shape.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comparison import int64, snapshot
from log_tables import new_table, rebuilt, train
from monolith import CorruptFileError, EmbeddingTable
from monolith.log import ChangeLog, LogReader, replay
from monolith.log.segment_format import footer_size
from monolith.table import NUM_BUCKETS, bucket_of
from monolith.testing import sgd_table_config

IDS = st.lists(st.integers(-5, 12), max_size=8)
CALLS = st.lists(st.tuples(st.sampled_from(["train", "reset", "erase", "clear", "commit"]), IDS), max_size=25)


@given(CALLS)
def test_the_log_leads_to_the_table_at_every_commit(tmp_path_factory: pytest.TempPathFactory, calls: list) -> None:
    folder, table = tmp_path_factory.mktemp("log"), new_table()
    expected = {}
    with ChangeLog(folder, [table]) as log:
        for step, (call, ids) in enumerate([*calls, ("commit", [])]):
            if call == "train":
                train(table, ids, step=step, event_time=100 + step)
            elif call == "reset":
                table.reinitialize(int64(ids), event_time=100 + step)
            elif call == "erase":
                table.erase(int64(ids))
            elif call == "clear":
                table.clear()
            else:
                expected[log.commit(step=step)] = (snapshot(table), table.state())
    for sequence, (rows, state) in expected.items():
        copy = rebuilt(folder, sequence)
        assert snapshot(copy) == rows
        assert copy.state() == state


def test_training_goes_on_from_a_replayed_table_as_from_the_original(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path, [table]) as log:
        train(table, range(10), step=3, event_time=50)
        sequence = log.commit(step=3)
    copy = rebuilt(tmp_path, sequence)
    for both in (table, copy):
        train(both, range(5, 15), step=4, event_time=60)
    assert snapshot(copy) == snapshot(table)


def test_only_what_changed_is_in_a_segment(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path, [table]) as log:
        train(table, range(1000))
        log.commit(step=1)
        train(table, [3, 4])
        table.erase(int64([5]))
        sequence = log.commit(step=2)
        info = LogReader(tmp_path).info(sequence)
        assert (info.rows, info.erased) == (2, 1)
        info = LogReader(tmp_path).info(log.commit(step=3))
        assert (info.rows, info.erased) == (0, 0)


def test_a_large_commit_is_read_in_bounded_pieces(tmp_path: Path) -> None:
    table = EmbeddingTable(sgd_table_config(1, name="user"))
    with ChangeLog(tmp_path, [table]) as log:
        ids = torch.arange(150_000)
        table.assign(ids, torch.arange(150_000.0)[:, None])
        first = log.commit(step=1)
        table.clear()
        second = log.commit(step=2)
    reader = LogReader(tmp_path)
    pieces = list(reader.read(first))
    assert max(len(piece.ids) for piece in pieces) <= 65_536
    assert sorted(np.concatenate([piece.ids for piece in pieces]).tolist()) == ids.tolist()
    pieces = list(reader.read(second))
    assert max(len(piece.erased) for piece in pieces) <= 65_536
    assert sorted(np.concatenate([piece.erased for piece in pieces]).tolist()) == ids.tolist()


def test_tables_are_kept_apart_and_others_passed_over(tmp_path: Path) -> None:
    user, item = new_table("user"), new_table("item")
    with ChangeLog(tmp_path, [user, item]) as log:
        train(user, [1])
        train(item, [2])
        segment = LogReader(tmp_path).read(log.commit(step=1))
    copy = new_table("item")
    replay(segment, {"item": copy})
    assert snapshot(copy) == snapshot(item)


def test_names_of_the_log_need_not_be_those_of_the_tables(tmp_path: Path) -> None:
    first, second = new_table(), new_table()
    with ChangeLog(tmp_path, {"0/user": first, "1/user": second}) as log:
        train(first, [1])
        train(second, [2])
        segment = LogReader(tmp_path).read(log.commit(step=1))
    copy = new_table()
    replay(segment, {"1/user": copy})
    assert snapshot(copy) == snapshot(second)


def test_shards_of_a_table_come_together_and_apart_again(tmp_path: Path) -> None:
    odd, even, whole = new_table(), new_table(), new_table()
    with ChangeLog(tmp_path, [odd, even]) as log:
        train(odd, range(1, 200, 2), event_time=7)
        train(even, range(0, 200, 2), event_time=8)
        train(even, range(0, 200, 2), step=1, event_time=9)
        segment = LogReader(tmp_path).read(log.commit(step=2))
    replay(segment, {"user": whole})
    assert sorted(whole) == list(range(200))
    for shard in (odd, even):
        ids = int64(sorted(shard))
        mine, theirs = whole.lookup_entry(ids).to_numpy(), shard.lookup_entry(ids).to_numpy()
        assert {name: column.tobytes() for name, column in mine.items()} == {
            name: column.tobytes() for name, column in theirs.items()
        }
    assert whole.state() == even.state()
    size = NUM_BUCKETS // 4
    quarters = [new_table() for _ in range(4)]
    for n, quarter in enumerate(quarters):
        replay(segment, {"user": quarter}, buckets=range(n * size, (n + 1) * size))
    assert sorted(i for quarter in quarters for i in quarter) == sorted(whole)
    assert max(map(len, quarters)) < 100


def test_a_range_of_buckets_has_its_first_and_not_its_last(tmp_path: Path) -> None:
    table, bucket = new_table(), int(bucket_of([7])[0])
    with ChangeLog(tmp_path, [table]) as log:
        train(table, [7])
        segment = LogReader(tmp_path).read(log.commit(step=1))
    for buckets, rows in ((range(bucket, bucket + 1), 1), (range(bucket), 0), (range(bucket + 1, NUM_BUCKETS), 0)):
        copy = new_table()
        replay(segment, {"user": copy}, buckets=buckets)
        assert len(copy) == rows


def test_erased_ids_of_other_buckets_are_left_alone(tmp_path: Path) -> None:
    table, copy = new_table(), new_table()
    with ChangeLog(tmp_path, [table]) as log:
        for one in (table, copy):
            train(one, range(100))
        table.clear()
        segment = LogReader(tmp_path).read(log.commit(step=1))
    replay(segment, {"user": copy}, buckets=range(0))
    assert len(copy) == 100
    replay(segment, {"user": copy})
    assert len(copy) == 0


def test_rows_of_another_layout_are_refused_before_anything_changes(tmp_path: Path) -> None:
    user, item = new_table("user"), new_table("item", dim=4)
    with ChangeLog(tmp_path, [user, item]) as log:
        train(user, [1])
        train(item, [2])
        segment = LogReader(tmp_path).read(log.commit(step=1))
    copies = {"user": new_table("user"), "item": new_table("item", dim=5)}
    with pytest.raises(CorruptFileError, match="table 'item'"):
        replay(segment, copies)
    assert [len(copy) for copy in copies.values()] == [0, 0]


def test_damage_in_the_last_piece_is_found_before_anything_changes(tmp_path: Path) -> None:
    user, item = new_table("user"), new_table("item")
    with ChangeLog(tmp_path, [user, item]) as log:
        train(user, [1])
        train(item, [2])
        segment = LogReader(tmp_path).read(log.commit(step=1))
    data = bytearray(segment.path.read_bytes())
    data[len(data) - footer_size(2) - 3] ^= 1
    segment.path.write_bytes(data)
    copies = {"user": new_table("user"), "item": new_table("item")}
    with pytest.raises(CorruptFileError):
        replay(segment, copies)
    assert [len(copy) for copy in copies.values()] == [0, 0]


def test_values_alone_are_smaller_and_read_the_same(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path, [table], optimizer_state=False) as log:
        train(table, range(50), event_time=9)
        table.erase(int64([3]))
        segment = LogReader(tmp_path).read(log.commit(step=1))
    assert segment.info.kind == "values"
    assert segment.info.tables[0].row_bytes == 4 * table.dim
    copy = new_table()
    copy.reinitialize(int64([3]))
    replay(segment, {"user": copy})
    ids = int64(range(50))
    assert torch.equal(copy.lookup(ids), table.lookup(ids))
    assert torch.equal(copy.lookup_entry(ids).times, table.lookup_entry(ids).times)
    with pytest.raises(CorruptFileError, match="have 5 values, expected 6"):
        replay(segment, {"user": new_table(dim=4)})
