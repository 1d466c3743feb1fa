"""Danger: going back to a moment brings back the rows, weights or data position of another."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from checkpoint_tables import new_table, rows_of, train
from monolith import CorruptFileError, EmbeddingTable, InvalidArgumentError
from monolith.log import ChangeLog
from monolith.state import find_restore_point, restore_point_of, restore_points, restore_tables, write_checkpoint
from monolith.state.model_dir import ModelDir

module = importlib.import_module("monolith.state.restore_points")  # the package has a function of that name


class Clock:
    """Ten seconds pass with every step."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    model_dir: Path, table: EmbeddingTable, log: ChangeLog, clock: Clock, steps: range
) -> dict[int, dict[int, bytes]]:
    """A checkpoint at every third step, a restore point in the log at every other; the rows of every step."""
    states = {}
    for step in steps:
        train(table, range(step, step + 20), step=step)
        clock.now = 10.0 * step
        if step % 3 == 0:
            path = model_dir / f"model.ckpt-{step}"
            write_checkpoint(path, state={"step": step}, step=step, tables=[table], log=log, time=clock.now)
        else:
            log.commit(step=step, dense={"step": step}, source={"row": 100 * step})
        states[step] = rows_of(table)
    return states


def test_every_step_of_a_run_can_be_restored(tmp_path: Path) -> None:
    table, clock = new_table(), Clock()
    with ChangeLog(tmp_path / "log", [table], clock=clock) as log:
        states = run(tmp_path, table, log, clock, range(1, 8))
        log.commit(step=8)  # without dense state: rows alone are no restore point
    assert [point.step for point in restore_points(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    for step, rows in states.items():
        found = [
            find_restore_point(tmp_path, step=step),
            find_restore_point(tmp_path, time=10.0 * step + 9),
            find_restore_point(tmp_path, sequence=step),
        ]
        assert found[0] == found[1] == found[2]
        copy = new_table()
        report = restore_tables(found[0], [copy])
        assert rows_of(copy) == rows
        assert (report.parent, report.step) == (step, step)
        assert found[0].state()["step"] == step
        assert (found[0].checkpoint is None) == (step % 3 != 0)
        assert found[0].checkpoint or found[0].state()["source"] == {"row": 100 * step}
    assert find_restore_point(tmp_path).step == 7


def test_the_nearest_one_before(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path / f"model.ckpt-{step}", state={}, step=step, time=step + 0.5)
    assert [find_restore_point(tmp_path, step=step).step for step in (10, 19, 20, 99)] == [10, 10, 20, 20]
    assert [find_restore_point(tmp_path, time=time).step for time in (10.5, 20.4, 20.5)] == [10, 10, 20]
    with pytest.raises(InvalidArgumentError, match="nothing from step 9 or before; it has 10, 20"):
        find_restore_point(tmp_path, step=9)
    with pytest.raises(InvalidArgumentError, match="expected one of step, time and sequence, got step, time"):
        find_restore_point(tmp_path, step=9, time=1.0)


def test_a_step_that_was_made_twice_is_that_of_the_younger_line(tmp_path: Path) -> None:
    table, clock = new_table(), Clock()
    with ChangeLog(tmp_path / "log", [table], clock=clock) as log:
        run(tmp_path, table, log, clock, range(1, 6))
    report = restore_tables(find_restore_point(tmp_path, step=2), [table])
    with ChangeLog(tmp_path / "log", [table], parent=report.parent, clock=clock) as log:
        train(table, range(500, 510), step=4)
        log.commit(step=4, dense={"line": 2})
        second = rows_of(table)
    copy = new_table()
    restore_tables(find_restore_point(tmp_path, step=4), [copy])
    assert rows_of(copy) == second
    assert find_restore_point(tmp_path, step=4).state() == {"line": 2}
    assert find_restore_point(tmp_path, step=5).sequence == 5, "the abandoned line is still there to be asked for"


def test_a_segment_that_nothing_leads_to_is_no_restore_point(tmp_path: Path) -> None:
    table = new_table()
    train(table, range(10))  # before the log began, and in no snapshot
    with ChangeLog(tmp_path / "log", [table]) as log:
        log.commit(step=1, dense={})
        with pytest.raises(InvalidArgumentError, match="has no complete checkpoint"):
            find_restore_point(tmp_path)
        write_checkpoint(tmp_path / "model.ckpt-2", state={}, step=2, tables=[table], log=log)
        with pytest.raises(InvalidArgumentError, match="nothing from step 1 or before"):
            find_restore_point(tmp_path, step=1)
    assert find_restore_point(tmp_path).step == 2


def test_a_damaged_newest_state_is_never_left_out_silently(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path / f"model.ckpt-{step}", state={}, step=step)
    (tmp_path / "model.ckpt-2" / "state.json").unlink()
    assert find_restore_point(tmp_path) == restore_point_of(tmp_path / "model.ckpt-3")
    assert find_restore_point(tmp_path, step=2).step == 1
    manifest = tmp_path / "model.ckpt-3" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":3', b'"step":4'))
    with pytest.raises(
        CorruptFileError, match=r"newest state cannot be read: .*checksum is wrong.* use --restore-to step=1"
    ):
        find_restore_point(tmp_path)
    assert find_restore_point(tmp_path, step=1).step == 1
    manifest.unlink()  # never finished: nobody was promised that it is there
    with pytest.raises(CorruptFileError, match=r"model.ckpt-2/state\.json"):
        find_restore_point(tmp_path)


def test_a_damaged_newest_segment_is_never_left_out_silently(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in (1, 2):
            train(table, range(10), step=step)
            log.commit(step=step, dense={})
    segment = tmp_path / "log" / f"{2:020d}.segment"
    segment.write_bytes(segment.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="--restore-to sequence=1"):
        find_restore_point(tmp_path)
    assert find_restore_point(tmp_path, step=1).sequence == 1


def test_an_empty_place(tmp_path: Path) -> None:
    assert restore_points(tmp_path / "nowhere") == []
    with pytest.raises(InvalidArgumentError, match="has no complete checkpoint, and no log to restore from"):
        find_restore_point(tmp_path)


def test_a_damaged_newest_checkpoint_without_a_step_in_its_name_is_not_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.ckpt-3", state={}, step=3)
    write_checkpoint(tmp_path / "final", state={}, step=5)
    assert find_restore_point(tmp_path).step == 5
    next((tmp_path / "final").glob("state*")).unlink()
    with pytest.raises(CorruptFileError, match=r"the newest state cannot be read.*--restore-to step=3"):
        find_restore_point(tmp_path)


@pytest.mark.parametrize("changed", [True, False], ids=["training goes on", "nobody writes"])
def test_a_gap_that_training_made_while_one_looked_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    table, clock = new_table(), Clock()
    with ChangeLog(tmp_path / "log", [table], clock=clock) as log:
        run(tmp_path, table, log, clock, range(1, 4))
    scan, looks = module._scan, list[int]()

    def first_in_vain(model_dir: ModelDir, **options: bool) -> object:
        looks.append(1)
        if len(looks) == 1:
            if changed:
                (tmp_path / "snapshots").mkdir(exist_ok=True)
                (tmp_path / "snapshots" / "another").mkdir()
            raise CorruptFileError("a segment was removed just now")
        return scan(model_dir, **options)

    monkeypatch.setattr(module, "_scan", first_in_vain)
    if changed:
        assert find_restore_point(tmp_path).step == 3
    else:
        with pytest.raises(CorruptFileError, match="just now"):
            find_restore_point(tmp_path)
    assert len(looks) == 1 + changed
