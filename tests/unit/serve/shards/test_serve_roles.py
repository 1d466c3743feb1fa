"""Danger: a launch that serves ends with a shard that ended by itself, stops shards before front ends, or leaks its token."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.cli import main
from monolith.cluster.launch import Role, RoleKind, RoleState, ServeRoles, Supervisor
from monolith.cluster.launch.ray import must_say_host
from monolith.cluster.liveness import Liveness
from monolith.errors import ConfigError
from monolith.testing.roles import ScriptedProcess

JOB = ServeRoles(
    export="/exports",
    shards=2,
    replicas=2,
    front_ends=2,
    http_port=8000,
    grpc_port=0,
    uuid="job",
    token="a-token-of-the-launch",
    shard_args=("--max-streams", "9"),
    serve_args=("--partial",),
)
SHARD, FRONT_END = Role(RoleKind.SHARD, 2), Role(RoleKind.FRONT_END, 1)


def test_every_role_gets_its_command() -> None:
    shard = ["--shard", "1", "--shards", "2", "--replica", "0", "--max-streams", "9"]
    assert JOB.python_args(SHARD) == ["-m", "monolith.cli", "serve-shard", "/exports", *shard]
    front_end = ["--http-port", "8001", "--grpc-port", "0", "--partial"]
    assert JOB.python_args(FRONT_END) == ["-m", "monolith.cli", "serve", "/exports", *front_end]


def test_roles_find_each_other_and_clients_need_no_token_of_the_launcher() -> None:
    found = {"MONOLITH_DISCOVERY_TYPE": "file", "MONOLITH_DISCOVERY_FOLDER": "/logs/discovery"}
    shard, front_end = JOB.environment(SHARD, found), JOB.environment(FRONT_END, found)
    assert shard["MONOLITH_SERVING_SHARDS"] == front_end["MONOLITH_SERVING_SHARDS"] == "file=/logs/discovery"
    assert shard["MONOLITH_PS_TOKEN"] == front_end["MONOLITH_SHARD_TOKEN"] == "a-token-of-the-launch"
    assert "MONOLITH_PS_TOKEN" not in front_end
    ray = {"MONOLITH_DISCOVERY_TYPE": "ray", "MONOLITH_RAY_ADDRESS": "10.0.0.1:6379"}
    assert JOB.environment(SHARD, ray)["MONOLITH_SERVING_SHARDS"] == "ray=job@10.0.0.1:6379"


def supervised(restarts: int) -> tuple[Supervisor, dict[Role, ScriptedProcess]]:
    running: dict[Role, ScriptedProcess] = {}

    def start(role: Role) -> ScriptedProcess:
        running[role] = ScriptedProcess()
        return running[role]

    supervisor = Supervisor(JOB.roles, start, Liveness(restarts=restarts), clock=lambda: 0.0, chance=lambda: 0.0)
    assert not supervisor.step()
    return supervisor, running


@pytest.mark.parametrize("role", [SHARD, FRONT_END])
def test_a_role_that_ends_by_itself_has_failed(role: Role) -> None:
    supervisor, running = supervised(restarts=1)
    running[role].exit(0)
    assert not supervisor.step()
    assert [status.state for status in supervisor.statuses if status.role == role] == [RoleState.WAITING]
    supervisor, running = supervised(restarts=0)
    running[role].exit(0)
    supervisor.step()
    assert supervisor.outcome.failed == role


def test_front_ends_end_before_the_shards_they_ask() -> None:
    supervisor, running = supervised(restarts=1)
    supervisor.request_stop("received SIGTERM")
    assert not supervisor.step()
    assert {role.kind for role, process in running.items() if process.asked} == {RoleKind.FRONT_END}
    for role, process in running.items():
        if role.kind is RoleKind.FRONT_END:
            process.exit(0)
    assert not supervisor.step()
    assert all(process.asked for process in running.values())
    for process in running.values():
        process.exit(0)
    assert supervisor.step()


def test_shards_on_several_machines_need_a_certificate() -> None:
    with pytest.raises(ConfigError, match="--shard-args"):
        must_say_host(JOB, {"10.0.0.1", "10.0.0.2"}, {})
    safe = JOB.model_copy(update={"shard_args": ("--tls-cert", "cert.pem", "--tls-key", "key.pem")})
    assert must_say_host(safe, {"10.0.0.1", "10.0.0.2"}, {}) == {RoleKind.SHARD: "option"}
    assert must_say_host(JOB, {"10.0.0.1"}, {}) == {}


def test_a_launch_trains_or_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--serve", str(tmp_path), "--ps", "2"]) == 2
    assert "a launch trains or serves" in capsys.readouterr().err
    assert main(["launch"]) == 2
    assert "--serve EXPORT" in capsys.readouterr().err
