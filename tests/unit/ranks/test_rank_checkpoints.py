"""Danger: ranks save rows of different steps, or a checkpoint of ranks cannot be restored by another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.errors import CorruptFileError, LogGapError
from monolith.log import ChangeLog, LogReader
from monolith.log.segment_format import segment_name
from monolith.ranks.mesh import Mesh
from monolith.state.inspect import verify
from monolith.state.restore import prepare_tables
from monolith.state.restore_points import restore_points
from monolith.table import bucket_ranges
from monolith.testing.rank_threads import run_ranks
from rank_state_run import RankRun, new_tables, restored_rows, rows_at, rows_of


def train_ranks(model_dir: Path, ranks: int, steps: int, **settings: object) -> int:
    """Train until `steps` are made. Returns the step that the run continued from."""
    return run_ranks(ranks, lambda mesh: RankRun(mesh, str(model_dir), **settings).run(steps))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("then", [1, 2, 3])
def test_any_number_of_ranks_continues_from_a_checkpoint(tmp_path: Path, then: int) -> None:
    train_ranks(tmp_path, 2, 7, cut_every=100)
    assert restored_rows(str(tmp_path)) == (7, rows_at(7))
    assert train_ranks(tmp_path, then, 14) == 7
    assert restored_rows(str(tmp_path)) == (14, rows_at(14))
    assert verify(tmp_path).problems == []


@pytest.mark.parametrize("then", [1, 2, 3])
def test_any_number_of_ranks_continues_from_a_cut(tmp_path: Path, then: int) -> None:
    train_ranks(tmp_path, 2, 9, cut_at_end=True)
    point = restore_points(tmp_path)[-1]
    assert (point.step, point.checkpoint, point.parts) == (9, None, 2)
    assert restored_rows(str(tmp_path)) == (9, rows_at(9))
    assert train_ranks(tmp_path, then, 12, cut_at_end=True) == 9
    assert verify(tmp_path).problems == []
    assert restored_rows(str(tmp_path)) == (12, rows_at(12))


def test_ranks_that_continue_in_their_folders_write_no_snapshot(tmp_path: Path) -> None:
    train_ranks(tmp_path, 2, 4)
    train_ranks(tmp_path, 2, 8)
    assert [list(folder.glob("snapshots/*")) for folder in tmp_path.glob("ps/*")] == [[], []]


def test_a_cut_that_ranks_are_ahead_of_is_continued_by_all(tmp_path: Path) -> None:
    """One rank has committed a step more than the others, so the run has no such cut."""

    def rank(mesh: Mesh) -> None:
        run = RankRun(mesh, str(tmp_path), cut_every=100)
        if mesh.rank == 1:
            # Ahead of the others, as if the chief had died before it heard of it.
            run.on_step = lambda step: step == 6 and run.state._folder.begin_cut(step=6).result() and None  # type: ignore
        else:
            run.on_step = lambda step: run.cut_now() if step == 4 else None
        run.run(6)

    run_ranks(2, rank)
    assert train_ranks(tmp_path, 2, 8) == 4
    assert verify(tmp_path).problems == []


def test_a_cut_without_the_rows_of_a_rank_is_refused(tmp_path: Path) -> None:
    train_ranks(tmp_path, 2, 3, cut_every=100, cut_at_end=True)
    parts = LogReader(tmp_path / "log").info(1).parts
    for wrong in (parts[:1], (parts[0], parts[0]), (*parts, parts[1])):
        with ChangeLog(tmp_path / "log", []) as log:
            log.commit_in_background(step=4, dense={"step": 4}, parts=lambda wrong=wrong: wrong).result()
        with pytest.raises(CorruptFileError, match="expected each of 4096 once"):
            restored_rows(str(tmp_path))


def test_a_cut_names_only_segments_of_its_own_model_dir(tmp_path: Path) -> None:
    train_ranks(tmp_path / "other", 1, 3, cut_every=100, cut_at_end=True)
    (part,) = LogReader(tmp_path / "other" / "log").info(1).parts
    outside = part.model_copy(update={"name": f"{tmp_path}/other/{part.name}"})
    upward = part.model_copy(update={"name": f"../other/{part.name}"})
    for wrong in (outside, upward):
        with ChangeLog(tmp_path / "run" / "log", []) as log:
            log.commit_in_background(step=4, dense={"step": 4}, parts=lambda wrong=wrong: (wrong,)).result()
        with pytest.raises(CorruptFileError, match="names a part"):
            restored_rows(str(tmp_path / "run"))


def test_a_rank_reads_only_the_logs_that_have_its_rows(tmp_path: Path) -> None:
    train_ranks(tmp_path, 2, 4, cut_every=100, save_every=2, cut_at_end=True)
    (tmp_path / "ps" / "1" / "log" / segment_name(1)).unlink()
    point, tables, half = restore_points(tmp_path)[-1], new_tables(), bucket_ranges(2)
    assert point.checkpoint is None
    prepare_tables(point, tables, ranges=[half[0]])[1]()
    assert rows_of(tables) == rows_at(4, half[0])
    with pytest.raises(LogGapError):
        prepare_tables(point, tables, ranges=[half[1]])
