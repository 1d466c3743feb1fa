"""Danger: cleaning up takes a snapshot or segment away that a checkpoint, or the run itself, still needs."""

from __future__ import annotations

from pathlib import Path

from checkpoint_tables import new_table, rows_of, train
from monolith.log import ChangeLog, LogReader
from monolith.log.segment_format import segment_name
from monolith.state import (
    begin_checkpoint,
    is_complete,
    remove_checkpoint,
    remove_unreachable,
    restore_tables,
    write_checkpoint,
    write_snapshot,
)
from monolith.state.retention import Removed


def segments(model_dir: Path) -> list[int]:
    return LogReader(model_dir / "log").sequences()


def snapshots(model_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (model_dir / "snapshots").iterdir())


def test_what_no_checkpoint_needs_goes_and_the_rest_stays(tmp_path: Path) -> None:
    table, states = new_table(), {}
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in range(1, 10):
            train(table, range(step, step + 30), step=step)
            path = tmp_path / f"model.ckpt-{step}"
            write_checkpoint(path, state={}, step=step, tables=[table], log=log, full=step in (3, 6))
            states[step] = rows_of(table)
            for old in {step - 2, step - 3} - {4}:  # two are kept, and number 4 for ever
                remove_checkpoint(tmp_path / f"model.ckpt-{old}")
            remove_unreachable(tmp_path)
    assert snapshots(tmp_path) == [2, 5]
    assert segments(tmp_path) == [3, 4, 6, 7, 8, 9]
    for step in (4, 8, 9):
        copy = new_table()
        restore_tables(tmp_path / f"model.ckpt-{step}", [copy])
        assert rows_of(copy) == states[step]


def test_nothing_goes_while_all_are_kept(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in range(1, 4):
            train(table, range(step))
            write_checkpoint(tmp_path / f"model.ckpt-{step}", state={}, step=step, tables=[table], log=log)
    assert remove_unreachable(tmp_path) == Removed()


def test_a_snapshot_that_waits_for_its_checkpoint_stays(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        train(table, range(10))
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log)
        snapshot = write_snapshot(tmp_path, [table], log)
        remove_unreachable(tmp_path)
        write_checkpoint(tmp_path / "model.ckpt-2", state={}, step=2, tables=[table], log=log)
        pending = begin_checkpoint(
            tmp_path / "model.ckpt-3", state={}, step=3, tables=[table], log=log, snapshot=snapshot
        )
        assert pending.commit is not None
        snapshot.close(pending.commit.result())
        remove_unreachable(tmp_path, sequence=1)  # closed, but the checkpoint's own manifest is not there yet
        assert snapshots(tmp_path) == [1]
        pending.finish()
    assert is_complete(tmp_path / "model.ckpt-3")


def test_the_line_a_run_is_on_stays_even_without_a_checkpoint_of_it(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in range(1, 6):
            train(table, range(step * 5), step=step)
            path = tmp_path / f"model.ckpt-{step}"
            write_checkpoint(path, state={}, step=step, tables=[table], log=log, full=step == 5)
    report = restore_tables(tmp_path / "model.ckpt-2", [table])
    for step in (1, 2, 3, 4):
        remove_checkpoint(tmp_path / f"model.ckpt-{step}")
    with ChangeLog(tmp_path / "log", [table], parent=report.parent) as log:
        # Number 5 needs its own snapshot and segment alone, and this run the first two segments.
        assert remove_unreachable(tmp_path, sequence=log.sequence).segments == (3, 4)
        log.commit(step=3)
        assert remove_unreachable(tmp_path).segments == ()
        remove_checkpoint(tmp_path / "model.ckpt-5")
        write_checkpoint(tmp_path / "model.ckpt-9", state={}, step=9, tables=[table], log=log)
        assert remove_unreachable(tmp_path).segments == (5,)
    copy = new_table()
    restore_tables(tmp_path / "model.ckpt-9", [copy])
    assert rows_of(copy) == rows_of(table)


def test_a_manifest_that_cannot_be_read_stops_the_removal(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in (1, 2):
            train(table, range(10), step=step)
            write_checkpoint(tmp_path / f"model.ckpt-{step}", state={}, step=step, tables=[table], log=log, full=True)
    manifest = tmp_path / "model.ckpt-1" / "manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data.replace(b'"version":1', b'"version":2'))
    assert remove_unreachable(tmp_path) == Removed()
    manifest.unlink()
    assert remove_unreachable(tmp_path).snapshots == ("00000000000000000000",)


def test_a_remote_model_dir_has_nothing_to_share(tmp_path: Path) -> None:
    write_checkpoint(f"memory://{tmp_path.name}/model.ckpt-1", state={}, step=1)
    assert remove_unreachable(f"memory://{tmp_path.name}") == Removed()


def test_what_is_left_of_a_checkpoint_with_a_lost_segment_stays_until_it_is_put_back(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in range(1, 5):
            train(table, range(step, step + 10), step=step)
            log.commit(step=step)
        write_checkpoint(tmp_path / "model.ckpt-4", state={}, step=4, tables=[table], log=log)
        saved = rows_of(table)
        train(table, range(50), step=5)
        write_checkpoint(tmp_path / "model.ckpt-5", state={}, step=5, tables=[table], log=log, full=True)
    lost = tmp_path / "log" / segment_name(2)
    aside = lost.rename(tmp_path / "aside")
    remove_unreachable(tmp_path)
    assert segments(tmp_path)[:3] == [1, 3, 4]
    aside.rename(lost)
    copy = new_table()
    restore_tables(tmp_path / "model.ckpt-4", [copy])
    assert rows_of(copy) == saved
