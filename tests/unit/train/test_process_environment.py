"""Danger: metrics of a job land under another job's name, or a machine announces an address that is not its own."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys

import pytest

from monolith.train.environment import get_local_host, get_metric_prefix, set_metric_prefix


def test_the_prefix_has_a_default_and_reaches_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONOLITH_METRIC_PREFIX", raising=False)
    assert get_metric_prefix() == "monolith.training"
    monkeypatch.setenv("MONOLITH_METRIC_PREFIX", "")  # so that what follows is undone
    set_metric_prefix("monolith.training.ctr")
    assert get_metric_prefix() == "monolith.training.ctr"
    script = "import os; print(os.environ['MONOLITH_METRIC_PREFIX'])"
    child = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert child.stdout.strip() == "monolith.training.ctr"


@pytest.mark.parametrize(("system", "asked"), [("Linux", "box"), ("Windows", "box"), ("Darwin", "box.local")])
def test_the_address_is_that_of_the_machines_own_name(monkeypatch: pytest.MonkeyPatch, system: str, asked: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", {asked: "192.0.2.7"}.__getitem__)
    assert get_local_host() == "192.0.2.7"
