"""Danger: one process continues a run of ranks in the log of the run, which has none of the ranks' rows, and loses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.state.model_dir import ModelDir
from monolith.state.restore import prepare_tables
from monolith.state.restore_points import find_restore_point
from monolith.state.save import write_checkpoint
from monolith.testing.rank_threads import run_ranks
from rank_state_run import RankRun, new_tables, restored_rows, rows_at, train


@pytest.mark.parametrize("steps", [7, 8], ids=["checkpoint", "cut"])
def test_rows_of_ranks_are_in_the_next_checkpoint_of_one_process(tmp_path: Path, steps: int) -> None:
    run_ranks(2, lambda mesh: RankRun(mesh, str(tmp_path), cut_every=100, cut_at_end=steps % 7 != 0).run(steps))
    point, tables = find_restore_point(tmp_path), new_tables()
    report, put_in_place = prepare_tables(point, tables)
    put_in_place()
    assert report.from_parts
    with ModelDir(tmp_path).open_log(tables, parent=report.parent) as log:
        train(tables, steps + 1)
        write_checkpoint(tmp_path / "model.ckpt-99", state={"step": steps + 1}, step=steps + 1, tables=tables, log=log)
    assert restored_rows(str(tmp_path)) == (steps + 1, rows_at(steps + 1))
    # And back to ranks.
    began = run_ranks(3, lambda mesh: RankRun(mesh, str(tmp_path), check_dense=False).run(steps + 2))
    assert began == [steps + 1] * 3
