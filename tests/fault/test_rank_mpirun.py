"""Danger: a job of ranks that is started again, with another number of them or by another launcher, does not continue exactly.

`mpirun` ends all ranks when one is killed. The job is that of test_rank_campaign.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ranked
from rank_campaign import last_line, quiet, verdict

from real_servers import INSTALL, until

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason=f"there is no mpirun (apt openmpi-bin); {INSTALL}"
)


def mpirun(folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    options = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader", "-np", str(ranks)]
    environment = {**os.environ, "RANKED_PAUSE_SECS": "0.01", "OMP_NUM_THREADS": "1"}
    environment["MONOLITH_MODEL_DIR"] = str(folder / "model")
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            ["mpirun", *options, sys.executable, ranked.__file__, str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.slow  # the launchers of the project are killed in test_rank_elasticity.py and test_rank_torchrun.py
def test_a_killed_job_continues_with_another_number_of_ranks(tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(mpirun(tmp_path, 2))
        until(lambda: all(last_line(tmp_path, rank)[0] > 20 for rank in (0, 1)), seconds=120)
        made, _, process = last_line(tmp_path, 1)
        os.kill(process, signal.SIGKILL)
        assert started[0].wait(120) != 0, "mpirun ends the job"

        started.append(mpirun(tmp_path, 4))
        until(lambda: last_line(tmp_path, 3)[0] > 0, seconds=120)
        assert 1 < last_line(tmp_path, 3)[0] <= made + 100, "rank 3 is new and continues where the others were"
        batches = max(last_line(tmp_path, rank)[0] for rank in range(4)) + 60
        (tmp_path / "last.new").write_text(str(batches))
        (tmp_path / "last.new").replace(tmp_path / "last")
        assert started[1].wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        for job in started:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    assert verdict(tmp_path, batches) == quiet(batches)
