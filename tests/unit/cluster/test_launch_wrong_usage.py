"""Danger: a mistake in a script or its settings is tried again for minutes, and its message is lost between equal tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monolith.cluster import Liveness
from monolith.cluster.launch import Role, RoleKind, Supervisor
from monolith.exit_codes import HEARTBEAT_VARIABLE
from monolith.testing.roles import ScriptedProcess


@pytest.mark.parametrize("kind", [RoleKind.WORKER, RoleKind.PS])
@pytest.mark.parametrize(("code", "restarted"), [(1, True), (2, False), (-9, True)])
def test_wrong_usage_ends_the_job_at_once(kind: RoleKind, code: int, restarted: bool) -> None:
    running: dict[Role, ScriptedProcess] = {}
    roles = [Role(RoleKind.PS, 0), Role(RoleKind.WORKER, 0)]
    supervisor = Supervisor(
        roles, lambda role: running.setdefault(role, ScriptedProcess()), Liveness(restarts=5), clock=lambda: 0.0
    )
    supervisor.step()
    running[Role(kind, 0)].exit(code)
    supervisor.step()
    assert supervisor.outcome.is_success is restarted  # so far
    assert supervisor.outcome.code == (None if restarted else code)
    if not restarted:
        assert "a restart would not help" in str(supervisor.outcome.reason)


def ended(folder: Path, script: str, *, launched: bool = True) -> tuple[int, str]:
    """The exit code and stderr of a script that nothing but an import of ours has prepared."""
    (folder / "train.py").write_text(script)
    environ = {**os.environ, **({HEARTBEAT_VARIABLE: ""} if launched else {})}
    run = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    return run.returncode, run.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("CheckpointMismatchError", 2),
        ("ConfigError", 2),
        ("InvalidArgumentError", 2),
        ("MissingPackageError", 2),
        ("RepeatedFailureError", 2),
        ("ServerLostError", 1),
        ("StorageError", 4),
    ],
)
def test_a_launched_script_tells_it_by_its_exit_code(tmp_path: Path, error: str, code: int) -> None:
    found, printed = ended(tmp_path, f"import contextlib\nfrom monolith.errors import {error}\nraise {error}('dim')\n")
    assert (found, printed.count("dim'" if code != 2 else "dim")) == (code, 1)
    if code == 2:
        assert printed == f"train.py:3: {error}: dim\n"


@pytest.mark.parametrize("launched", [True, False])
def test_a_mistake_before_anything_of_a_run_is_called_is_one_line_in_a_launched_script(
    tmp_path: Path, launched: bool
) -> None:
    code, printed = ended(tmp_path, "import monolith\n\nmonolith.Feature(name='user', dim=-1)\n", launched=launched)
    assert code == (2 if launched else 1)
    assert printed.startswith("train.py:3: ConfigError: Feature.dim" if launched else "Traceback")
    assert len(printed.splitlines()) == 1 or not launched


def test_a_hook_of_the_script_is_still_called(tmp_path: Path) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: sys.stderr.write('mine')\n"
    code, printed = ended(tmp_path, f"{hook}import monolith\nraise monolith.ConfigError('dim')\n")
    assert (code, printed) == (2, "mine")
