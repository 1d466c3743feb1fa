"""Danger: a bad model cannot be taken back, comes back after a restart, or a rollback that fails leaves a mix of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_follow_run import PROBE, Run, exported

from followed_tables import until
from monolith.errors import InvalidArgumentError
from monolith.serve.follow import RunWriters, TrainingFollower
from monolith.serve.predictor import Predictor
from monolith.state.restore_points import restore_points


def answers(predictor: Predictor) -> list[float]:
    return predictor.predict(PROBE)["click"].tolist()


def close(one: list[float], other: list[float]) -> bool:
    return bool(torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-6, rtol=0))


def test_going_back_staying_there_and_following_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run").start()
    held_file = tmp_path / "held"
    try:
        run.steps(5)
        predictor = exported(run, tmp_path / "export")
        writers = RunWriters(str(run.folder))
        follower = TrainingFollower.of_run(predictor, writers, held_file=held_file)
        assert follower.wait_until_read(60)
        seen = {}
        for _ in range(10):
            run.steps(1)
            seen[run.estimator.trainer.step] = run.predictions()
        # Entries of the log are written in the background, not for every step.
        until(lambda: any(point.step in seen for point in restore_points(run.folder)))
        good_step = max(point.step for point in restore_points(run.folder) if point.step in seen)
        good = seen[good_step]
        run.steps(10)
        until(lambda: close(answers(predictor), run.predictions()))
        said = follower.rollback_to(f"step={good_step}")
        assert f"step {good_step}" in said
        assert close(answers(predictor), good)
        assert follower.lag().held == f"step={good_step}"
        run.steps(3)
        assert close(answers(predictor), good)
        follower.close()
        # A new process of the replica stays there.
        again = exported(run, tmp_path / "export-2")
        follower = TrainingFollower.of_run(again, writers, held_file=held_file)
        assert close(answers(again), good)
        with pytest.raises(InvalidArgumentError, match="beyond"):
            follower.rollback_to("step=100000")
        assert close(answers(again), good)
        follower.rollback_to("now")
        until(lambda: close(answers(again), run.predictions()))
        assert not held_file.exists()
        follower.close()
    finally:
        run.finish()
