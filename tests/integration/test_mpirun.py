"""Danger: processes that `mpirun` starts take the wrong roles, or wait for one of them that has failed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cluster_job
from monolith.state import restore_points
from real_servers import INSTALL

SECONDS = 300

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason=f"there is no mpirun (apt openmpi-bin); {INSTALL}"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed (the extra mpi)"),
]


def mpirun(count: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # One machine, more processes than cores, and no other way between them than shared memory.
    options = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader", "-np", str(count)]
    return subprocess.run(
        ["mpirun", *options, sys.executable, *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_one_command_starts_workers_and_servers(tmp_path: Path) -> None:
    done = mpirun(
        3,
        cluster_job.__file__,
        MONOLITH_NUM_PS="1",
        MONOLITH_MODEL_DIR=str(tmp_path / "model"),
        MONOLITH_DISCOVERY_FOLDER=str(tmp_path / "discovery"),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line.rpartition(" at ")[0] for line in done.stdout.splitlines()) == [
        "ps 0 ends",
        "worker 0 ends",
        "worker 1 ends",
    ]
    assert restore_points(tmp_path / "model")[-1].step == cluster_job.BATCHES


def test_a_process_that_fails_ends_the_others() -> None:
    script = (
        "import os, threading\n"
        "from monolith.cluster.role import add_mpi_exception_hook\n"
        "assert add_mpi_exception_hook()\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '0':\n"
        "    raise ValueError('bad data')\n"
        "threading.Event().wait()\n"
    )
    done = mpirun(2, "-c", script)
    assert done.returncode != 0
    assert "Uncaught exception on MPI rank 0" in done.stderr
    assert "ValueError: bad data" in done.stderr
