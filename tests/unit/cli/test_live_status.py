"""Danger: a page that shows nothing of a run that is there and does not answer, so that nobody sees that it may be behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from monolith.cli.serve_replicas import live_status
from monolith.follow.run_service import ADDRESS_FILE
from monolith.serve.page import Overview, RunCollector
from monolith.train import RunConfig, Trainer
from monolith.train import control_server as service
from monolith.train.control_server import controlled
from monolith.train.distributed.config import ControllerConfig


def shown(run: Path) -> dict[str, float]:
    """The metrics of the run."""
    families = RunCollector(Overview([], [run], live=live_status).runs).collect()
    return {family.name.removeprefix("monolith_training_"): one.value for family in families for one in family.samples}


def test_a_run_that_goes_on_answers_and_one_that_has_ended_is_no_run(tmp_path: Path) -> None:
    assert live_status(tmp_path) is None
    with controlled(Trainer(torch.nn.Identity(), config=RunConfig(model_dir=str(tmp_path))), ControllerConfig()):
        found = live_status(tmp_path)
        assert found is not None
        assert (found["answers"], found["state"]) == (True, "starting")
        assert shown(tmp_path) == {"answers": 1.0, "step": 0.0}
    assert live_status(tmp_path) is None
    assert shown(tmp_path) == {}


def test_a_run_that_hangs_or_was_killed_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CONNECT_SECS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = f"127.0.0.1:{hung.getsockname()[1]}"
        (tmp_path / ADDRESS_FILE).write_text(address)
        for _ in ("hung", "killed"):
            found = live_status(tmp_path)
            assert found is not None
            assert found["answers"] is False
            assert address in str(found["problem"])
            assert shown(tmp_path) == {"answers": 0.0}
            hung.close()
