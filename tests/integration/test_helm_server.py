"""Danger: a chart that Kubernetes takes and whose servers do not start: a wrong option, a certificate for another name, a probe
that is never answered. The command, variables and secrets of a pod are run here, with paths and address of the test's own."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from helm_chart import container, environment, expanded, one, rendered
from monolith.cli import main
from monolith.testing.servers import free_ports


def test_a_server_starts_as_the_chart_says_and_its_probe_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    manifests = rendered({"ps": {"port": port, "memoryLimit": "1GiB"}, "modelDir": {"path": str(tmp_path / "model")}})
    secrets = {name: one(manifests, "Secret", f"-{name}")["data"] for name in ("token", "tls")}
    for name, text in secrets["tls"].items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
        (tmp_path / name).chmod(0o440)  # as the chart mounts it: a key that everyone can read is refused
    servers = one(manifests, "StatefulSet")
    variables = environment(servers, 1, {"token": base64.b64decode(secrets["token"]["token"]).decode()})

    def here(text: str) -> str:
        text = expanded(text, variables).replace("/etc/monolith/tls", str(tmp_path))
        return text.replace("0.0.0.0", "127.0.0.1")

    for name, text in variables.items():
        monkeypatch.setenv(name, here(text))
    spec = container(servers)
    assert spec["command"] == ["monolith", "ps"]
    _, *probe = map(here, spec["livenessProbe"]["exec"]["command"])
    command = [sys.executable, "-m", "monolith.cli", "ps", *map(here, spec["args"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == f"listening on 127.0.0.1:{port}\n"
            assert main(probe) == 0
            monkeypatch.setenv("MONOLITH_PS_TOKEN", "another-token-of-someone-else")
            assert main(probe) == 1
            assert (tmp_path / "model" / "ps" / "1").is_dir()
        finally:
            server.terminate()
        assert server.wait(60) == 0
