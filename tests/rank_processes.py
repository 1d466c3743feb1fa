"""Starting ranks as processes of a real launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import rank_job

SECONDS = 240


def ended(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end, with nothing of the tests' own environment that says what a process is."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MONOLITH_")}
    environ = {**clean, "PYTHONPATH": str(Path(rank_job.__file__).parent), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS)


def said(command: list[str], **variables: str) -> list[dict[str, object]]:
    """Run ranks that end well, and return the lines of JSON that they print, by rank."""
    done = ended(command, **variables)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return sorted(lines, key=lambda line: line["rank"])


def torchrun(count: int, *, job: str = rank_job.__file__, **variables: str) -> list[dict[str, object]]:
    """The same under `torchrun`."""
    options = ["--standalone", "--nproc-per-node", str(count), job]
    return said([sys.executable, "-m", "torch.distributed.run", *options], **variables)


def mpirun(count: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python under `mpirun`. One machine, more processes than cores."""
    options = [
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "--mca",
        "btl",
        "self,vader",
        "-np",
        str(count),
    ]
    return ended(["mpirun", *options, sys.executable, *command], **variables)
