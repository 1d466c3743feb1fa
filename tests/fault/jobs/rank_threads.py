"""Ranks that die together: a cut every second step, a checkpoint every fifth, another number of ranks in each life."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from monolith.errors import StorageError
from monolith.state.manifest import Manifest
from monolith.state.model_dir import ModelDir
from monolith.state.retention import CheckpointHistory, remove_orphans, remove_unreachable
from monolith.testing.rank_threads import run_ranks
from rank_state_run import RankRun, restored_rows, rows_at

KEPT = 2


@dataclass
class Keeping(RankRun):
    """A run that says what is durable, and goes on if something is not."""

    last: int = 0

    def __post_init__(self) -> None:
        self.history = CheckpointHistory(max_to_keep=KEPT)
        self.history.recover_from_index(self.model_dir)

    def after_step(self) -> None:
        try:
            self.finish()
            if self.step % 5 == 0 or self.step == self.last:
                self.save()
                self.finish()
                say(self.step)
            elif self.step % 2 == 0 and self.cut() and self._cut is not None:
                self._cut.add_done_callback(lambda cut, step=self.step: kept(cut, step))
        except StorageError:
            self._cut = self._save = None

    def saved(self, path: str, manifest: Manifest) -> None:
        home = ModelDir(self.model_dir)
        self.history.record(path, home)
        remove_orphans(home, manifest)
        remove_unreachable(home)


def kept(cut: Future[int], step: int) -> None:
    if cut.exception() is None:
        say(step)


def say(step: int) -> None:
    sys.stdout.write(f"kept {step}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Train to the last step."""
    model_dir, last = str(Path(arguments[0], "model")), int(arguments[1])
    Path(model_dir).mkdir(exist_ok=True)
    run_ranks(1 + last % 3, lambda mesh: Keeping(mesh, model_dir, last=last).run(last))


def check(folder: Path, least: int) -> int:
    """The rows of all ranks are those of one step."""
    step, rows = restored_rows(str(folder / "model"))
    assert step >= least, f"restored step {step}, but {least} had been kept"
    assert rows == rows_at(step)
    return step
