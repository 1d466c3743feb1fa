"""Danger: an evaluator that skips checkpoints, evaluates another one than it says, or never ends."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.train import Estimator, RunConfig
from monolith.train.evaluation import checkpoints_iterator, evaluate_checkpoints
from training import ClickModel, batch_of

DATA = [batch_of(n) for n in range(100, 104)]


def made(config: RunConfig) -> Estimator:
    model = ClickModel()
    return Estimator(model, config, optimizer=torch.optim.Adam(model.parameters(), lr=0.05))


def train(folder: Path, *max_steps: int, **settings: object) -> RunConfig:
    """Train on until each of these steps, and save only there: a save of the past may still be going on at others."""
    config = RunConfig(model_dir=str(folder), save_checkpoints_secs=0, resume_data=False, **settings)  # type: ignore[arg-type]
    for end in max_steps:
        made(config).train([batch_of(n) for n in range(end)], max_steps=end)
    return config


class Clock:
    """Time that passes by sleeping, during which `happens` may do something."""

    def __init__(self, happens: dict[int, object] | None = None) -> None:
        self.now, self.naps = 0.0, 0
        self.happens = happens or {}

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1
        if callable(then := self.happens.get(self.naps)):
            then()


def test_every_checkpoint_is_evaluated_in_order_with_its_own_weights(tmp_path: Path) -> None:
    config = train(tmp_path, 2, 4, 6)
    found = list(evaluate_checkpoints(made, config, lambda: DATA))
    assert [metrics["global_step"] for metrics in found] == [2, 4, 6]
    expected = []
    for step in (2, 4, 6):
        expected.append(made(config.model_copy(update={"restore_ckpt": f"model.ckpt-{step}"})).evaluate(DATA))
    assert found == expected
    assert len({metrics["click/loss"] for metrics in found}) == 3


def test_metrics_are_written_as_summaries_at_the_steps_of_the_checkpoints(tmp_path: Path) -> None:
    list(evaluate_checkpoints(made, train(tmp_path, 2, 4), lambda: DATA, steps=1))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "eval"))
    events.Reload()
    assert sorted(point.step for point in events.Scalars("click/auc")) == [2, 4]
    assert [point.value for point in events.Scalars("click/examples")] == [8, 8]


def test_it_waits_for_more_and_ends_at_the_last_step(tmp_path: Path) -> None:
    train(tmp_path, 2)
    clock = Clock({3: lambda: train(tmp_path, 4, 6)})
    config = RunConfig(model_dir=str(tmp_path))
    found = evaluate_checkpoints(
        made, config, lambda: DATA, max_steps=4, timeout_secs=60, sleep=clock.sleep, clock=clock
    )
    assert [metrics["global_step"] for metrics in found] == [2, 4]
    assert clock.naps == 3


def test_it_gives_up_when_nothing_new_comes(tmp_path: Path) -> None:
    train(tmp_path, 2)
    clock = Clock()
    steps = [c.step for c in checkpoints_iterator(str(tmp_path), timeout_secs=2.5, sleep=clock.sleep, clock=clock)]
    assert (steps, clock.now) == ([2], 2.5)


def test_the_time_limit_starts_again_with_every_checkpoint(tmp_path: Path) -> None:
    clock = Clock({2: lambda: train(tmp_path, 2), 4: lambda: train(tmp_path, 4)})
    steps = [c.step for c in checkpoints_iterator(str(tmp_path), timeout_secs=3, sleep=clock.sleep, clock=clock)]
    assert (steps, clock.now) == ([2, 4], 7)


def test_a_step_that_is_saved_again_after_going_back_is_evaluated_again(tmp_path: Path) -> None:
    train(tmp_path, 2, 4)
    clock = Clock({1: lambda: train(tmp_path, 4, restore_ckpt="model.ckpt-2")})
    steps = [c.step for c in checkpoints_iterator(str(tmp_path), timeout_secs=2, sleep=clock.sleep, clock=clock)]
    # The run saves the step that it went back to, too.
    assert steps == [2, 4, 2, 4]


def test_a_removed_checkpoint_is_skipped_and_never_replaced_by_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = train(tmp_path, 2, 4)
    removed = False

    def removing(config: RunConfig) -> Estimator:
        nonlocal removed
        if not removed:
            removed = True
            train(tmp_path, 6, checkpoints_max_to_keep=2)
        return made(config)

    with caplog.at_level(logging.WARNING):
        steps = [metrics["global_step"] for metrics in evaluate_checkpoints(removing, config, lambda: DATA)]
    assert steps == [4, 6]
    assert "model.ckpt-2 is skipped: it was removed" in caplog.text


def test_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    config = train(tmp_path, 2)
    for path in (tmp_path / "model.ckpt-2").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "log", ignore_errors=True)
    with pytest.raises(CorruptFileError):
        list(evaluate_checkpoints(made, config, lambda: DATA))


def test_a_run_without_a_folder_has_nothing_to_evaluate() -> None:
    with pytest.raises(InvalidArgumentError, match="there is no model_dir"):
        next(evaluate_checkpoints(made, RunConfig()))
