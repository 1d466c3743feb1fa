"""Danger: a secret that others can read: in a file, a log, a dump, an error, or on a command line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import SecretStr

from monolith.cluster.launch import JobRoles
from monolith.cluster.launch.roles import ServeRoles
from monolith.config import Config
from monolith.dataservice import DataClientConfig, DataWorkerConfig, DispatcherConfig
from monolith.errors import ConfigError, StorageError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig
from monolith.ranks import MeshConfig
from monolith.serve.server.config import ServingConfig
from monolith.serve.shards.shard_replica import ShardClientConfig
from monolith.serve.shards.shard_server import ShardConfig
from monolith.train.distributed.config import ControllerConfig, RunnerConfig
from monolith.transport.server import ListenConfig
from monolith.transport.tokens import read_token, reveal

TOKEN = "correct-horse-battery"


def with_token() -> list[Config]:
    return [
        ListenConfig(token=TOKEN),
        ServerConfig(token=TOKEN),
        DispatcherConfig(token=TOKEN),
        DataWorkerConfig(dispatcher="a:1", token=TOKEN, client=DataClientConfig(token=TOKEN)),
        MeshConfig(token=TOKEN),
        ControllerConfig(token=TOKEN),
        ClientConfig(token=TOKEN),
        DataClientConfig(token=TOKEN),
        RunnerConfig(client=ClientConfig(token=TOKEN), server=ServerConfig(token=TOKEN)),
        RunnerConfig.from_env({"MONOLITH_PS_TOKEN": TOKEN}),
        JobRoles(uuid="job", worker_args=(), token=TOKEN),
        ServeRoles(export="exports", uuid="job", token=TOKEN),
        ServingConfig(token=TOKEN),
        ShardConfig(export=Path("exports"), token=TOKEN),
        ShardClientConfig(token=TOKEN),
    ]


@pytest.mark.parametrize("config", with_token(), ids=lambda config: type(config).__name__)
def test_no_dump_repr_or_log_line_has_the_token(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("test").warning("%s %r %s", config, config, vars(config))
    shown = f"{config} {config!r} {config.model_dump()} {config.model_dump_json()} {vars(config)} {caplog.text}"
    assert TOKEN not in shown


def test_every_config_with_a_token_is_in_the_list_above() -> None:
    def below(kind: type[Config]) -> set[type[Config]]:
        return {kind, *(found for child in kind.__subclasses__() for found in below(child))}

    secret = {kind for kind in below(Config) if "token" in kind.model_fields and kind.__module__.startswith("monolith")}
    # In a save or restore a token is a number that makes a repeated request the same work.
    secret = {kind for kind in secret if kind.model_fields["token"].annotation is not int}
    assert secret <= {type(config) for config in with_token()}


def test_a_token_is_known_to_who_has_to_send_it() -> None:
    assert reveal(ClientConfig(token=TOKEN).token) == TOKEN
    assert ClientConfig(token=SecretStr(TOKEN)) == ClientConfig(token=TOKEN)
    assert reveal(ClientConfig().token) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerConfig(token=[TOKEN]),
        lambda: RunnerConfig(client={"token": [TOKEN]}),
        lambda: RunnerConfig(client=[{"token": TOKEN}]),
        lambda: RunnerConfig.from_env({"MONOLITH_CLIENT": f'{{"token": "{TOKEN}"'}),
        lambda: RunnerConfig.from_env({"MONOLITH_CLIENT": f'["{TOKEN}"]'}),
        lambda: ServerConfig.from_json(f'{{"token": ["{TOKEN}"]}}'),
        lambda: ServerConfig.from_json(f'{{"token": "{TOKEN}", "port": -1}}'),
        lambda: ServerConfig.from_json(f'{{"token": "{TOKEN}"'),
        lambda: ServerConfig.from_json(f'["{TOKEN}"]'),
        lambda: ServerConfig(tokens=TOKEN),
    ],
)
def test_no_error_of_a_config_shows_the_token(make: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make()  # type: ignore[operator]
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o666, 0o777])
def test_a_token_file_that_everybody_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"--token-file: every user .* \(mode {mode:03o}\); run chmod 600") as caught:
        read_token(file)
    assert TOKEN not in str(caught.value)
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="every user"):
        read_token(link)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_token_file_of_its_owner_or_group_is_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(mode)
    assert read_token(file) == TOKEN


def test_a_token_file_that_is_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"--token-file: cannot read .*absent: No such file"):
        read_token(tmp_path / "absent")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xfd" * 10)
    binary.chmod(0o600)
    with pytest.raises(ConfigError, match="--token-file: expected UTF-8 text"):
        read_token(binary)


def test_a_private_key_that_everybody_can_access_is_refused(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("-----BEGIN something-----")
        (tmp_path / name).chmod(0o644)
    with pytest.raises(ConfigError, match="tls_key: every user of this machine can access"):
        ParameterServer(ServerConfig(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem"))


def test_a_job_gives_its_token_to_every_role_in_the_environment_alone() -> None:
    job = JobRoles(num_ps=2, num_workers=2, uuid="job", worker_args=("train.py",), token=TOKEN)
    for role in job.roles:
        assert job.environment(role)["MONOLITH_PS_TOKEN"] == TOKEN
        assert TOKEN not in " ".join(job.python_args(role))
