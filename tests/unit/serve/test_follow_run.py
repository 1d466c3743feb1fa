"""Danger: a replica that answers with rows or weights which the run had long ago, or never."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from followed_run import HEADS, PROBE, Run, equal, exported
from followed_tables import until
from monolith.cli import main
from monolith.follow.run_service import run_identity
from monolith.serve import export_model, load
from monolith.serve.follow import RunWriters, TrainingFollower
from monolith.serve.manifest import RunOrigin


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path / "run").start()
    try:
        yield one
    finally:
        one.finish()


def test_predictions_are_those_of_the_training_model(run: Run, tmp_path: Path) -> None:
    run.steps(2)
    predictor = exported(run, tmp_path / "export")
    follower = TrainingFollower(predictor, [RunWriters(str(run.folder)).writer()])
    try:
        assert follower.wait_until_read(60)
        for count in (1, 5, 10):
            run.steps(count)
            until(lambda: equal(predictor, run))
        until(lambda: follower.lag().step == run.estimator.trainer.step)
        lag = follower.lag()
        assert lag.connected
        assert lag.sequence > 0
        assert list(lag.positions) == [f"run {run.folder}"]
    finally:
        follower.close()


def test_the_last_changes_of_a_run_are_read_before_it_ends(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", batches=20).start()
    try:
        run.steps(1)
        predictor = exported(run, tmp_path / "export")
        follower = TrainingFollower(predictor, [RunWriters(str(run.folder)).writer()])
        assert follower.wait_until_read(60)
        run.finish()
        assert equal(predictor, run)
        follower.close()
    finally:
        run.finish()


def test_a_run_that_is_started_again_is_followed(tmp_path: Path) -> None:
    first = Run(tmp_path / "run", batches=30).start()
    first.steps(3)
    predictor = exported(first, tmp_path / "export")
    follower = TrainingFollower(predictor, [RunWriters(str(first.folder)).writer()])
    try:
        assert follower.wait_until_read(60)
        first.steps(10)
        first.estimator.trainer.request_stop("the test says so")
        first.finish()
        second = Run(tmp_path / "run", batches=30).start()
        try:
            second.steps(5)
            until(lambda: equal(predictor, second))
            (progress,) = follower._follower.progress.values()
            # It published from its first step, so no row had to be read that had not changed.
            assert (progress.resyncs, progress.rewinds) in ((1, 1), (2, 0))
        finally:
            second.finish()
    finally:
        follower.close()
        first.finish()


@pytest.mark.parametrize("purge", [False, True])
def test_an_id_that_is_forgotten_while_the_run_has_ended_leaves_a_live_replica(tmp_path: Path, purge: bool) -> None:
    first = Run(tmp_path / "run", batches=30).start()
    first.steps(3)
    predictor = exported(first, tmp_path / "export")
    follower = TrainingFollower(predictor, [RunWriters(str(first.folder)).writer()])
    try:
        assert follower.wait_until_read(60)
        first.steps(10)
        first.estimator.trainer.request_stop("the test says so")
        first.finish()
        (copy,) = (store.tables["user_id"] for store in predictor.stores.values())
        forgotten = next(iter(copy))
        assert (
            main(
                [
                    "forget",
                    str(first.folder),
                    "--table",
                    "user_id",
                    "--offline",
                    *["--purge"] * purge,
                    "--",
                    str(forgotten),
                ]
            )
            == 0
        )
        # Nobody can tell the replica while no run goes on.
        assert forgotten in copy
        second = Run(tmp_path / "run", batches=30).start()
        try:
            # Before a step, which may bring the id back: it is in the data.
            until(lambda: forgotten not in copy, "the removal")
            second.steps(5)
            until(lambda: equal(predictor, second))
        finally:
            second.finish()
    finally:
        follower.close()
        first.finish()


def test_nothing_is_published_while_nobody_follows(run: Run) -> None:
    run.steps(3)
    assert not (run.folder / "followed").exists()


def test_an_export_names_its_run_and_another_run_is_not_followed(run: Run, tmp_path: Path) -> None:
    run.steps(3)
    run.estimator._example = PROBE
    folder = run.estimator.trainer.model_dir
    assert folder is not None
    origin = RunOrigin(identity=run_identity(folder.path), model_dir=folder.path)
    own = load(export_model(run.model, PROBE, tmp_path / "own", heads=HEADS, run=origin))
    foreign = origin.model_copy(update={"identity": "f" * 32})
    other = load(export_model(run.model, PROBE, tmp_path / "other", heads=HEADS, run=foreign))
    follower = TrainingFollower.of_run(own, RunWriters(str(run.folder)))
    assert follower.wait_until_read(60)
    follower.close()
    refused = TrainingFollower.of_run(other, RunWriters(str(run.folder)))
    try:
        (progress,) = refused._follower.progress.values()
        until(lambda: bool(progress.error))
        assert "export it again" in progress.error
        assert progress.rows == 0
    finally:
        refused.close()


def test_the_command_refuses_a_run_that_the_export_is_not_from(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.steps(1)
    own = run_identity(str(run.folder))
    foreign = RunOrigin(identity="f" * 32, model_dir="runs/elsewhere")
    path = export_model(run.model, PROBE, tmp_path / "other", heads=HEADS, run=foreign)
    # Nothing is served: with the rows of another run the answers would be wrong, and waiting would not help.
    assert main(["serve", str(path), "--run", str(run.folder), "--http-port", "0", "--grpc-port", "0"]) == 2
    error = capsys.readouterr().err
    assert f"has run {own}" in error
    assert "in runs/elsewhere; follow that" in error
