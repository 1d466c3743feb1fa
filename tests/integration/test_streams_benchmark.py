"""Danger: a benchmark that nobody can run any more, or that leaves out a kind of stream without saying so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "streams.py"


def test_the_short_benchmark_measures_every_kind_or_names_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--short", "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    for kind in ("folder", "Kafka", "Redis"):
        (line,) = [line for line in lines if line.startswith(kind)]
        assert "left out" in line or all(float(number.replace(",", "")) > 0 for number in line.split()[-6:])
