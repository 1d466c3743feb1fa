"""Danger: metrics of a job land under another job's name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from monolith.train.config import get_metric_prefix, set_metric_prefix


def test_the_prefix_has_a_default_and_reaches_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONOLITH_METRIC_PREFIX", raising=False)
    assert get_metric_prefix() == "monolith.training"
    monkeypatch.setenv("MONOLITH_METRIC_PREFIX", "")  # so that what follows is undone
    set_metric_prefix("monolith.training.ctr")
    assert get_metric_prefix() == "monolith.training.ctr"
    script = "import os; print(os.environ['MONOLITH_METRIC_PREFIX'])"
    child = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert child.stdout.strip() == "monolith.training.ctr"
