"""Danger: a replica that is stopped while it reads its first rows, from a run that does not answer, hangs until it is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import followed_job
from monolith.follow.run_service import ADDRESS_FILE
from monolith.serve import export_model


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_replica_can_be_stopped_before_it_has_rows(tmp_path: Path, sent: signal.Signals) -> None:
    run, export = tmp_path / "run", tmp_path / "export"
    run.mkdir()
    export_model(
        followed_job.Clicks(),
        {name: torch.arange(4) for name in followed_job.COLUMNS},
        export,
        heads=[followed_job.CLICK],
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(240)
        (run / ADDRESS_FILE).write_text(f"127.0.0.1:{silent.getsockname()[1]}")
        command = [sys.executable, "-m", "monolith.cli", "serve", str(export), "--run", str(run)]
        process = subprocess.Popen(
            [*command, "--http-port", "0", "--grpc-port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            connected, _ = silent.accept()  # it has asked, and is never answered
            with connected:
                process.send_signal(sent)
                _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode in (-sent, 128 + sent), errors
    assert "Traceback" not in errors
