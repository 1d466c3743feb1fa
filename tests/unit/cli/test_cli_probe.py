"""Danger: a probe that calls a dead server alive, or a live one dead."""

from __future__ import annotations

import json

import pytest

from monolith.cli import main
from monolith.ps import ParameterServer, ServerConfig
from monolith.testing.servers import free_ports

TOKEN = "a-token-of-the-job"


def test_a_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with ParameterServer() as server:
        assert main(["probe", server.address, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["address"] == server.address


def test_nobody_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert main(["probe", f"127.0.0.1:{port}", "--timeout", "0.5"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_who_asks_for_a_token_is_alive_only_to_those_who_have_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ParameterServer(ServerConfig(token=TOKEN)) as server:
        monkeypatch.delenv("MONOLITH_PS_TOKEN", raising=False)
        assert main(["probe", server.address, "--timeout", "2"]) == 1
        monkeypatch.setenv("MONOLITH_PS_TOKEN", TOKEN)
        assert main(["probe", server.address]) == 0
