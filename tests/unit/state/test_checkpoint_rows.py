"""Danger: a restored table differs from the saved one in a bit, or an incremental checkpoint costs as much as a full one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint_tables import new_table, rows_of, table_config, train
from monolith import CorruptFileError, EmbeddingTable, InvalidArgumentError
from monolith.log import ChangeLog
from monolith.state import (
    ModelDir,
    begin_checkpoint,
    is_complete,
    read_manifest,
    restore_tables,
    write_checkpoint,
    write_snapshot,
)
from monolith.table import AdmissionFilter, SlidingAdmission


def restored(path: str | Path, name: str = "user") -> EmbeddingTable:
    table = new_table(name)
    restore_tables(path, [table])
    return table


def test_without_a_log_a_checkpoint_has_all_rows(tmp_path: Path) -> None:
    tables = [new_table("user"), new_table("a/b"), new_table("empty")]
    for table in tables[:2]:
        train(table, range(500), step=3)
    path = tmp_path / "model.ckpt-1"
    write_checkpoint(path, state={}, step=1, tables=tables)
    assert read_manifest(path).event_time == 3
    for table in tables:
        copy = restored(path, table.name)
        assert rows_of(copy) == rows_of(table)
        assert copy.state() == table.state()


def test_a_restored_table_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    table = new_table()
    for step in range(5):
        train(table, range(step, 300), step=step)
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table])
    copy = restored(tmp_path / "model.ckpt-1")
    for step in range(5, 8):  # new ids too; half precision rounds by the number of updates
        for one in (table, copy):
            train(one, range(200, 400), step=step)
    assert rows_of(copy) == rows_of(table)


def test_every_checkpoint_of_a_run_is_the_state_of_its_step(tmp_path: Path) -> None:
    table, states = new_table(), {}
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in range(1, 8):
            train(table, range(step * 10, 300), step=step)
            table.erase(torch.arange(step * 20, step * 20 + 5))
            write_checkpoint(
                tmp_path / f"model.ckpt-{step}", state={}, step=step, tables=[table], log=log, full=step in (3, 6)
            )
            states[step] = rows_of(table)
    for step, rows in states.items():
        copy = restored(tmp_path / f"model.ckpt-{step}")
        assert rows_of(copy) == rows, step
    assert copy.state() == table.state()
    bases = [read_manifest(tmp_path / f"model.ckpt-{step}").snapshot for step in states]
    assert [base and int(base.name.split("/")[1]) for base in bases] == [None, None, 2, 2, 2, 5, 5]


def test_an_incremental_checkpoint_costs_what_changed(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        train(table, range(20_000))
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log, full=True)
        train(table, range(100))
        before = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        write_checkpoint(tmp_path / "model.ckpt-2", state={}, step=2, tables=[table], log=log)
        after = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    rows = 100 * (table.row_bytes + 12)
    assert rows < after - before < rows + 8000


def test_rows_from_before_the_log_are_in_the_first_checkpoint(tmp_path: Path) -> None:
    table = new_table()
    train(table, range(100))
    with ChangeLog(tmp_path / "log", [table]) as log:
        assert ModelDir(tmp_path).needs_snapshot(log)
        train(table, range(50, 60), step=1)
        log.commit(step=1)
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log)
        assert not ModelDir(tmp_path).needs_snapshot(log)
        train(table, range(10), step=2)
        write_checkpoint(tmp_path / "model.ckpt-2", state={}, step=2, tables=[table], log=log)
    assert rows_of(restored(tmp_path / "model.ckpt-2")) == rows_of(table)
    assert len(list((tmp_path / "snapshots").iterdir())) == 1


def test_a_snapshot_is_due_when_a_restore_would_replay_too_much(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        train(table, range(1000))
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log, full=True)
        assert not ModelDir(tmp_path).needs_snapshot(log, at_least=0, ratio=2.0)
        for step in range(3):
            train(table, range(1000), step=step)
            log.commit(step=step)
        assert ModelDir(tmp_path).needs_snapshot(log, at_least=0, ratio=2.0)
        assert not ModelDir(tmp_path).needs_snapshot(log, ratio=2.0)


def test_a_run_that_went_back_never_sees_what_it_abandoned(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        train(table, range(100))
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log)
        # A snapshot that begins after sequence 1 and has rows of a future that is about to be abandoned.
        train(table, range(200), step=1)
        write_checkpoint(tmp_path / "model.ckpt-2", state={}, step=2, tables=[table], log=log, full=True)
    report = restore_tables(tmp_path / "model.ckpt-1", [table])
    with ChangeLog(tmp_path / "log", [table], parent=report.parent) as log:
        train(table, range(10), step=9)
        write_checkpoint(tmp_path / "model.ckpt-3", state={}, step=3, tables=[table], log=log)
        copy = restored(tmp_path / "model.ckpt-3")
        assert rows_of(copy) == rows_of(table)
        assert len(copy) == 100
        assert read_manifest(tmp_path / "model.ckpt-3").snapshot is None


def test_admission_counts_come_back(tmp_path: Path) -> None:
    def filtered() -> tuple[EmbeddingTable, EmbeddingTable]:
        shared = AdmissionFilter(SlidingAdmission(capacity=1000, default_threshold=2))
        return new_table("user", admission=shared), new_table("item", admission=shared)

    user, item = filtered()
    train(user, [1])
    train(item, [2])
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[user, item])
    copies = filtered()
    restore_tables(tmp_path / "model.ckpt-1", copies)
    assert copies[0].admission is not None
    assert copies[0].admission is copies[1].admission
    for tables in ((user, item), copies):  # one filter counts for both: the third occurrence enters, wherever it is
        train(tables[1], [1])
        train(tables[0], [1, 2])
        assert 1 in tables[0]
        assert 2 not in tables[0]
    assert len(list((tmp_path / "model.ckpt-1").glob("admission-*"))) == 1


def test_several_stores_may_have_tables_of_one_name(tmp_path: Path) -> None:
    first, second = new_table(), new_table()
    train(first, range(10))
    train(second, range(20))
    named = {"0/user": first, "1/user": second}
    with ChangeLog(tmp_path / "log", named) as log:
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=named, log=log)
    copies = {name: new_table() for name in named}
    restore_tables(tmp_path / "model.ckpt-1", copies)
    assert [rows_of(copies[name]) for name in named] == [rows_of(first), rows_of(second)]


def test_names_of_tables_never_become_paths(tmp_path: Path) -> None:
    names = ["..", "../../x", "/etc", "名" * 80, "a" * 255, "nul\0"]
    tables = [new_table(name) for name in names]
    for table in tables:
        train(table, range(5))
    write_checkpoint(tmp_path / "run" / "model.ckpt-1", state={}, step=1, tables=tables)
    copies = [new_table(name) for name in names]
    restore_tables(tmp_path / "run" / "model.ckpt-1", copies)
    assert [rows_of(copy) for copy in copies] == [rows_of(table) for table in tables]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_saving_refuses(tmp_path: Path) -> None:
    table, other = new_table(), new_table("item")
    with (
        ChangeLog(tmp_path / "elsewhere", [table]) as log,
        pytest.raises(InvalidArgumentError, match="next to the checkpoint"),
    ):
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log)
    with ChangeLog(tmp_path / "log", [table]) as log, pytest.raises(InvalidArgumentError, match="it has no 'item'"):
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table, other], log=log)
    wide = EmbeddingTable(table_config(dim=4))
    with pytest.raises(InvalidArgumentError, match="two are named 'user' and differ"):
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table, wide])
    assert not (tmp_path / "model.ckpt-1").exists()


def test_a_failed_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        train(table, range(10))

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("monolith.log.change_log.write_segment", full)
            with pytest.raises(OSError, match="No space left"):
                write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log, full=True)
        assert not (tmp_path / "model.ckpt-1").exists()
        assert list((tmp_path / "snapshots").iterdir()) == []
        train(table, range(5, 15), step=1)
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log)
    assert rows_of(restored(tmp_path / "model.ckpt-1")) == rows_of(table)


def test_a_missing_or_altered_piece_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        train(table, range(10))
        write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log, full=True)
        train(table, range(5))
        write_checkpoint(tmp_path / "model.ckpt-2", state={}, step=2, tables=[table], log=log)
    manifest = read_manifest(tmp_path / "model.ckpt-2")
    pieces = [entry.name for entry in manifest.segments]
    pieces += [str(path.relative_to(tmp_path)) for path in (tmp_path / "snapshots").rglob("*") if path.is_file()]
    target = new_table()
    train(target, range(3))
    before = rows_of(target)
    for piece in pieces:
        file = tmp_path / piece
        data = file.read_bytes()
        for damaged in (None, data[:-1], data[: len(data) // 2] + b"!" + data[len(data) // 2 + 1 :]):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            if damaged is None or len(damaged) < len(data):
                assert not is_complete(tmp_path / "model.ckpt-2")
            with pytest.raises(CorruptFileError):
                restore_tables(tmp_path / "model.ckpt-2", [target])
            assert rows_of(target) == before
            file.write_bytes(data)
    restore_tables(tmp_path / "model.ckpt-2", [target])
    assert rows_of(target) == rows_of(table)


def test_pieces_of_another_run_are_refused(tmp_path: Path) -> None:
    for name, ids in (("a", range(10)), ("b", range(100, 110))):
        table = new_table()
        with ChangeLog(tmp_path / name / "log", [table], clock=lambda: 5.0) as log:
            train(table, ids)
            path = tmp_path / name / "model.ckpt-1"
            write_checkpoint(path, state={}, step=1, tables=[table], log=log, full=True, time=5.0)
    target = new_table()
    train(target, range(3))
    before = rows_of(target)
    for piece in ("log/*.segment", "snapshots/*/tables/*/*.table", "snapshots/*/manifest.json"):
        (mine,), (theirs,) = (tmp_path / "a").glob(piece), (tmp_path / "b").glob(piece)
        data = mine.read_bytes()
        if mine.name != "manifest.json":
            assert len(theirs.read_bytes()) == len(data), "the size must not be what gives it away"
        mine.write_bytes(theirs.read_bytes())
        with pytest.raises(CorruptFileError):
            restore_tables(tmp_path / "a" / "model.ckpt-1", [target])
        assert rows_of(target) == before
        mine.write_bytes(data)
    restore_tables(tmp_path / "a" / "model.ckpt-1", [target])
    assert sorted(target) == list(range(10))


def test_a_model_dir_may_be_moved(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "old" / "log", [table]) as log:
        train(table, range(10))
        write_checkpoint(tmp_path / "old" / "model.ckpt-1", state={}, step=1, tables=[table], log=log, full=True)
    (tmp_path / "old").rename(tmp_path / "new")
    assert rows_of(restored(tmp_path / "new" / "model.ckpt-1")) == rows_of(table)


def test_a_snapshot_beside_training_is_closed_by_the_next_checkpoint(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        train(table, range(50))
        snapshot = write_snapshot(tmp_path, [table], log)
        train(table, range(25, 75), step=1)
        log.commit(step=1)
        table.erase(torch.arange(10))
        pending = begin_checkpoint(
            tmp_path / "model.ckpt-2", state={}, step=2, tables=[table], log=log, snapshot=snapshot
        )
        expected = rows_of(table)
        train(table, range(100), step=2)
        manifest = pending.finish()
    assert manifest.snapshot is not None
    assert len(manifest.segments) == 2
    assert rows_of(restored(tmp_path / "model.ckpt-2")) == expected


def test_an_abandoned_snapshot_is_gone(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        train(table, range(50))
        snapshot = write_snapshot(tmp_path, [table], log)
        snapshot.abandon()
        snapshot.abandon()
    assert list((tmp_path / "snapshots").iterdir()) == []
