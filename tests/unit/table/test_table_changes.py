"""Danger: a change that is in no cut is a row that checkpoints and replicas never get.

A row from after the cut is as bad: it makes a state that never was."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import InvalidArgumentError
from monolith.table import Adagrad, Expiry, TableCut

DIM = 2
IDS = st.lists(st.integers(min_value=0, max_value=12) | st.sampled_from([-(2**63), 2**63 - 1]), max_size=8, unique=True)
Image = dict[int, tuple[int, bytes]]


def tracked(**options: object) -> EmbeddingTable:
    config = TableConfig(name="t", segments=(Segment(dim=DIM, optimizer=Adagrad(learning_rate=1.0)),), **options)
    table = EmbeddingTable(config)
    table.track_changes()
    return table


def read(cut: TableCut) -> tuple[Image, set[int]]:
    rows: Image = {}
    erased: set[int] = set()
    for piece in cut:
        for id_, time, row in zip(piece.ids.tolist(), piece.times.tolist(), piece.rows, strict=True):
            assert id_ not in rows
            rows[id_] = (time, row.tobytes())
        assert not erased & set(piece.erased.tolist())
        erased |= set(piece.erased.tolist())
    assert not erased & set(rows)
    return rows, erased


def image(table: EmbeddingTable) -> Image:
    entries = table.entries()
    rows = table.encode(entries)
    return {
        id_: (time, row.tobytes())
        for id_, time, row in zip(entries.ids.tolist(), entries.times.tolist(), rows, strict=True)
    }


def train(table: EmbeddingTable, ids: list[int], event_time: int = 0) -> None:
    table.apply_gradients(np.array(ids, dtype=np.int64), torch.ones(len(ids), DIM), event_time=event_time)


class CutsOfATable(RuleBasedStateMachine):
    """Any calls in any order: what the committed cuts say adds up to the table at the moment of the last cut."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tracked(expiry=Expiry(default=100))
        self.replica: Image = {}
        self.cut: TableCut | None = None
        self.then: Image = {}

    @rule(ids=IDS, time=st.integers(0, 300))
    def train(self, ids: list[int], time: int) -> None:
        train(self.table, ids, time)

    @rule(ids=IDS, time=st.integers(0, 300), value=st.floats(-5, 5, width=32))
    def assign(self, ids: list[int], time: int, value: float) -> None:
        self.table.assign(np.array(ids, dtype=np.int64), torch.full((len(ids), DIM), value), event_time=time)

    @rule(ids=IDS)
    def erase(self, ids: list[int]) -> None:
        self.table.erase(np.array(ids, dtype=np.int64))

    @rule(ids=IDS)
    def reinitialize(self, ids: list[int]) -> None:
        self.table.reinitialize(np.array(ids, dtype=np.int64))

    @rule(now=st.integers(0, 400))
    def evict(self, now: int) -> None:
        self.table.evict(now=now)

    @rule()
    def clear(self) -> None:
        self.table.clear()

    @rule(ids=IDS, time=st.integers(0, 300))
    def insert_rows(self, ids: list[int], time: int) -> None:
        rows = np.zeros((len(ids), self.table.row_bytes), dtype=np.uint8)
        self.table.insert_rows(np.array(ids, dtype=np.int64), [time] * len(ids), rows)

    @precondition(lambda self: self.cut is None)
    @rule()
    def make_cut(self) -> None:
        self.cut, self.then = self.table.cut_changes(), image(self.table)

    @precondition(lambda self: self.cut is not None)
    @rule()
    def read_and_commit(self) -> None:
        assert self.cut is not None
        rows, erased = read(self.cut)
        self.cut.commit()
        self.cut = None
        self.replica |= rows
        for id_ in erased:
            self.replica.pop(id_, None)
        assert self.replica == self.then

    @precondition(lambda self: self.cut is not None)
    @rule(read_first=st.booleans())
    def rollback(self, read_first: bool) -> None:
        assert self.cut is not None
        if read_first:
            read(self.cut)
        self.cut.rollback()
        self.cut = None

    def teardown(self) -> None:
        if self.cut is not None:
            self.rollback(read_first=False)
        self.make_cut()
        self.read_and_commit()


TestCutsOfATable = CutsOfATable.TestCase
TestCutsOfATable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_pieces_have_the_documented_types() -> None:
    table = tracked()
    train(table, [1, 2, 3], 9)
    table.erase([3])
    (piece,) = table.cut_changes()
    assert (piece.ids.dtype, piece.times.dtype, piece.rows.dtype, piece.erased.dtype) == ("i8", "u4", "u1", "i8")
    assert piece.rows.shape == (2, table.row_bytes)
    assert sorted(piece.ids.tolist()) == [1, 2]
    assert piece.times.tolist() == [9, 9]
    assert piece.erased.tolist() == [3]
    assert len(piece) == 3


def test_arrays_of_a_piece_outlive_the_table() -> None:
    table = tracked()
    train(table, list(range(100)))
    (piece,) = table.cut_changes()
    rows, erased = piece.rows, piece.erased
    copy = rows.copy()
    del table, piece
    assert (rows == copy).all()
    assert erased.size == 0


def test_many_rows_come_in_bounded_pieces() -> None:
    table = tracked()
    table.reinitialize(np.arange(100_000))
    sizes = [len(piece) for piece in table.cut_changes()]
    assert sum(sizes) == 100_000
    assert max(sizes) < 20_000


def test_changed_counts_ids_once() -> None:
    table = EmbeddingTable(tracked().config)
    train(table, [1, 2, 3])
    assert table.changed == 0
    table.track_changes()
    train(table, [1, 1, 2])
    train(table, [2, 9])
    table.erase([9, 77])
    assert table.changed == 3
    table.cut_changes()
    assert table.changed == 0


def test_a_cut_is_refused_without_tracking_and_while_one_is_under_way() -> None:
    table = EmbeddingTable(tracked().config)
    with pytest.raises(InvalidArgumentError, match="track_changes first"):
        table.cut_changes()
    table.track_changes()
    cut = table.cut_changes()
    with pytest.raises(InvalidArgumentError, match="commit it or roll it back"):
        table.cut_changes()
    cut.rollback()
    table.cut_changes()


def test_a_cut_ends_once() -> None:
    table = tracked()
    train(table, [1])
    old = table.cut_changes()
    with pytest.raises(InvalidArgumentError, match="after all of it was read"):
        old.commit()
    old.rollback()
    new = table.cut_changes()
    for call in (old.commit, old.rollback, lambda: next(iter(old))):
        with pytest.raises(InvalidArgumentError, match="not under way"):
            call()
    assert read(new)[0].keys() == {1}
    assert list(new) == []
    new.commit()


def test_a_cut_is_read_on_another_thread_while_training_goes_on() -> None:
    table = tracked()
    train(table, list(range(30_000)), 1)
    then = image(table)
    cut = table.cut_changes()
    result: list[tuple[Image, set[int]]] = []
    reader = threading.Thread(target=lambda: result.append(read(cut)))
    reader.start()
    for step in range(20):
        train(table, list(range(step * 1000, step * 1000 + 5000)), 2 + step)
        table.erase(range(step * 1000, step * 1000 + 100))
    reader.join()
    assert result == [(then, set())]
    cut.commit()
    replica, erased = dict(then), set[int]()
    rows, erased = read(table.cut_changes())
    replica |= rows
    assert {id_: row for id_, row in replica.items() if id_ not in erased} == image(table)
