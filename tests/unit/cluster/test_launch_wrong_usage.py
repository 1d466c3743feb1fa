"""Danger: a mistake in a script or its settings is tried again for minutes, and its message is lost between equal tracebacks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from monolith.cluster import Liveness
from monolith.cluster.launch import Role, RoleKind, Supervisor
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


@pytest.mark.parametrize(
    ("error", "code"),
    [("ConfigError", 2), ("CheckpointMismatchError", 2), ("RepeatedFailureError", 2), ("ServerLostError", 1)],
)
def test_a_script_tells_it_by_its_exit_code(error: str, code: int) -> None:
    script = f"""
from monolith.cluster.launch.reporting import tell_wrong_usage
from monolith.errors import {error}
tell_wrong_usage()
try:
    raise {error}("caught")
except {error}:
    pass
raise {error}("a dim was changed")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.count("a dim was changed"), "caught" in ended.stderr) == (code, 1, False)
