"""Danger: retention removes a checkpoint while its rows are being read."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_tables import new_table, train
from monolith.state import read_row, restore_tables, tables, write_checkpoint
from monolith.state.locks import claimed
from monolith.table.table_file import FileEntry


def test_a_checkpoint_is_in_use_while_its_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table()
    train(table, range(10))
    path = tmp_path / "model.ckpt-1"
    write_checkpoint(path, state={}, step=1, tables=[table])
    free: list[bool] = []
    real = tables.read_table_file

    def read(folder: object, entry: FileEntry, *rest: object) -> None:
        with claimed(path) as unused:
            free.append(unused)
        real(folder, entry, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tables, "read_table_file", read)
    restore_tables(path, [new_table()])
    read_row(path, "user", 3)
    assert free == [False, False]
    with claimed(path) as unused:
        assert unused
