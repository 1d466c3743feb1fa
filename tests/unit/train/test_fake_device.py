"""Danger: a model that trains on the host and fails on the first accelerator, where no test of ours has ever run.

The accelerator is a fake: real enough to refuse tensors of the host, and to count what is copied. TPUs and GPUs are untested.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fake_device_runs


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """The error of each case, or None, of one process."""
    command = [sys.executable, str(Path(fake_device_runs.__file__))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, str | None] = json.loads(ended.stdout)
    return answer


@pytest.mark.parametrize("case", fake_device_runs.CASES)
def test_on_the_fake_device(case: str, results: dict[str, str | None]) -> None:
    assert results[case] is None, results[case]
