"""Danger: a rank removes the rows of the last cut of the run, or of one that is being written, or keeps everything for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from monolith.log import LogReader
from monolith.ranks.mesh import Mesh
from monolith.state import model_dir as model_dir_module
from monolith.state.model_dir import ModelDir
from monolith.state.retention import remove_orphans, remove_unreachable
from monolith.state.snapshot import write_snapshot
from monolith.testing.rank_threads import run_ranks
from rank_state_run import RankRun, new_tables, restored_rows, rows_at, train


def test_a_newer_snapshot_does_not_remove_what_the_last_cut_needs(tmp_path: Path) -> None:
    run_ranks(2, lambda mesh: RankRun(mesh, str(tmp_path), cut_at_end=True).run(6))
    home = ModelDir(tmp_path / "ps" / "1")
    # The rank goes on alone: with a snapshot and commits that no cut of the run names.
    tables = new_tables()
    with home.open_log(tables) as log:
        for step in (7, 8):
            train(tables, step)
            snapshot = write_snapshot(home, tables, log)
            snapshot.close(log.commit(step=step, dense={}))
            remove_unreachable(home)
    assert restored_rows(str(tmp_path)) == (6, rows_at(6))
    # Once the run has a checkpoint instead, the rank removes it.
    run_ranks(2, lambda mesh: RankRun(mesh, str(tmp_path), save_every=8).run(8))
    assert restored_rows(str(tmp_path)) == (8, rows_at(8))


def test_segments_after_the_last_cut_stay_although_a_snapshot_has_their_rows(tmp_path: Path) -> None:
    """The next cut of the run may name any of them, as long as it is being written."""
    run_ranks(1, lambda mesh: RankRun(mesh, str(tmp_path), cut_at_end=True).run(2))
    home = ModelDir(tmp_path / "ps" / "0")
    last = home.log.newest
    tables = new_tables()
    with home.open_log(tables) as log:
        for _ in range(4):
            log.commit(step=3, dense={})
        snapshot = write_snapshot(home, tables, log)
        snapshot.close(log.commit(step=4, dense={}))
        log.commit(step=5, dense={})
    remove_unreachable(home)
    there = LogReader(home.log.folder).sequences()
    assert there == list(range(1, last + 7))


def test_old_segments_go_when_a_snapshot_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_dir_module, "SNAPSHOT_SEGMENTS", 4)

    def rank(mesh: Mesh) -> list[int]:
        run = RankRun(mesh, str(tmp_path), cut_every=100, save_every=3)
        run.run(40)
        return LogReader(tmp_path / "ps" / str(mesh.rank) / "log").sequences()

    for sequences in run_ranks(2, rank):
        assert len(sequences) < 25, "nothing was removed"
    assert restored_rows(str(tmp_path))[0] == 39
    assert np.all([len(list((tmp_path / "ps" / rank / "snapshots").iterdir())) <= 12 for rank in "01"])


def test_parts_of_a_checkpoint_that_was_never_completed_are_removed(tmp_path: Path) -> None:
    run_ranks(3, lambda mesh: RankRun(mesh, str(tmp_path), cut_every=100, save_every=2).run(2))
    # As if the chief had died before it named the parts.
    (tmp_path / "model.ckpt-2" / "manifest.json").unlink()
    run_ranks(2, lambda mesh: RankRun(mesh, str(tmp_path), cut_every=100, save_every=3).run(3))
    home = ModelDir(tmp_path)
    remove_orphans(home, home.manifest("model.ckpt-3"))
    assert sorted(path.name for path in tmp_path.glob("ps/*/model.ckpt-*")) == ["model.ckpt-3"] * 2
    assert restored_rows(str(tmp_path)) == (3, rows_at(3))
