"""A plain loop over tables: a commit to the log every second step, a checkpoint every fifth, a snapshot every fifteenth."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch

from jobs.records import Oracle, configs, dense_after, train
from monolith import EmbeddingTable
from monolith.errors import StorageError
from monolith.log import ChangeLog
from monolith.state import (
    find_restore_point,
    remove_unreachable,
    restore_points,
    restore_tables,
    write_checkpoint,
)
from monolith.state.retention import CheckpointHistory

KEPT = 2


class Loop:
    """The state of the loop."""

    def __init__(self, model_dir: Path) -> None:
        """Begin anew, or continue from the newest moment that `model_dir` holds."""
        self.model_dir = model_dir
        self.tables = {name: EmbeddingTable(config) for name, config in configs().items()}
        self.dense, self.next_record, self.parent = dense_after(0), 0, 0
        if restore_points(model_dir):
            point = find_restore_point(model_dir)
            self.parent = restore_tables(point, self.tables).parent
            state = point.state()
            self.dense, self.next_record = state["dense"], state["source"]["next"]

    def state(self) -> dict[str, object]:
        """Everything but the tables."""
        return {"dense": self.dense, "source": {"next": self.next_record}}

    def step(self) -> int:
        """Train the next record; how many were trained."""
        train(self.tables, self.next_record)
        self.next_record += 1
        self.dense += torch.tensor([1, self.next_record])
        return self.next_record


def main(arguments: list[str]) -> None:
    """Train to the last step."""
    model_dir, last = Path(arguments[0], "model"), int(arguments[1])
    loop = Loop(model_dir)
    history = CheckpointHistory(max_to_keep=KEPT)
    history.recover_from_index(model_dir)
    with ChangeLog(model_dir / "log", loop.tables, parent=loop.parent) as log:
        while loop.next_record < last:
            step = loop.step()
            try:
                if step % 5 == 0 or step == last:
                    _checkpoint(loop, log, history)
                elif step % 2 == 0:
                    log.commit(step=step, dense=loop.state())
                else:
                    continue
            except StorageError:
                continue
            sys.stdout.write(f"kept {step}\n")
            sys.stdout.flush()


def _checkpoint(loop: Loop, log: ChangeLog, history: CheckpointHistory) -> None:
    step = loop.next_record
    path = loop.model_dir / f"model.ckpt-{step}"
    write_checkpoint(path, state=loop.state(), tables=loop.tables, log=log, step=step, full=step % 15 == 0)
    history.record(str(path), loop.model_dir)
    remove_unreachable(loop.model_dir)


@cache
def _oracle() -> Oracle:
    return Oracle()


def check(folder: Path, least: int) -> int:
    """Tables, dense state and place in the data are those of one step."""
    loop = Loop(folder / "model")
    step = loop.next_record
    assert step >= least, f"restored step {step}, but {least} had been kept"
    assert torch.equal(loop.dense, dense_after(step))
    _oracle().require(loop.tables, step)
    return step
