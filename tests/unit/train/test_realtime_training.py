"""Danger: a run that feeds a service ends because of one full disk, takes its servers with it, or loses their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monolith.train import Estimator, RunConfig, RunnerConfig
from training import ClickModel, batch_of


def estimator(config: RunConfig, runner: RunnerConfig | None = None) -> Estimator:
    model = ClickModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Estimator(model, config, optimizer=optimizer, runner=runner or RunnerConfig(is_local=True))


@pytest.mark.parametrize("name", ["enable_realtime_training", "enable_parameter_sync", None])
def test_either_switch_implies_the_others_and_the_rest(name: str | None) -> None:
    runner = RunnerConfig(is_local=True, enable_realtime_training=name is None)
    made = estimator(RunConfig(**({} if name is None else {name: True})), runner)
    assert made.runner.enable_realtime_training
    assert made.runner.recovers
    for config in (made.config, made.trainer.config):
        assert config.enable_parameter_sync
        assert config.enable_realtime_training
        assert config.ignore_save_errors
        assert config.dense_only_save_every == {"save_secs": 1800.0}


def test_what_is_set_stays(tmp_path: Path) -> None:
    config = RunConfig(
        model_dir=str(tmp_path),
        enable_parameter_sync=True,
        dense_only_save_checkpoints_steps=7,
        ignore_save_errors=False,
    )
    made = estimator(config, RunnerConfig(is_local=True, partial_recovery=False))
    assert made.config.dense_only_save_every == {"save_steps": 7}
    assert not made.config.ignore_save_errors
    assert not made.runner.recovers


def test_without_either_nothing_is_implied() -> None:
    made = estimator(RunConfig())
    assert not made.runner.enable_realtime_training
    assert not made.config.ignore_save_errors
    assert made.config.dense_only_save_every == {}


def test_such_a_run_trains_and_has_a_saver_of_dense_weights(tmp_path: Path) -> None:
    made = estimator(RunConfig(model_dir=str(tmp_path), enable_parameter_sync=True))
    assert made.train([batch_of(number) for number in range(3)]) == 3
    assert set(made.trainer.save_timers) == {"full", "dense_only"}
