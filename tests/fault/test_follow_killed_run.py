"""Danger: processes of a run are killed while a replica follows. What it serves afterwards must be what the run has, bit for bit,
whichever of them was killed: nothing lost, nothing doubled, nothing that the run itself has lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import followed_job
from followed_tables import rows_of, until
from monolith.serve import Predictor, export_model, load
from monolith.serve.follow import RunWriters, TrainingFollower
from monolith.table.embedding_table import EmbeddingTable
from monolith.train import Estimator

PROBE = {name: torch.arange(400) for name in followed_job.COLUMNS}
ROOT = Path(followed_job.__file__).parent


def launched(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MONOLITH_")}
    command = [sys.executable, "-m", "monolith.cli", "launch", *options, "--model-dir", str(folder), "--restarts", "9"]
    with (folder.parent / "launch.log").open("w") as log:
        return subprocess.Popen(
            [*command, followed_job.__file__, str(folder)],
            env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def untrained(folder: Path) -> Predictor:
    model = followed_job.Clicks()
    return load(export_model(model, PROBE, folder, heads=[followed_job.CLICK]))


@contextmanager
def followed(folder: Path, predictor: Predictor) -> Iterator[TrainingFollower]:
    follower = TrainingFollower.of_run(predictor, RunWriters(str(folder)))
    try:
        assert follower.wait_until_read(120), follower.describe()
        yield follower
    finally:
        follower.close()


def processes_of(launcher: int) -> list[int]:
    """The processes that a launcher has started, by number."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(launcher)], capture_output=True, text=True)
    lines = [line.split(maxsplit=1) for line in found.stdout.splitlines()]
    return [int(pid) for pid, command in lines if "python" in command]


def final(folder: Path) -> tuple[Estimator, dict[str, EmbeddingTable]]:
    """What the run has saved at its end."""
    estimator = followed_job.estimator(str(folder))
    trainer = estimator.trainer
    trainer.restore()
    return estimator, {name: shards[0] for name, shards in trainer.tables().items()}


def require_equal(folder: Path, predictor: Predictor) -> None:
    estimator, tables = final(folder)
    (store,) = predictor.stores.values()
    for name, table in tables.items():
        assert rows_of(store.tables[name]) == rows_of(table), name
    estimator.model.eval()
    with torch.no_grad():
        expected = torch.sigmoid(estimator.model(PROBE))
    assert torch.allclose(predictor.predict(PROBE)["click"], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        pytest.param(["--ranks", "2"], [1], id="rank", marks=pytest.mark.slow),
        pytest.param(["--ranks", "2"], [0], id="chief-rank"),
        pytest.param(["--workers", "2", "--ps", "2"], [0], id="server"),
    ],
)
def test_a_replica_equals_the_run_after_a_kill(tmp_path: Path, options: Sequence[str], victims: Sequence[int]) -> None:
    folder, predictor = tmp_path / "run", untrained(tmp_path / "export")
    launcher = launched(folder, *options)
    try:
        with followed(folder, predictor) as follower:
            until(lambda: follower.lag().step > 10)
            pids = processes_of(launcher.pid)
            assert len(pids) >= 2
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
            launcher.wait(timeout=240)
            assert launcher.returncode == 0, (tmp_path / "launch.log").read_text()[-3000:]
            # At its end the run has waited until the replica had everything.
            require_equal(folder, predictor)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
