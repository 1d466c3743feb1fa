"""Danger: a launched job that takes an operator's end for a failure and starts its roles again, or leaves some running."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

import control_job
from launched_job import Launch, is_alive
from monolith.cli import main
from monolith.follow.run_service import ADDRESS_FILE
from monolith.state.restore_points import restore_points
from monolith.train.control_server import ControlClient
from moving_buckets import wait_for


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param(("--ps", "1", "--workers", "2"), id="servers"),
        pytest.param(("--ranks", "2"), id="ranks", marks=pytest.mark.slow),
        pytest.param(("--ps", "1", "--ranks", "2"), id="ranks over servers"),
    ],
)
def test_a_launched_job_is_stopped_saved_and_ended(
    tmp_path: Path, roles: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MONOLITH_")}
    environ = {**clean, "PYTHONPATH": str(Path(control_job.__file__).parent), "OMP_NUM_THREADS": "1"}
    folder, settings = str(tmp_path / "run"), json.dumps({"threads": 1})
    command = (*roles, "--model-dir", folder, "--restarts", "2", control_job.__file__, settings)
    with closing(Launch(tmp_path, *command, environment=environ)) as job:
        wait_for(lambda: not job.is_running or Path(folder, ADDRESS_FILE).exists())
        # The token of the job is in the environment of its roles alone. That of the service is in the folder.
        with ControlClient.of_run(folder) as client:
            wait_for(lambda: client.status().state == "training" and client.status().step > 0)
        assert main(["control", "stop", folder, "--json"]) == 0, job.events[-5:]
        assert json.loads(capsys.readouterr().out) == {"stopped": True, "blocked": [0, 1], "unblocked": []}
        assert main(["control", "save", folder]) == 0
        assert main(["control", "end", folder]) == 0
        code, errors = job.end()
        assert code == 0, errors
        assert [event for event in job.events if event["event"] == "restarting"] == []
        assert not any(map(is_alive, job.all_pids()))
        steps = [
            json.loads(e["text"])["step"] for e in job.events if e["event"] == "line" and e["text"].startswith("{")
        ]
    assert len(steps) == 2
    assert restore_points(folder)[-1].step == max(steps)
