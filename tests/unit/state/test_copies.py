"""Danger: a search for copies of a row says there are none, although a file that it could not read, a tombstone that was written
again, or a folder of a server has one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from monolith import EmbeddingTable
from monolith.log import ChangeLog
from monolith.state import ModelDir, begin_checkpoint, write_checkpoint, write_snapshot
from monolith.state.copies import find_copies
from monolith.table.buckets import bucket_of
from monolith.testing import sgd_table_config


def item() -> EmbeddingTable:
    return EmbeddingTable(sgd_table_config(2, name="item"))


def write(table: EmbeddingTable, *ids: int) -> None:
    table.assign(list(ids), np.ones((len(ids), 2), np.float32))


def logged(folder: Path, table: EmbeddingTable) -> ChangeLog:
    return ModelDir(folder).open_log([table])


def save(folder: Path, step: int, table: EmbeddingTable, log: ChangeLog | None, **options: object) -> None:
    write_checkpoint(f"{folder}/model.ckpt-{step}", state={}, step=step, tables=[table], log=log, **options)  # type: ignore[arg-type]


def test_a_restore_of_each_checkpoint_decides_whether_it_has_the_row(tmp_path: Path) -> None:
    table = item()
    with logged(tmp_path, table) as log:
        write(table, 7, 8)
        save(tmp_path, 1, table, log)
        table.erase([7])
        save(tmp_path, 2, table, log)
        write(table, 7)
        save(tmp_path, 3, table, log)
        table.erase([7])
        save(tmp_path, 4, table, log, full=True)
    found = find_copies(tmp_path, {"item": [7, 99], "user": [8]})
    assert {copy.name: copy.ids for copy in found.checkpoints} == {
        "model.ckpt-1": {"item": (7,)},
        "model.ckpt-3": {"item": (7,)},
    }
    # The bytes are in the segments of the first and third checkpoint. The snapshot of the fourth has none.
    needed = {Path(copy.path).name: copy.needed_by for copy in found.files}
    assert needed == {
        "00000000000000000001.segment": ("model.ckpt-1", "model.ckpt-2", "model.ckpt-3"),
        "00000000000000000003.segment": ("model.ckpt-3",),
    }
    assert found.unread == ()


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    table = item()
    write(table, 7, 8)
    save(tmp_path, 1, table, None)
    (file,) = tmp_path.rglob("*.table")
    file.write_bytes(b"nonsense")
    found = find_copies(tmp_path, {"item": [7]})
    assert found.checkpoints == found.files == ()
    (unread,) = found.unread
    assert unread.startswith(f"{tmp_path}/model.ckpt-1: ")


def test_folders_of_servers_are_searched_and_what_they_gave_away_does_not_count_as_restored(tmp_path: Path) -> None:
    table = item()
    with logged(tmp_path / "ps" / "0", table) as log:
        write(table, 7)
        mine = int(bucket_of([7])[0])
        buckets = [(0, mine), (mine + 1, 4096)]
        path = f"{tmp_path}/ps/0/model.ckpt-1"
        begin_checkpoint(path, state={}, step=1, tables=[table], log=log, buckets=buckets).finish()
    save(tmp_path, 1, item(), None)
    found = find_copies(tmp_path, {"item": [7]})
    assert found.checkpoints == ()
    (copy,) = found.files
    assert copy.path == f"{tmp_path}/ps/0/log/00000000000000000001.segment"
    assert "its server or rank has a newer snapshot" in copy.until


def test_a_snapshot_that_is_being_written_is_searched_too(tmp_path: Path) -> None:
    table = item()
    with logged(tmp_path, table) as log:
        write(table, 7, 8)
        log.commit(step=1)
        scan = write_snapshot(tmp_path, [table], log)
        found = find_copies(tmp_path, {"item": [7]})
        kinds = {copy.kind: copy.until for copy in found.files}
        assert kinds.keys() == {"snapshot", "segment"}
        scan.abandon()
