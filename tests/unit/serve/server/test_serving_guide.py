"""Danger: commands of the guide that do not work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monolith.serve.replica import Replica
from monolith.serve.server.model_server import ModelServer

GUIDE = (Path(__file__).parents[4] / "docs/guide-serving.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_are_answered(clicks: tuple[ModelServer, Replica], block: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs the package curl")
    server, _ = clicks
    for command in re.findall(r"^curl .*?(?=^curl |\Z)", block, re.DOTALL | re.MULTILINE):
        line = command.replace("127.0.0.1:8000", server.http_address)
        ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, (line, ended.stdout, ended.stderr)
        answer = json.loads(ended.stdout)
        if "/infer" in command:
            names = [one["name"] for one in answer["outputs"]]
            assert names == (["indices", "scores"] if "top_k" in command else ["click", "stay"])


@pytest.mark.parametrize("block", blocks("python"))
def test_programs_run(clicks: tuple[ModelServer, Replica], exported: Path, block: str) -> None:
    server, _ = clicks
    program = block.replace("127.0.0.1:8000", server.http_address)
    program = program.replace("runs/clicks/exported_models", str(exported.parent))
    command = [sys.executable, "-W", "error", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
