"""Danger: a run that cannot start again because the run it once started from was removed, or ignores a wish silently."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.state.restore_points import find_restore_point
from monolith.train import Estimator, RunConfig, Trainer
from monolith.train.hooks import Hook
from training import ClickModel, Crash, Stream


def new_trainer(model_dir: Path, *hooks: Hook, **config: Any) -> Trainer:  # noqa: ANN401
    model = ClickModel(0)
    adam = torch.optim.Adam(model.mlp.parameters(), lr=0.01)
    return Trainer(model, adam, config=RunConfig(model_dir=str(model_dir), **config), hooks=hooks)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The model_dir of another run, with checkpoints 2, 4 and 5."""
    new_trainer(tmp_path / "there", save_checkpoints_steps=2).fit(Stream(), steps=5)
    return tmp_path / "there"


def test_a_run_with_its_own_checkpoint_does_not_need_the_restore_dir(there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    assert new_trainer(here, restore_dir=str(there)).fit(Stream(), steps=1) == 6
    shutil.rmtree(there)
    assert new_trainer(here, restore_dir=str(there)).fit(Stream(), steps=1) == 7
    config = RunConfig(model_dir=str(here), restore_dir=str(there))
    assert Estimator(ClickModel(0), config).evaluate(Stream(1))["global_step"] == 7


def test_a_run_that_has_only_its_log_goes_on_from_it(there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    with pytest.raises(KeyboardInterrupt):
        new_trainer(here, Crash(step=4), log_flush_secs=1e-6, save_checkpoints_secs=0).fit(Stream())
    assert not (here / "checkpoint").exists()
    own = find_restore_point(here).step
    assert 0 < own < 5
    config = RunConfig(model_dir=str(here), restore_dir=str(there))
    assert Estimator(ClickModel(0), config).evaluate(Stream(1))["global_step"] == own
    assert new_trainer(here, restore_dir=str(there)).fit(Stream(), steps=1) == own + 1


@pytest.mark.parametrize("exists", [False, True])
def test_without_any_checkpoint_the_run_warns_and_starts(
    tmp_path: Path, exists: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = tmp_path / "nothing"
    if exists:
        nothing.mkdir()
    with caplog.at_level(logging.WARNING):
        assert new_trainer(tmp_path / "here", restore_dir=str(nothing)).fit(Stream(), steps=1) == 1
    assert f"restore_dir {nothing} has no checkpoint" in caplog.text
    caplog.clear()
    config = RunConfig(model_dir=str(tmp_path / "other"), restore_dir=str(nothing))
    assert Estimator(ClickModel(0), config).evaluate(Stream(1))["global_step"] == 0
    assert f"restore_dir {nothing} has no checkpoint" in caplog.text


def test_a_run_killed_before_its_first_checkpoint_warns_that_the_adopted_one_was_removed(
    there: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = tmp_path / "here"
    with pytest.raises(KeyboardInterrupt):
        new_trainer(here, Crash(step=6), restore_dir=str(there)).fit(Stream())
    assert new_trainer(here).restore(training=True)
    there.rename(tmp_path / "moved")
    with caplog.at_level(logging.WARNING):
        assert not new_trainer(here).restore(training=True)
    assert "has been removed; the run starts without it" in caplog.text
    # The configuration may say where it is now.
    trainer = new_trainer(here, restore_dir=str(tmp_path / "moved"))
    assert trainer.restore(training=True)
    assert trainer.step == 5


def test_a_restore_ckpt_that_comes_too_late_is_said(there: Path, caplog: pytest.LogCaptureFixture) -> None:
    new_trainer(there, restore_ckpt="model.ckpt-2").fit(Stream(), steps=1)
    with caplog.at_level(logging.WARNING):
        assert new_trainer(there, restore_ckpt="model.ckpt-2").fit(Stream(), steps=1) == 4
        assert "is ignored" not in caplog.text
        assert new_trainer(there, restore_ckpt="model.ckpt-3").fit(Stream(), steps=1) == 5
    assert "restore_ckpt 'model.ckpt-3' is ignored" in caplog.text


def test_a_restore_ckpt_without_an_index_is_said(there: Path, caplog: pytest.LogCaptureFixture) -> None:
    (there / "checkpoint").unlink()
    with caplog.at_level(logging.WARNING):
        assert new_trainer(there, restore_ckpt="model.ckpt-2").restore(training=True)
    assert "restore_ckpt 'model.ckpt-2' is ignored" in caplog.text
