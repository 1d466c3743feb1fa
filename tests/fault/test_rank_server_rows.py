"""Danger: after a lost rank, batches since the newest checkpoint count twice in the rows that parameter servers hold.

Ranks with rows on servers (`--ranks 2 --ps 1`) are killed between two checkpoints. Rows, optimizer state and dense parameters
must have the bits of a run that nobody has disturbed, and every example must count once.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from jobs import partial, ranked
from rank_campaign import LIVENESS, equal, last_line, state_of
from torch import Tensor

from launched_job import Launch, is_alive

EVERY, NEVER, BATCHES = 20, 1_000_000, 150
SECONDS = 120.0


def launched(folder: Path, every: int) -> Launch:
    folder.mkdir(exist_ok=True)
    path = str(Path(__file__).parent)  # of the package `jobs`
    own = {"PYTHONPATH": path, "RANKED_PAUSE_SECS": "0.01", "OMP_NUM_THREADS": "1", "MONOLITH_RANK_TIMEOUT_SECS": "2"}
    return Launch(
        folder,
        *("--ranks", str(partial.RANKS), "--ps", "1", "--model-dir", str(folder / "model")),
        *("--liveness", json.dumps(LIVENESS), partial.__file__, str(folder), str(every)),
        environment={**os.environ, **own},
    )


def lines(folder: Path) -> list[tuple[int, float, int]]:
    return [last_line(folder, rank) for rank in range(partial.RANKS)]


def killed(job: Launch, victim: str) -> float:
    """Kill the process of a role, and wait until the launcher has started another. Returns when that was."""
    process = job.pids(victim)[-1]
    os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    while job.pids(victim)[-1] == process:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return time.time()


def until_step(job: Launch, folder: Path, step: int, *, since: float = 0.0) -> None:
    """Wait until every rank has made a step that is at least `step` after `since`."""
    deadline = time.monotonic() + SECONDS
    while any(made < step or moment <= since for made, moment, _ in lines(folder)):
        assert job.is_running, job.end()
        assert time.monotonic() < deadline, f"the job hangs; {folder}/logs has what its ranks wrote"
        time.sleep(0.02)


def finish(job: Launch, folder: Path) -> None:
    """Let the data end after so many batches of each rank, and the job with it."""
    # Ranks read ahead of their steps.
    assert max(made for made, _, _ in lines(folder)) + 40 < BATCHES
    (folder / "last.new").write_text(str(BATCHES))
    (folder / "last.new").replace(folder / "last")
    code, errors = job.end(SECONDS)
    assert code == 0, errors
    assert not any(map(is_alive, job.all_pids()))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What a run has in the end that nobody disturbs."""
    folder = tmp_path_factory.mktemp("quiet")
    job = launched(folder, EVERY)
    try:
        finish(job, folder)
    finally:
        job.close()
    return state_of(folder / "model")[1]


def counts() -> Tensor:
    """How often each id is in the batches of all ranks."""
    ids = [ranked.batch_of(shard, number)["id"] for shard in range(partial.RANKS) for number in range(BATCHES)]
    return torch.bincount(torch.cat(ids), minlength=ranked.IDS)  # type: ignore[arg-type]


def require_exact(folder: Path, quiet: dict[str, Tensor]) -> None:
    """Compare the last checkpoint with the data, and with a run that nobody has disturbed."""
    model, found = state_of(folder / "model")
    torch.testing.assert_close(ranked.counted(model.embeddings.store), counts().float(), rtol=0, atol=0)
    assert round(-model.batches.item()) == partial.RANKS * BATCHES
    assert equal(found, quiet)


@pytest.mark.parametrize(
    ("every", "victim", "said"),
    [
        (EVERY, "rank 1", "go back to step"),
        pytest.param(EVERY, "rank 0", "go back to step", marks=pytest.mark.slow),
        # A server that comes back has every update that it has acknowledged.
        pytest.param(EVERY, "ps 0", "", marks=pytest.mark.slow),
        (NEVER, "rank 1", "there is no checkpoint"),
    ],
)
def test_every_batch_counts_once_in_the_rows_of_servers(
    tmp_path: Path, quiet: dict[str, Tensor], every: int, victim: str, said: str
) -> None:
    folder = tmp_path / "disturbed"
    job = launched(folder, every)
    try:
        until_step(job, folder, EVERY + 10)
        until_step(job, folder, 1, since=killed(job, victim))
        finish(job, folder)
    finally:
        job.close()
    require_exact(folder, quiet)
    assert said in "\n".join(job.lines("rank 0"))


@pytest.mark.parametrize(
    ("every", "said"),
    [(EVERY, "go back to step"), pytest.param(NEVER, "there is no checkpoint", marks=pytest.mark.slow)],
)
def test_a_new_job_begins_where_its_checkpoint_is(
    tmp_path: Path, quiet: dict[str, Tensor], every: int, said: str
) -> None:
    """All processes are killed. The servers of the next job restore themselves from their logs, which are ahead."""
    folder = tmp_path / "disturbed"
    first = launched(folder, every)
    try:
        until_step(first, folder, EVERY + 10)
    finally:
        first.close()
        for process in first.all_pids():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    second = launched(folder, every)
    try:
        finish(second, folder)
    finally:
        second.close()
    require_exact(folder, quiet)
    assert said in "\n".join(second.lines("rank 0"))
