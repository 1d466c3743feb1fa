"""Danger: a rank dies while it saves, cuts its log or restores, and the run continues with rows of different steps.

Every life of the run has another number of ranks and kills one of them at some access to a file of the run. What is left must
be the state of one step, byte by byte, and the next life must find exactly that on every rank.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from forked import Forked

from monolith.state.inspect import verify
from rank_state_run import restored_rows, rows_at

CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
LOST = 3
"""Exit code of a rank that has lost another one."""


def live(
    pipe: Connection, folder: Path, job: str, rank: int, ranks: int, steps: int, die_at: int | None, cut: int, save: int
) -> None:
    """One rank, killed when it accesses a file of the run for the `die_at`-th time."""
    from monolith.cluster import HostServiceDiscovery
    from monolith.errors import RankLostError
    from monolith.ranks import DiscoveryRendezvous, MeshConfig, form_mesh
    from rank_state_run import RankRun

    run_folder, left = str(folder / "run"), [die_at]

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES and str(arguments[0]).startswith(run_folder) and left[0] is not None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    config = MeshConfig(formation_secs=60.0, rank_timeout_secs=20.0, exchange_timeout_secs=20.0)
    code, began = 0, -1
    mesh = None
    try:
        mesh = form_mesh(rank, ranks, DiscoveryRendezvous(HostServiceDiscovery(folder / job)), config=config)
        sys.addaudithook(watch)
        began = RankRun(mesh, run_folder, cut_every=cut, save_every=save).run(steps)
    except RankLostError:
        code = LOST
    left[0] = None
    pipe.send((code, began))
    if mesh is not None:
        mesh.close()


def kill_ranks(folder: Path, *, lives: int, seed: int) -> int:
    """Kill a rank in each of `lives`. Returns how many were killed. Checks the state that each of them has left."""
    draw, killed = random.Random(seed), 0
    model_dir = str(folder / "run")
    (folder / "run").mkdir()
    known, steps = 0, 0
    for life in range(lives):
        ranks, steps = draw.choice([1, 2, 2, 3]), steps + draw.randrange(3, 9)
        victim, die_at = draw.randrange(ranks), int(2 ** draw.uniform(0, 8))
        cut, save = draw.choice([1, 1, 2]), draw.choice([3, 4, 50])
        (folder / str(life)).mkdir()
        processes = [
            Forked(live, folder, str(life), rank, ranks, steps, die_at if rank == victim else None, cut, save)
            for rank in range(ranks)
        ]
        where = f"life {life} of seed {seed}: rank {victim} of {ranks}, access {die_at}"
        try:
            for rank, process in enumerate(processes):
                try:
                    code, began = process.receive()
                except EOFError:
                    assert rank == victim, f"{where}: rank {rank} has died"
                    killed += 1
                    continue
                assert code in (0, LOST), where
                # A rank that has got so far has compared its rows with those of an undisturbed run.
                assert began in (-1, known), f"{where}: it continued from {began}, not from {known}"
        finally:
            for process in processes:
                process.close()
        step, rows = restored_rows(model_dir)
        assert step >= known, f"{where}: went back from {known} to {step}"
        assert rows == rows_at(step), f"{where}: the rows are not those of step {step}"
        assert verify(model_dir).problems == [] if step else True, where
        known = step
    assert known > 0
    return killed


def test_killed_at_any_access(tmp_path: Path) -> None:
    assert kill_ranks(tmp_path, lives=12, seed=1) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_killed_often(tmp_path: Path, seed: int) -> None:
    assert kill_ranks(tmp_path, lives=60, seed=seed) >= 30
