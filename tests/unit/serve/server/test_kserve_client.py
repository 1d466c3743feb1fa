"""Danger: KServe's clients, which encode requests in other ways than Triton's, cannot ask this server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from served_models import ServeSums, sum_replica

ROOT = Path(__file__).parents[4]
KSERVE = ROOT / ".cache/servers/kserve"


def test_clients_of_kserve_are_answered(serve_sums: ServeSums) -> None:
    if not (KSERVE / "ready").exists():
        pytest.skip("needs KServe in an environment of its own: run tests/servers/install.sh")
    server, _ = serve_sums(sum_replica(5))
    command = [
        str(KSERVE / "bin/python"),
        str(ROOT / "tests/kserve_requests.py"),
        server.http_address,
        server.grpc_address,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    health = ("live", "ready", "model_ready", "grpc_live", "grpc_ready", "grpc_model_ready")
    assert {name: found.pop(name) for name in health} == dict.fromkeys(health, True)
    over_http, over_grpc = ["seven", [2.0, 4.0, 6.0]], ["seven", "5", [2.0, 4.0, 6.0]]
    assert found == {"json": over_http, "binary": over_http, "grpc": over_grpc, "grpc_raw": over_grpc}
