"""Danger: a rank with a slow disk stops the training of all, or a cut is there before its rows are."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from monolith.log import change_log
from monolith.ranks import rank_state
from monolith.ranks.mesh import Mesh
from monolith.ranks.rank_folder import RankFolder
from monolith.state.model_dir import ModelDir
from monolith.testing.rank_threads import run_ranks
from rank_state_run import RankRun, newest, restored_rows, rows_at


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What the disk of rank 1 waits for."""
    allowed, real = threading.Event(), change_log.write_segment

    def write(folder: Path, *arguments: Any) -> Any:  # noqa: ANN401 - whatever it takes
        if "/ps/1/" in str(folder):
            assert allowed.wait(20)
        return real(folder, *arguments)

    monkeypatch.setattr(change_log, "write_segment", write)
    # Many rounds in which ranks say that they are not done.
    monkeypatch.setattr(rank_state, "_POLL_SECS", 0.005)
    return allowed


@pytest.mark.parametrize("what", ["cut", "save"])
def test_training_goes_on_while_a_rank_writes(tmp_path: Path, may_write: threading.Event, what: str) -> None:
    def rank(mesh: Mesh) -> None:
        run = RankRun(mesh, str(tmp_path), cut_every=100, save_every=100)

        def on_step(step: int) -> None:
            if step == 3:
                assert getattr(run, what)() in (True, None)
            if step == 40:
                # All ranks have made many steps with rows that the others do not have on disk yet.
                assert newest(str(tmp_path)) is None
                # The ranks are not asked again as long as one of them writes.
                assert run.state.begin_cut(step=step) is None
                may_write.set()

        if mesh.rank == 0:
            run.on_step = on_step
        run.run(41)

    run_ranks(2, rank)
    assert restored_rows(str(tmp_path)) == (3, rows_at(3))


def test_no_rank_cuts_while_another_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_ready, real = threading.Event(), RankFolder.ready
    monkeypatch.setattr(RankFolder, "ready", lambda self: real(self) and (is_ready.is_set() or "/ps/0" in self.path))
    cuts: dict[int, bool] = {}

    def rank(mesh: Mesh) -> list[int]:
        run = RankRun(mesh, str(tmp_path), cut_every=100, save_every=100)

        def on_step(step: int) -> None:
            if step == 5:
                is_ready.set()
            if step in (3, 5):
                cuts[step] = run.cut()

        if mesh.rank == 0:
            run.on_step = on_step
        run.run(8)
        return [segment.step for segment in ModelDir(f"{tmp_path}/ps/{mesh.rank}").log.segments()]

    assert run_ranks(2, rank) == [[5], [5]]
    assert cuts == {3: False, 5: True}
    assert restored_rows(str(tmp_path)) == (5, rows_at(5))
