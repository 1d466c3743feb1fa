"""A small run of ranks without a model: what each step does to the rows is known, so the state of any step can be checked.

Every rank trains the rows of its own buckets. The chief keeps the log and the checkpoints of the run, as a trainer does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import InvalidArgumentError
from monolith.log import ChangeLog
from monolith.ranks.agreement import Agreement
from monolith.ranks.mesh import Kind, Mesh
from monolith.ranks.rank_state import RankState
from monolith.state.manifest import Manifest
from monolith.state.model_dir import ModelDir
from monolith.state.restore import prepare_tables
from monolith.state.restore_points import RestorePoint, find_restore_point
from monolith.state.save import begin_checkpoint
from monolith.table import Adagrad, LocalStore, bucket_of, bucket_ranges

NAMES = ("item", "user")


def new_tables() -> dict[str, EmbeddingTable]:
    """Two empty tables, whose rows have the state of an optimizer."""
    segment = Segment(dim=3, optimizer=Adagrad(learning_rate=0.1))
    return {name: EmbeddingTable(TableConfig(name=name, segments=(segment,))) for name in NAMES}


def train(tables: Mapping[str, EmbeddingTable], step: int, *, owned: range | None = None) -> None:
    """Make step `step` to the rows that are `owned`. Some steps remove rows."""
    for number, table in enumerate(tables.values()):
        draw = np.random.default_rng(1000 * step + number)
        ids = np.unique(draw.integers(0, 200, size=40))
        mine = np.ones(len(ids), bool) if owned is None else _inside(ids, owned)
        table.apply_gradients(ids[mine], draw.normal(size=(len(ids), 3)).astype(np.float32)[mine], event_time=step)
        if step % 5 == 0:
            gone = np.unique(draw.integers(0, 200, size=5))
            table.erase(gone if owned is None else gone[_inside(gone, owned)])


def rows_of(tables: Mapping[str, EmbeddingTable]) -> dict[str, dict[int, bytes]]:
    """Every row of every table, byte by byte with its optimizer state."""
    found = {}
    for name, table in tables.items():
        entries = table.entries()
        rows = table.encode(entries)
        found[name] = {id_: row.tobytes() for id_, row in zip(entries.ids.tolist(), rows, strict=True)}
    return found


@cache
def rows_at(step: int, owned: range | None = None) -> dict[str, dict[int, bytes]]:
    """What a run that was never disturbed has after `step` steps."""
    tables = new_tables()
    for number in range(1, step + 1):
        train(tables, number, owned=owned)
    return rows_of(tables)


def newest(model_dir: str) -> RestorePoint | None:
    """The newest state of a run, None if there is nothing."""
    try:
        return find_restore_point(model_dir)
    except InvalidArgumentError:
        return None


def restored_rows(model_dir: str) -> tuple[int, dict[str, dict[int, bytes]]]:
    """The step and the rows of the newest state of a run, as one process would restore them."""
    point, tables = newest(model_dir), new_tables()
    if point is None:
        return 0, rows_of(tables)
    prepare_tables(point, tables)[1]()
    return int(str(point.state()["step"])), rows_of(tables)


@dataclass
class RankRun:
    """One rank of a run. With `check`, every restored state is compared with that of an undisturbed run."""

    mesh: Mesh
    model_dir: str
    cut_every: int = 2
    save_every: int = 7
    cut_at_end: bool = False
    check: bool = True
    check_dense: bool = True
    on_step: Callable[[int], None] = lambda step: None
    step: int = 0
    tables: dict[str, EmbeddingTable] = field(default_factory=new_tables)

    def run(self, steps: int) -> int:
        """Continue from the newest state until `steps` have been made. Returns the step it continued from."""
        self.agreement = Agreement(self.mesh)
        self.state = RankState(self.agreement, LocalStore(self.tables.values()))
        self.agreement.actions["start_at"] = self._start_at
        self.owned = bucket_ranges(self.mesh.size)[self.mesh.rank]
        self._log: ChangeLog | None = None
        self._cut: Future[int] | None = None
        self._save: Callable[[], object] | None = None
        try:
            if self.mesh.rank == 0:
                self._restore()
                self.agreement.release("start")
            else:
                self.agreement.serve("start")
            began = self.step
            while self.step < steps:
                self.agreement.next_step(rows=1)
                train(self.tables, self.step + 1, owned=self.owned)
                self.mesh.exchange(Kind.DENSE, [[np.zeros(1)]] * self.mesh.size, step=self.agreement.step)
                self.step += 1
                self.agreement.step = self.step
                self.agreement.step_ended()
                self.on_step(self.step)
                if self.mesh.rank == 0:
                    self.after_step()
            if self.mesh.rank == 0:
                if self.cut_at_end:
                    self.cut_now()
                self.finish()
                self.agreement.release("end")
            else:
                self.agreement.serve("end")
            return began
        finally:
            if self._log is not None:
                self._log.close()
            self.state.close()

    def _restore(self) -> None:
        home = ModelDir(self.model_dir)
        point = newest(self.model_dir)
        # As a trainer: nothing else may write the log while it is decided where to continue.
        self._log = home.open_log({}, parent=0 if point is None else point.sequence)
        if point is not None:
            self.state.begin_restore(point.location)()
            state = point.state()
            assert state["step"] == point.step
            if self.check_dense:
                assert torch.equal(state["weights"], _weights(point.step))  # type: ignore[arg-type]
            self.agreement.run("start_at", point.step)
        self.state.open_log(self.model_dir)

    def _start_at(self, step: object) -> None:
        self.step = self.agreement.step = int(str(step))
        if self.check:
            assert rows_of(self.tables) == rows_at(self.step, self.owned), f"rank {self.mesh.rank}, step {self.step}"

    def after_step(self) -> None:
        """Called on the chief."""
        if self.step % self.save_every == 0:
            self.save()
        elif self.step % self.cut_every == 0:
            self.cut()

    def cut(self) -> bool:
        """Commit everything to the logs in the background, if the ranks are ready. Returns whether they were."""
        assert self._log is not None
        if self._log.busy:
            return False
        begun = self.state.begin_cut(step=self.step)
        if begun is not None:
            self._cut = self._log.commit_in_background(step=self.step, dense=self._dense(), parts=begun.finish)
        return begun is not None

    def cut_now(self) -> None:
        """Commit everything to the logs. Returns when it is durable."""
        self.finish()
        while not self.cut():
            time.sleep(0.005)
        self.finish()

    def save(self) -> None:
        """Write a checkpoint in the background."""
        self.finish()
        path = f"{self.model_dir}/model.ckpt-{self.step}"
        parts = self.state.begin_save(path, step=self.step)
        pending = begin_checkpoint(
            path, state=self._dense(), step=self.step, tables={}, log=self._log, servers=parts.finish
        )
        self._save = lambda: self.saved(path, pending.finish())

    def finish(self) -> None:
        """Wait until everything is durable."""
        cut, self._cut = self._cut, None
        save, self._save = self._save, None
        if cut is not None:
            cut.result()
        if save is not None:
            save()

    def saved(self, path: str, manifest: Manifest) -> None:
        """Called when a checkpoint is complete."""

    def _dense(self) -> dict[str, object]:
        return {"step": self.step, "weights": _weights(self.step)}


def _weights(step: int) -> torch.Tensor:
    return torch.arange(4.0) * step


def _inside(ids: np.ndarray, owned: range) -> np.ndarray:
    bucket = bucket_of(ids)
    return (bucket >= owned.start) & (bucket < owned.stop)
