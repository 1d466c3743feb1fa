"""Danger: under torchrun, whose agent restarts all processes when one dies, ranks do not find each other again.

Bare `torch.distributed` with gloo does not come back there, see benchmarks/rank_kills.py. The job is that of
test_rank_campaign.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from jobs import ranked
from rank_campaign import last_line, quiet, verdict

from real_servers import until


def test_a_job_under_torchrun_continues_after_a_kill(tmp_path: Path) -> None:
    environment = {**os.environ, "RANKED_PAUSE_SECS": "0.01", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, *torchrun, ranked.__file__, str(tmp_path)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: all(last_line(tmp_path, rank)[0] > 20 for rank in (0, 1)), seconds=120)
        before = [last_line(tmp_path, rank) for rank in (0, 1)]
        os.kill(before[1][2], signal.SIGKILL)
        until(lambda: all(last_line(tmp_path, rank)[2] != before[rank][2] for rank in (0, 1)), seconds=120)
        first = [last_line(tmp_path, rank)[0] for rank in (0, 1)]
        assert min(first) > 1, "it continues, and does not begin again"
        batches = max(first) + 60
        (tmp_path / "last.new").write_text(str(batches))
        (tmp_path / "last.new").replace(tmp_path / "last")
        assert job.wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert verdict(tmp_path, batches) == quiet(batches)
