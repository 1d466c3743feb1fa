"""Danger: a history that leaves a change out, shows values of another id, or decodes bytes of another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comparison import int64
from log_tables import new_table, train
from monolith import EmbeddingTable
from monolith.log import ChangeLog, LogReader, RowChange, history
from monolith.testing import sgd_table_config


def steps(changes: list[RowChange]) -> list[tuple[int, bool]]:
    return [(change.step, change.erased) for change in changes]


def test_every_change_of_an_id_with_what_it_became(tmp_path: Path) -> None:
    table, expected = new_table(), {}
    with ChangeLog(tmp_path, [table], clock=lambda: 5.0) as log:
        for step in range(6):
            if step in (1, 4, 5):
                train(table, [7, 8], step=step, event_time=100 + step)
            elif step == 2:
                train(table, [9])
            elif step == 3:
                table.erase(int64([7]))
            sequence = log.commit(step=step)
            expected[step] = (sequence, table.lookup_entry(int64([7])))
    changes = list(history(LogReader(tmp_path), 7))
    assert steps(changes) == [(1, False), (3, True), (4, False), (5, False)]
    for change in changes:
        sequence, entries = expected[change.step]
        assert (change.sequence, change.time, change.table) == (sequence, 5.0, "user")
        if change.erased:
            assert (change.values, change.slots, change.norm, change.event_time) == (None, {}, None, None)
        else:
            assert change.values == tuple(entries.values[0].tolist())
            assert change.slots == {name: tuple(slot[0].tolist()) for name, slot in entries.slots.items()}
            assert change.norm == pytest.approx(float(entries.values[0].norm()))
            assert change.event_time == 100 + change.step


def test_other_tables_and_abandoned_lines_stay_out(tmp_path: Path) -> None:
    user, item = new_table("user"), new_table("item")
    with ChangeLog(tmp_path, [user, item]) as log:
        train(user, [7])
        train(item, [7])
        log.commit(step=1)
        train(user, [7])
        log.commit(step=2)
    with ChangeLog(tmp_path, [user, item], parent=1) as log:
        train(item, [7])
        log.commit(step=3)
    reader = LogReader(tmp_path)
    assert [(c.step, c.table) for c in history(reader, 7)] == [(1, "user"), (1, "item"), (3, "item")]
    assert [c.step for c in history(reader, 7, table="user")] == [1]
    assert [c.step for c in history(reader, 7, table="user", to=2)] == [1, 2]
    assert list(history(reader, 8)) == []


def test_a_log_of_values_alone_has_them(tmp_path: Path) -> None:
    table = EmbeddingTable(sgd_table_config(2, name="user"))
    with ChangeLog(tmp_path, [table], optimizer_state=False) as log:
        table.assign(int64([-1]), torch.tensor([[3.0, 4.0]]))
        log.commit(step=1)
    (change,) = history(LogReader(tmp_path), -1)
    assert (change.values, change.norm, change.slots) == ((3.0, 4.0), 5.0, {})
