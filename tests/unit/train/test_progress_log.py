"""Danger: a run that cannot be followed: it continues an older one silently, a job over several processes prints nothing for
hours, or lines about nothing hide the ones that matter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from monolith.cli import main
from monolith.cluster import DiscoveryConfig, monolith_discovery
from monolith.errors import DivergedError
from monolith.train import Estimator, RunConfig
from monolith.train.distributed.run import tell_scheduler
from monolith.train.hooks import Hook, LoggingHook, ProgressHook
from training import ClickModel, Stream


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="monolith")


def train(folder: Path | None = None, *, batches: int = 4, hooks: tuple[Hook, ...] = ()) -> None:
    config = RunConfig(model_dir=None if folder is None else str(folder), log_step_count_steps=2)
    Estimator(ClickModel(), config).train(Stream(batches), hooks=hooks)


def test_an_estimator_logs_its_progress(caplog: pytest.LogCaptureFixture) -> None:
    train()
    steps = [record.message for record in caplog.records if record.message.startswith("step ")]
    assert [line.partition(":")[0] for line in steps] == ["step 2", "step 4"]
    assert all("per example" in line and line.endswith("examples/s") for line in steps)
    assert caplog.messages[-1] == "training ended at step 4: the data ended"


@pytest.mark.parametrize("given", [ProgressHook(lambda report: None), LoggingHook(every_steps=100)])
def test_it_does_not_do_so_beside_a_hook_that_does(given: Hook, caplog: pytest.LogCaptureFixture) -> None:
    train(hooks=(given,))
    assert not any(message.startswith("step ") for message in caplog.messages)


def test_the_rate_is_that_of_the_last_interval(caplog: pytest.LogCaptureFixture) -> None:
    seconds: Iterator[float] = iter([0.0, 4.0, 5.0])
    train(hooks=(LoggingHook(every_steps=2, clock=lambda: next(seconds)),))
    rates = [message.rpartition(", ")[2] for message in caplog.messages if message.startswith("step ")]
    assert rates == ["4 examples/s", "16 examples/s"]  # 8 rows a batch


def test_a_run_says_what_it_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path)
    assert "continuing" not in caplog.text
    train(tmp_path, batches=6)
    assert f"continuing from step 4 of {tmp_path}/model.ckpt-4" in caplog.messages


def test_so_does_one_that_was_evaluated_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path)
    estimator = Estimator(ClickModel(), RunConfig(model_dir=str(tmp_path)))
    estimator.evaluate(Stream(2))
    assert "continuing" not in caplog.text
    estimator.train(Stream(6), steps=1)
    estimator.train(Stream(6), steps=1)
    assert caplog.text.count("continuing from step 4") == 1


def test_an_error_is_left_to_whoever_catches_it(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Hook):
        def after_step(self, trainer: object, result: object) -> None:
            raise DivergedError("a long story")

    with pytest.raises(DivergedError):
        train(hooks=(Broken(),))
    assert "a long story" not in caplog.text
    assert caplog.messages[-1] == "training stopped at step 1: DivergedError"


def test_that_there_is_nothing_to_do_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "cli_job:Model", "--max-steps", "2", "--model-dir", str(tmp_path)]
    assert main(command) == 0
    assert "ended at step 2" in capsys.readouterr().out
    assert main(command) == 0
    assert capsys.readouterr().out == ""  # the log has said so: see test_epochs.py


def test_what_every_job_does_is_not_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = DiscoveryConfig(discovery_type="file", discovery_folder=str(tmp_path), is_local=False)
    with monolith_discovery(config):
        tell_scheduler(None)
    assert caplog.messages == []
