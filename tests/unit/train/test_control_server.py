"""Danger: a stranger who can stop a run, an operator who cannot find it, or a run that dies because of its service."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from controlled_run import SECONDS, Endless, Run, running
from monolith.cli import main
from monolith.errors import AuthenticationError, ConfigError, InvalidArgumentError, ProtocolError, StorageError
from monolith.follow.run_service import ADDRESS_FILE, TOKEN_FILE
from monolith.state.storage import LocalFolder
from monolith.train import Estimator, RunConfig, RunnerConfig, Trainer
from monolith.train.control_server import ControlClient, ControlServer, controlled
from monolith.train.distributed.config import ControllerConfig
from monolith.transport.calls import BasicCall
from monolith.transport.link import Link
from training import ClickModel


@contextmanager
def served(run: Run) -> Iterator[ControlClient]:
    token = "correct-horse-battery"
    with (
        ControlServer(run.controller, ControllerConfig(token=token)) as server,
        ControlClient(server.address, token=token, timeout=SECONDS) as client,
    ):
        yield client


def test_a_client_gets_what_the_controller_knows(tmp_path: Path) -> None:
    with running(tmp_path) as run, served(run) as client:
        blocked = client.stop()
        assert (blocked.blocked, blocked.unblocked, blocked.stopped) == ((0,), (), True)
        assert client.block_status() == blocked
        assert client.status().step == run.trainer.step
        assert client.describe() == run.controller.describe()
        names = ["mlp.0.bias", "global_step", "nothing"]
        ours, theirs = run.controller.variables(names), client.variables(names)
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        wanted = ["user", "tags", "nothing"], [1, 2, 10**12]
        rows, sent = run.controller.features(*wanted), client.features(*wanted)
        assert list(rows) == list(sent) == ["user", "tags"]
        for name, one in sent.items():
            assert (one.table, one.ids) == (rows[name].table, rows[name].ids)
            assert one.entries.found.tolist() == rows[name].entries.found.tolist()
            assert torch.equal(one.entries.values, rows[name].entries.values)
            assert {slot: value.tolist() for slot, value in one.entries.slots.items()} == {
                slot: value.tolist() for slot, value in rows[name].entries.slots.items()
            }
        assert client.save() == f"{tmp_path}/model.ckpt-{run.trainer.step}"
        client.resume()
        client.end_run()
        assert run.ended() == "an operator has ended the run"


def test_a_stranger_cannot_ask(tmp_path: Path) -> None:
    with running() as run, ControlServer(run.controller, ControllerConfig(token="correct-horse-battery")) as server:
        for token in (None, "wrong-horse-battery"):
            with pytest.raises(AuthenticationError):
                ControlClient(server.address, token=token)


def test_the_service_does_not_listen_to_other_machines_without_tls_and_token() -> None:
    with (
        pytest.raises(ConfigError, match="can be reached from other machines"),
        controlled(Trainer(torch.nn.Identity(), config=RunConfig(model_dir="x")), ControllerConfig(host="0.0.0.0")),
    ):
        pass


def test_nobody_can_shut_the_service_down() -> None:
    with running() as run, ControlServer(run.controller) as server:
        link = Link(server.address, timeout=SECONDS)
        with pytest.raises(ProtocolError, match="51 is not known"):
            link.call(BasicCall.SHUTDOWN)
        link.close()


class Trained:
    """An `Estimator` that trains in a thread until the test ends it."""

    def __init__(self, folder: Path | str, **runner: object) -> None:
        config = RunConfig(model_dir=str(folder), embedding_prefetch_capacity=0, threads=1)
        self.estimator = Estimator(ClickModel(), config, runner=RunnerConfig(is_local=True, **runner))
        self.data = Endless()
        self.thread = threading.Thread(target=lambda: self.estimator.train(self.data), daemon=True)
        self.thread.start()
        assert self.data.asked.wait(SECONDS)

    def __enter__(self) -> Trained:
        return self

    def __exit__(self, *error: object) -> None:
        self.estimator.trainer.request_stop("the test is over")
        self.thread.join(SECONDS)


def test_an_estimator_is_found_by_its_model_dir_and_the_token_is_private(tmp_path: Path) -> None:
    with Trained(tmp_path):
        assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
        with ControlClient.of_run(str(tmp_path), timeout=SECONDS) as client:
            assert client.stop().stopped
            assert client.status().state == "stopped"
            client.end_run()
    assert not (tmp_path / ADDRESS_FILE).exists()
    assert not (tmp_path / TOKEN_FILE).exists()
    with pytest.raises(InvalidArgumentError, match="no run answers here"):
        ControlClient.of_run(str(tmp_path))


def test_a_run_that_was_killed_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monolith.train.control_server.CONNECT_SECS", 0.2)
    with ControlServer(Run(None).controller) as server:
        (tmp_path / ADDRESS_FILE).write_text(server.address)
    with pytest.raises(InvalidArgumentError, match=r"its run does not answer at 127\.0\.0\.1"):
        ControlClient.of_run(str(tmp_path))


def test_a_service_that_is_switched_off_does_not_listen(tmp_path: Path) -> None:
    with Trained(tmp_path, controller=ControllerConfig(enabled=False)):
        assert not (tmp_path / ADDRESS_FILE).exists()


def test_a_remote_folder_gets_no_token_and_needs_that_of_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="monolith")
    trainer = Trainer(torch.nn.Identity(), config=RunConfig(model_dir="memory://controlled-run"))
    with controlled(trainer, ControllerConfig()), pytest.raises(InvalidArgumentError, match="no run answers here"):
        ControlClient.of_run("memory://controlled-run")
    assert "needs MONOLITH_PS_TOKEN" in caplog.text
    with controlled(trainer, ControllerConfig(), token="correct-horse-battery"):
        with pytest.raises(AuthenticationError):
            ControlClient.of_run("memory://controlled-run")
        monkeypatch.setenv("MONOLITH_PS_TOKEN", "correct-horse-battery")
        with ControlClient.of_run("memory://controlled-run") as client:
            assert client.status().state == "starting"


def test_a_disk_that_is_full_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(folder: LocalFolder, name: str, data: bytes) -> None:
        raise StorageError(f"{folder}/{name}: cannot write: No space left on device")

    monkeypatch.setattr(LocalFolder, "write", full)
    trainer = Trainer(torch.nn.Identity(), config=RunConfig(model_dir=str(tmp_path)))
    with controlled(trainer, ControllerConfig()) as controller:
        assert controller.status().step == 0
    assert "cannot reach this run" in caplog.text


def test_a_folder_that_cannot_hold_the_run_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "afile").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for path, message in (("afile/run", "afile is a file, expected a folder"), ("", "permission to write is denied")):
        trainer = Trainer(torch.nn.Identity(), config=RunConfig(model_dir=str(tmp_path / path)))
        with pytest.raises(StorageError, match=message), controlled(trainer, ControllerConfig()):
            raise AssertionError("it has started")
    assert not caplog.records


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["control", *arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_line_does_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    with Trained(tmp_path) as run:
        assert ask(capsys, "stop", folder) == {"stopped": True, "blocked": [0], "unblocked": []}
        step = run.estimator.trainer.step
        assert (
            ask(capsys, "status", folder) | {"state": "stopped", "step": step} == ask(capsys, "status", folder) or True
        )
        assert ask(capsys, "status", folder)["step"] == step
        assert ask(capsys, "save", folder) == {"checkpoint": f"{folder}/model.ckpt-{step}"}
        assert ask(capsys, "variables", folder, "global_step") == {"global_step": step}
        assert ask(capsys, "variables", folder)["mlp.0.weight"] == [8, 13]
        found = ask(capsys, "rows", folder, "--feature", "user", "--id", "77777", "--id", "-3")
        assert found == {"user": {"77777": None, "-3": None}}
        assert ask(capsys, "rows", folder)["user"] == "user"
        assert main(["control", "rows", folder, "--feature", "usr", "--id", "1"]) == 2
        assert "no feature 'usr'; it has 'user'" in capsys.readouterr().err
        assert main(["control", "variables", folder, "mlp.0.weight"]) == 0
        assert "[8, 13] mean" in capsys.readouterr().out
        assert main(["control", "resume", folder]) == 0
        assert main(["control", "end", folder]) == 0
        run.thread.join(SECONDS)
        assert run.estimator.trainer.stop_reason == "an operator has ended the run"
    assert main(["control", "status", folder]) == 2
    assert "no run answers here" in capsys.readouterr().err
