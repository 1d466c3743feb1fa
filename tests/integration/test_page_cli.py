"""Danger: `monolith page` does not start, does not say where, or does not end when it is asked to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from monolith.serve.metrics import ServingMetrics
from monolith.serve.page import Page, PageServer
from page_replicas import replica, repository


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "monolith.cli", "page", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_replicas_and_runs_until_it_is_asked_to_end(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "run").mkdir()
    with PageServer(Page(ServingMetrics(repository(replica()))).routes()) as one:
        process = start(one.address, str(tmp_path / "run"), "--port", "0", "--json")
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            with urlopen(f"{address}/status.json", timeout=60) as response:
                told = json.load(response)
            with urlopen(address, timeout=60) as response:
                assert b"<title>Monolith</title>" in response.read()
        finally:
            os.kill(process.pid, number)
            _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert [known["address"] for known in told["replicas"]] == [one.address]
    assert [known["path"] for known in told["runs"]] == [str(tmp_path / "run")]


def test_a_public_address_is_refused_with_advice() -> None:
    process = start("http://127.0.0.1:1", "--host", "0.0.0.0")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "ssh -L" in errors
