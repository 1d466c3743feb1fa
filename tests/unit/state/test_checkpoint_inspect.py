"""Danger: inspecting a checkpoint loads it, changes it, or reports something false."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_tables import files_below, new_table, train
from monolith import CorruptFileError, InvalidArgumentError
from monolith.log import ChangeLog
from monolith.state import find_restore_point, inspect_checkpoint, read_row, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tables = [new_table("user"), new_table("item")]
    with ChangeLog(tmp_path / "log", tables) as log:
        train(tables[0], range(100), step=5)
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=tables, log=log, full=True)
        train(tables[0], range(90, 110), step=6)
        tables[0].erase([3])
        write_checkpoint(
            tmp_path / "model.ckpt-2", state={}, step=2, tables=tables, log=log, config={"seed": 3}, time=77.0
        )
        log.commit(step=3, dense={})
    return tmp_path


def test_what_a_checkpoint_says_of_itself(run: Path) -> None:
    before = {path: path.read_bytes() for path in files_below(run)}
    found = inspect_checkpoint(run / "model.ckpt-2")
    assert (found.step, found.time, found.event_time, found.sequence) == (2, 77.0, 6, 2)
    assert (found.snapshot, found.segments, found.problem, found.config) == ("0" * 20, 2, None, {"seed": 3})
    assert {name: (table.rows, table.shards) for name, table in found.tables.items()} == {
        "user": (109, 1),
        "item": (0, 1),
    }
    # Also of rows that are in the log and in no file of their own.
    assert found.tables["user"].bytes == 109 * new_table().row_bytes
    assert found.snapshot_bytes == sum(path.stat().st_size for path in (run / "snapshots").rglob("*.table"))
    assert found.segment_bytes == sum((run / "log" / f"{n:020d}.segment").stat().st_size for n in (1, 2))
    assert found.tables["user"].newest_event_time == 6
    assert {path: path.read_bytes() for path in files_below(run)} == before


def test_one_row(run: Path) -> None:
    old, new = (read_row(run / f"model.ckpt-{n}", "user", 95) for n in (1, 2))
    assert old is not None
    assert new is not None
    assert (old.times.tolist(), new.times.tolist()) == ([5], [6])
    assert new.slots.keys() == old.slots.keys()
    assert read_row(run / "model.ckpt-2", "user", 3) is None
    assert read_row(run / "model.ckpt-2", "item", 95) is None
    assert read_row(find_restore_point(run, step=3), "user", 109) is not None
    with pytest.raises(InvalidArgumentError, match="has no 'x'; it has 'user', 'item'"):
        read_row(run / "model.ckpt-2", "x", 95)


def test_an_incomplete_one_says_why(run: Path) -> None:
    (run / "log" / f"{2:020d}.segment").unlink()
    found = inspect_checkpoint(run / "model.ckpt-2")
    assert found.problem is not None
    assert "the file is missing" in found.problem
    assert found.step == 2
    with pytest.raises(CorruptFileError, match=r"has no manifest\.json"):
        inspect_checkpoint(run / "log")
