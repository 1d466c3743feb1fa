"""Danger: the disk of one rank fails and the run hangs, ends without saying where, or names a part that is not there."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monolith.errors import StorageError
from monolith.log import change_log
from monolith.ranks.mesh import Mesh
from monolith.state.inspect import verify
from monolith.testing.rank_threads import run_ranks
from rank_state_run import RankRun, newest, restored_rows, rows_at


@contextmanager
def disk_full(module: object, name: str, folder: str) -> Iterator[None]:
    """Let one function of a module fail for paths with `folder` in them, as on a full disk."""
    real: Callable[..., Any] = getattr(module, name)

    def write(where: Any, *arguments: Any, **settings: Any) -> Any:  # noqa: ANN401 - whatever it takes
        if f"/{folder}/" in f"{where}/":
            raise OSError(errno.ENOSPC, "No space left on device", str(where))
        return real(where, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, write)
        yield


def on_chief(mesh: Mesh, model_dir: Path, at: int, do: Callable[[RankRun], None], steps: int = 6) -> None:
    """Train, and let the chief do something after step `at`."""
    run = RankRun(mesh, str(model_dir), cut_every=100, save_every=100)
    if mesh.rank == 0:
        run.on_step = lambda step: do(run) if step == at else None
    run.run(steps)


def test_a_cut_that_one_rank_cannot_write_is_not_there_and_the_next_one_has_its_rows(tmp_path: Path) -> None:
    def do(run: RankRun) -> None:
        run.cut_now()
        with (
            disk_full(change_log, "write_segment", "ps/1/log"),
            pytest.raises(StorageError, match=r"rank 1: .*No space"),
        ):
            run.cut_now()
        point = newest(str(tmp_path))
        assert point is not None
        assert point.sequence == 1
        run.cut_now()

    run_ranks(2, lambda mesh: on_chief(mesh, tmp_path, 4, do))
    assert restored_rows(str(tmp_path)) == (4, rows_at(4))
    assert verify(tmp_path).problems == []


def test_a_checkpoint_that_one_rank_cannot_write_is_not_there(tmp_path: Path) -> None:
    def do(run: RankRun) -> None:
        with disk_full(change_log, "write_segment", "ps/1/log"):
            run.save()
            with pytest.raises(StorageError, match=r"rank 1: .*No space"):
                run.finish()
        assert newest(str(tmp_path)) is None
        run.save()
        run.finish()

    run_ranks(2, lambda mesh: on_chief(mesh, tmp_path, 4, do))
    assert restored_rows(str(tmp_path)) == (4, rows_at(4))


def test_a_folder_that_cannot_be_made_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "ps").mkdir()
    (tmp_path / "ps" / "1").write_text("in the way")
    with pytest.raises(StorageError, match=r"rank 1: .*ps/1"):
        run_ranks(2, lambda mesh: RankRun(mesh, str(tmp_path)).run(3))
    assert newest(str(tmp_path)) is None
