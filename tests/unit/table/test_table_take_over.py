"""Danger: a table whose rows were exchanged forgets to remember changes, or keeps a filter that counts for the old rows."""

from __future__ import annotations

import pytest

from checkpoint_tables import new_table, rows_of, table_config, train
from monolith import EmbeddingTable, InvalidArgumentError
from monolith.table import AdmissionFilter, SlidingAdmission


def test_rows_state_and_filter_are_exchanged() -> None:
    admission = AdmissionFilter(SlidingAdmission(capacity=1000, default_threshold=1))
    table, other = new_table(), new_table(admission=admission)
    train(table, range(5))
    for step in (1, 2):
        train(other, range(7), step=step)
    expected, state = rows_of(other), other.state()
    table.take_over(other)
    assert (rows_of(table), table.state()) == (expected, state)
    assert table.admission is admission
    train(table, [100])
    assert 100 not in table
    train(table, [100])
    assert 100 in table


def test_changes_are_remembered_on() -> None:
    table, other = new_table(), new_table()
    table.track_changes()
    train(table, range(5))
    train(other, range(7))
    table.take_over(other)
    assert table.changed == 0
    train(table, [3])
    assert [piece.ids.tolist() for piece in table.cut_changes()] == [[3]]


def test_without_tracking_there_is_none_afterwards() -> None:
    table = new_table()
    table.take_over(new_table())
    train(table, [3])
    assert table.changed == 0


@pytest.mark.parametrize("config", [table_config(dim=4), table_config(seed=5)])
def test_a_table_of_another_kind_is_refused(config: object) -> None:
    table = new_table()
    train(table, range(5))
    with pytest.raises(InvalidArgumentError, match="other: expected a table of layout and seed"):
        table.take_over(EmbeddingTable(config))  # type: ignore[arg-type]
    assert len(table) == 5
