"""Danger: a checkpoint written while tables train mixes rows of two moments, or loses what changed meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tables import new_table, rows_of, train
from monolith import EmbeddingTable
from monolith.log import ChangeLog
from monolith.state import OpenSnapshot, begin_checkpoint, restore_tables, write_checkpoint, write_snapshot

IDS = 1000


def step_of(table: EmbeddingTable, step: int, after_call: Callable[[], None] = lambda: None) -> None:
    """What training does at `step`, whoever runs it: gradients, new ids, removed ids."""
    chance = random.Random(step)
    train(table, sorted(chance.sample(range(IDS), 200)), step=step)
    after_call()
    table.erase(torch.tensor(sorted(chance.sample(range(IDS), 20))))
    if step % 50 == 49:
        table.evict(now=step + 36500 * 86400 - 30)
    after_call()


def oracle(steps: int) -> dict[int, bytes]:
    table = new_table()
    for step in range(steps):
        step_of(table, step)
    return rows_of(table)


class Training:
    """A thread that makes steps; whatever `between` is, it is called between two of them."""

    def __init__(self, table: EmbeddingTable, steps: int) -> None:
        self.step = 0
        self.between: Callable[[int], None] = lambda step: None
        self._table, self._steps = table, steps
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self.step < self._steps:
                step_of(self._table, self.step)
                self.step += 1
                self.between(self.step)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def test_checkpoints_in_the_background_are_the_state_of_their_step(tmp_path: Path) -> None:
    table, saved, writers = new_table(), [], []
    snapshots: list[OpenSnapshot] = []
    scanned = threading.Event()

    with ChangeLog(tmp_path / "log", [table]) as log:
        training = Training(table, 120)

        def between(step: int) -> None:
            if step == 60:  # however slow the scan is, one save closes a snapshot
                assert scanned.wait(60)
                for writer in writers:
                    writer.join()
            if step % 10 == 0 and all(not writer.is_alive() for writer in writers):
                snapshot = snapshots.pop() if snapshots else None
                path = tmp_path / f"model.ckpt-{step}"
                pending = begin_checkpoint(path, state={}, step=step, tables=[table], log=log, snapshot=snapshot)
                writers.append(threading.Thread(target=pending.finish))
                writers[-1].start()
                saved.append((step, snapshot is not None))

        training.between = between
        with training:
            while training.is_running():  # scans of the whole table, one after the other, beside everything else
                snapshots.append(write_snapshot(tmp_path, [table], log))
                scanned.set()
                while snapshots and training.is_running():
                    time.sleep(0.001)
        for writer in writers:
            writer.join()
        for snapshot in snapshots:
            snapshot.abandon()
    assert any(full for _, full in saved), "no snapshot was closed"
    for step, _ in saved:
        copy = new_table()
        restore_tables(tmp_path / f"model.ckpt-{step}", [copy])
        assert rows_of(copy) == oracle(step), step


def test_a_full_save_on_another_thread_ends_with_whole_rows_of_one_cut(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        training = Training(table, 40)
        with training:
            path = tmp_path / "model.ckpt-1"
            write_checkpoint(path, state={}, step=1, tables=[table], log=log, full=True)
        # The cut fell into a call. Each row is as it was before or after that call.
        write_checkpoint(tmp_path / "model.ckpt-2", state={}, step=2, tables=[table], log=log)
    copy = new_table()
    restore_tables(path, [copy])
    known: dict[int, set[bytes]] = {}
    replica = new_table()

    def remember() -> None:
        for id_, row in rows_of(replica).items():
            known.setdefault(id_, set()).add(row)

    for step in range(40):
        step_of(replica, step, remember)
    torn = [id_ for id_, row in rows_of(copy).items() if row not in known.get(id_, ())]
    assert not torn
    restore_tables(tmp_path / "model.ckpt-2", [copy])
    assert rows_of(copy) == oracle(40)


@pytest.mark.parametrize("full", [False, True])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path: Path, full: bool) -> None:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in range(20):
            step_of(table, step)
            if step == 11:
                write_checkpoint(tmp_path / "model.ckpt-12", state={}, step=12, tables=[table], log=log, full=full)
    restarted = new_table()
    report = restore_tables(tmp_path / "model.ckpt-12", [restarted])
    with ChangeLog(tmp_path / "log", [restarted], parent=report.parent) as log:
        for step in range(12, 30):
            step_of(restarted, step)
        write_checkpoint(tmp_path / "model.ckpt-30", state={}, step=30, tables=[restarted], log=log)
    copy = new_table()
    restore_tables(tmp_path / "model.ckpt-30", [copy])
    assert rows_of(copy) == rows_of(restarted) == oracle(30)


def test_a_checkpoint_takes_the_share_of_a_processor_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, shares = new_table(), list[float]()
    with ChangeLog(tmp_path / "log", [table]) as log:
        commit = log.commit_in_background

        def noted(*, share: float = 1.0, **given: Any) -> Any:  # noqa: ANN401
            shares.append(share)
            return commit(share=share, **given)

        monkeypatch.setattr(log, "commit_in_background", noted)
        train(table, range(10))
        begin_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[table], log=log, share=0.25).finish()
    assert shares == [0.25]
