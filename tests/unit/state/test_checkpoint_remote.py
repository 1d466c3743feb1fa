"""Danger: on a store without rename, locks or fsync a checkpoint is seen before it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from checkpoint_tables import files_below, new_table, rows_of, train
from monolith import CorruptFileError, InvalidArgumentError, StorageError
from monolith.log import ChangeLog
from monolith.state import (
    find_restore_point,
    inspect_checkpoint,
    is_complete,
    read_row,
    read_state,
    restore_tables,
    write_checkpoint,
)
from monolith.state.storage import open_folder


class ObjectStore(MemoryFileSystem):
    """Whole objects, no rename; the n-th write fails."""

    protocol = "objects"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    fails_at: int | None = None

    def mv(self, *_: object, **__: object) -> None:
        raise AssertionError("this store cannot rename")

    mv_file = rename = move = mv

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:  # noqa: ANN401
        if "w" in mode and ObjectStore.fails_at is not None:
            ObjectStore.fails_at -= 1
            if ObjectStore.fails_at < 0:
                raise OSError("connection reset")
        return super()._open(path, mode, **options)


fsspec.register_implementation("objects", ObjectStore, clobber=True)


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    ObjectStore.fails_at = None
    return f"objects://{tmp_path.name}/run"


def test_tables_and_state_come_back(model_dir: str) -> None:
    table = new_table()
    for step in (1, 2):
        train(table, range(step * 100), step=step)
        write_checkpoint(f"{model_dir}/model.ckpt-{step}", state={"step": step}, step=step, tables=[table])
    copies = [new_table() for _ in range(3)]
    restore_tables(find_restore_point(model_dir), copies)
    assert rows_of(*copies) == rows_of(table)
    restore_tables(find_restore_point(model_dir, step=1), copies)
    assert len(rows_of(*copies)) == 100
    assert inspect_checkpoint(f"{model_dir}/model.ckpt-2").tables["user"].rows == 200
    row = read_row(f"{model_dir}/model.ckpt-2", "user", 7)
    assert row is not None
    assert row.times.tolist() == [2]


def test_at_whatever_write_it_fails_the_checkpoint_before_is_whole(model_dir: str) -> None:
    table = new_table()
    train(table, range(50))
    path = f"{model_dir}/model.ckpt-1"
    write_checkpoint(path, state={"n": 1}, step=1, tables=[table])
    before = rows_of(table)
    train(table, range(60), step=1)
    failures = 0
    for number in range(20):
        ObjectStore.fails_at = number
        try:
            write_checkpoint(path, state={"n": 2}, step=1, tables=[table])
            break
        except StorageError:
            failures += 1
        finally:
            ObjectStore.fails_at = None
        copy = new_table()
        restore_tables(path, [copy])
        assert rows_of(copy) == before
        assert read_state(path) == {"n": 1}
    assert failures >= 3
    assert read_state(path) == {"n": 2}


def test_an_upload_that_was_cut_off_is_not_a_checkpoint(model_dir: str) -> None:
    ObjectStore.fails_at = 2
    with pytest.raises(StorageError, match="connection reset"):
        write_checkpoint(f"{model_dir}/model.ckpt-1", state={"n": 1}, step=1)
    ObjectStore.fails_at = None
    assert not is_complete(f"{model_dir}/model.ckpt-1")
    with pytest.raises(CorruptFileError, match="did not finish"):
        read_state(f"{model_dir}/model.ckpt-1")


def test_a_log_needs_a_disk(model_dir: str, tmp_path: Path) -> None:
    table = new_table()
    with (
        ChangeLog(tmp_path / "log", [table]) as log,
        pytest.raises(InvalidArgumentError, match="without a log all rows"),
    ):
        write_checkpoint(f"{model_dir}/model.ckpt-1", state={}, step=1, tables=[table], log=log)


def test_a_local_run_that_was_copied_up_is_restored_from_there(model_dir: str, tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "run" / "log", [table]) as log:
        for step in (1, 2):
            train(table, range(step * 50), step=step)
            path = tmp_path / "run" / f"model.ckpt-{step}"
            write_checkpoint(path, state={}, step=step, tables=[table], log=log, full=step == 1)
    for file in files_below(tmp_path / "run"):
        open_folder(model_dir).write(file.relative_to(tmp_path / "run").as_posix(), file.read_bytes())
    copy = new_table()
    restore_tables(f"{model_dir}/model.ckpt-2", [copy])
    assert rows_of(copy) == rows_of(table)
