"""Danger: ranks in processes of their own that hang, or blame the wrong one, when a process is killed or stopped.

Time limits of a kind that a test is not about are so long that it would fail if they were what ends the wait.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np

from forked_processes import CONTEXT
from mesh_ranks import in_folder
from monolith.errors import MonolithError, RankLostError
from monolith.ranks import Kind, MeshConfig, form_mesh

NEVER = 3600.0
SIZE = 3


def rank_process(rank: int, folder: Path, rank_timeout_secs: float, formations: int, reports: Connection) -> None:
    """Exchange without end. Each formation, the first exchange after it and each loss is reported."""
    config = MeshConfig(formation_secs=60.0, rank_timeout_secs=rank_timeout_secs, exchange_timeout_secs=NEVER)
    generation = 0
    try:
        for _ in range(formations):
            mesh = form_mesh(rank, SIZE, in_folder(folder), config=config, after=generation)
            generation, step = mesh.generation, 0
            try:
                while True:
                    sent = [[np.full(100_000, 10 * rank + to)] for to in range(SIZE)]
                    for source, arrays in enumerate(mesh.exchange(Kind.ROWS, sent, step=step)):
                        assert (arrays[0] == 10 * source + rank).all()
                    step += 1
                    if step == 20:
                        reports.send(("exchanges", generation))
            except RankLostError as error:
                reports.send(("lost", error.rank, str(error)))
            finally:
                mesh.close()
    except MonolithError as error:
        reports.send(("ended", type(error).__name__, str(error)))
    reports.close()


class Ranks:
    """The processes of a run, and what they report."""

    def __init__(self, folder: Path, *, rank_timeout_secs: float = NEVER, formations: int = 1) -> None:
        self._settings = folder, rank_timeout_secs, formations
        self.processes: dict[int, ForkServerProcess] = {}
        self.reports: dict[int, Connection] = {}

    def start(self, rank: int) -> None:
        reader, writer = CONTEXT.Pipe(duplex=False)
        self.processes[rank] = CONTEXT.Process(target=rank_process, args=(rank, *self._settings, writer), daemon=True)
        self.processes[rank].start()
        writer.close()
        self.reports[rank] = reader

    def report(self, rank: int) -> tuple[object, ...]:
        assert multiprocessing.connection.wait([self.reports[rank]], timeout=60), f"rank {rank} reports nothing"
        found: tuple[object, ...] = self.reports[rank].recv()
        return found

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


@contextmanager
def started(folder: Path, **settings: float) -> Iterator[Ranks]:
    """Start all ranks, and wait until they exchange."""
    ranks = Ranks(folder, **settings)  # type: ignore[arg-type]
    try:
        for rank in range(SIZE):
            ranks.start(rank)
        assert {ranks.report(rank)[0] for rank in range(SIZE)} == {"exchanges"}
        yield ranks
    finally:
        ranks.end()


def test_a_killed_rank_is_noticed_without_a_time_limit(tmp_path: Path) -> None:
    with started(tmp_path) as ranks:
        ranks.signal(1, signal.SIGKILL)
        for other in (0, 2):
            what, lost, text = ranks.report(other)
            assert (what, lost) == ("lost", 1)
            assert f"process {ranks.processes[1].pid}" in str(text)


def test_a_stopped_rank_is_noticed_and_learns_of_it_when_it_continues(tmp_path: Path) -> None:
    with started(tmp_path, rank_timeout_secs=1.0) as ranks:
        ranks.signal(2, signal.SIGSTOP)
        for other in (0, 1):
            what, lost, text = ranks.report(other)
            assert (what, lost) == ("lost", 2)
            assert "was not heard from for 1.0 s" in str(text)
        ranks.signal(2, signal.SIGCONT)
        what, lost, text = ranks.report(2)
        assert what == "lost"
        assert lost == 2, text


def test_a_killed_leader_is_replaced_and_the_others_join_it(tmp_path: Path) -> None:
    with started(tmp_path, formations=2) as ranks:
        ranks.signal(0, signal.SIGKILL)
        assert [ranks.report(other)[:2] for other in (1, 2)] == [("lost", 0)] * 2
        ranks.start(0)
        generations = {ranks.report(rank) for rank in range(SIZE)}
        assert len(generations) == 1
        assert generations.pop()[0] == "exchanges"


def test_a_stopped_rank_that_was_replaced_is_fenced_out(tmp_path: Path) -> None:
    with started(tmp_path, rank_timeout_secs=1.0, formations=3) as ranks:
        ranks.signal(1, signal.SIGSTOP)
        stale, reports = ranks.processes[1], ranks.reports[1]
        try:
            assert [ranks.report(other)[:2] for other in (0, 2)] == [("lost", 1)] * 2
            ranks.start(1)
            assert {ranks.report(rank)[0] for rank in range(SIZE)} == {"exchanges"}
            assert stale.pid is not None
            os.kill(stale.pid, signal.SIGCONT)
            assert reports.recv()[0] == "lost"
            what, error, text = reports.recv()
            assert (what, error) == ("ended", "FencedError")
            assert f"rank 1 was given to process {ranks.processes[1].pid}" in text
            # The run goes on.
            ranks.signal(2, signal.SIGKILL)
            assert [ranks.report(other)[:2] for other in (0, 1)] == [("lost", 2)] * 2
        finally:
            stale.kill()
            stale.join()
