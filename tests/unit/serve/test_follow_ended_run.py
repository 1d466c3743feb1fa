"""Danger: a replica that cannot hear its run while it ends answers with old rows for ever; or it takes saved state that is older
than what it has, or of another run; or it may lack changes, and nobody is told."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from test_follow_run import PROBE, Run, equal, exported

from followed_run import HEADS
from followed_tables import Cable, Copies, FeedProcess, rows_of, table, train, until, writer_at
from monolith.cli import main
from monolith.errors import UnavailableError
from monolith.follow.run_service import ADDRESS_FILE, run_identity
from monolith.serve import Predictor, export_model, load
from monolith.serve.follow import RunFollower, RunWriters, TrainingFollower
from monolith.serve.manifest import RunOrigin
from monolith.state.restore_points import find_restore_point

NEVER = 3600.0
NOWHERE = "127.0.0.1:1"
"""The address of a run that was killed: nobody listens there."""


@contextmanager
def followed(
    run: Run, predictor: Predictor, *, model_dir: Path | None = None, silent_secs: float = NEVER
) -> Iterator[tuple[TrainingFollower, Cable]]:
    cable, writer = Cable(), RunWriters(str(run.folder)).writer()
    folder = str(model_dir or run.folder)
    follower = TrainingFollower(predictor, [cable.through(writer)], model_dir=folder, silent_secs=silent_secs)
    try:
        assert follower.wait_until_read(240)
        yield follower, cable
    finally:
        follower.close()


def cut(follower: TrainingFollower, cable: Cable) -> None:
    cable.cut.set()
    until(lambda: not follower.lag().connected, "the cut")


def same_rows(predictor: Predictor, run: Run) -> bool:
    (store,) = predictor.stores.values()
    trained = run.estimator.trainer.tables()
    return all(rows_of(store.tables[name]) == rows_of(shards[0]) for name, shards in trained.items())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path / "run", batches=30).start()
    try:
        yield one
    finally:
        one.finish()


def test_a_replica_that_is_cut_off_while_a_run_ends_has_its_last_changes(run: Run, tmp_path: Path) -> None:
    run.steps(3)
    predictor = exported(run, tmp_path / "export")
    with followed(run, predictor, silent_secs=0.05) as (follower, cable):
        cut(follower, cable)
        run.steps(20)
        run.finish()
        until(lambda: equal(predictor, run) and same_rows(predictor, run), "the last changes")
        lag = follower.lag()
        assert (lag.step, lag.connected, lag.missing) == (run.estimator.trainer.step, False, "")


def test_a_replica_that_starts_after_the_end_of_its_run_has_everything(run: Run, tmp_path: Path) -> None:
    run.steps(3)
    predictor = exported(run, tmp_path / "export")
    run.steps(20)
    run.finish()
    writers = RunWriters(str(run.folder))
    follower = TrainingFollower.of_run(predictor, writers, silent_secs=0.05)
    try:
        until(lambda: equal(predictor, run) and same_rows(predictor, run), "the last changes")
    finally:
        follower.close()


def test_a_replica_that_has_read_half_of_the_rows_when_the_run_ends_has_all_of_them(run: Run, tmp_path: Path) -> None:
    run.steps(3)
    predictor = exported(run, tmp_path / "export")
    cable, writer = Cable(reads=1), RunWriters(str(run.folder)).writer()  # one table of two
    follower = TrainingFollower(predictor, [cable.through(writer)], model_dir=str(run.folder), silent_secs=0.05)
    try:
        until(cable.cut.is_set, "the cut")
        run.steps(20)
        run.finish()
        until(lambda: equal(predictor, run) and same_rows(predictor, run), "the last changes")
    finally:
        follower.close()


def older_copy(run: Run, folder: Path) -> tuple[Path, list[float]]:
    """End the run and copy its model_dir. Returns the copy and what the run predicts."""
    run.estimator.trainer.request_stop("the test says so")
    run.finish()
    shutil.copytree(run.folder, folder)
    return folder, run.predictions()


@pytest.mark.parametrize("ended", [False, True], ids=["killed", "ended"])
def test_older_saved_state_is_taken_only_if_the_run_has_ended_with_it(run: Run, tmp_path: Path, ended: bool) -> None:
    run.steps(3)
    older, predicted = older_copy(run, tmp_path / "older")
    second = Run(run.folder, batches=30).start()
    try:
        second.steps(10)
        predictor = exported(second, tmp_path / "export")
        with followed(second, predictor, model_dir=older) as (follower, cable):
            until(lambda: equal(predictor, second))
            cut(follower, cable)
            if not ended:
                (older / ADDRESS_FILE).write_text(NOWHERE)
            point = follower.catch_up()
            found = predictor.predict(PROBE)["click"].numpy()
            if ended:  # an operator has restored the run to the past
                assert point is not None
                assert point.step == follower.lag().step == find_restore_point(older).step
                assert np.allclose(found, predicted, atol=1e-6, rtol=0)
            else:
                assert point is None
                assert equal(predictor, second)
                assert follower.lag().step == second.estimator.trainer.step
            assert follower.catch_up() is None, "it is taken once"
            # The run answers again: nothing of what was taken is left.
            cable.cut.clear()
            second.steps(3)
            until(lambda: equal(predictor, second) and same_rows(predictor, second))
    finally:
        second.finish()


def test_newer_saved_state_of_a_run_that_was_killed_is_taken(run: Run, tmp_path: Path) -> None:
    run.steps(3)
    predictor = exported(run, tmp_path / "export")
    with followed(run, predictor) as (follower, cable):
        cut(follower, cable)
        run.steps(20)
        run.finish()
        (run.folder / ADDRESS_FILE).write_text(NOWHERE)
        point = follower.catch_up()
        assert point is not None
        assert point.step == run.estimator.trainer.step
        assert equal(predictor, run)
        assert same_rows(predictor, run)
        (run.folder / ADDRESS_FILE).unlink()


def test_an_id_that_is_forgotten_after_the_run_has_ended_leaves_a_live_replica(run: Run, tmp_path: Path) -> None:
    run.steps(3)
    predictor = exported(run, tmp_path / "export")
    with followed(run, predictor, silent_secs=0.05) as (follower, _):
        run.finish()
        (copy,) = (store.tables["user_id"] for store in predictor.stores.values())
        forgotten = next(iter(copy))
        command = ["forget", str(run.folder), "--table", "user_id", "--offline", "--", str(forgotten)]
        assert main(command) == 0
        until(lambda: forgotten not in copy, "the removal")
        assert not follower.lag().missing


def test_following_again_after_a_rollback_finds_a_run_that_has_ended_meanwhile(run: Run, tmp_path: Path) -> None:
    run.steps(10)
    predictor = exported(run, tmp_path / "export")
    with followed(run, predictor, silent_secs=0.05) as (follower, _):
        saved = find_restore_point(run.folder).step
        follower.rollback_to(f"step={saved}")
        run.steps(5)
        run.finish()
        until(lambda: not (run.folder / ADDRESS_FILE).exists())
        assert follower.lag().step == saved
        follower.rollback_to("now")
        until(lambda: equal(predictor, run) and same_rows(predictor, run), "the last changes")


def test_a_rollback_that_fails_leaves_the_run_followed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.steps(10)
    predictor = exported(run, tmp_path / "export")
    with followed(run, predictor) as (follower, _):
        saved = find_restore_point(run.folder).step
        with monkeypatch.context() as broken:

            def fail(*values: object) -> None:
                raise UnavailableError("the disk is gone")

            broken.setattr("monolith.serve.follow._ServedModel.set_weights", fail)
            with pytest.raises(UnavailableError, match="the disk is gone"):
                follower.rollback_to(f"step={saved}")
        assert not follower.lag().held
        run.steps(3)
        until(lambda: equal(predictor, run) and same_rows(predictor, run), "the run to be followed")


def test_saved_state_of_another_run_is_refused_and_said(run: Run, tmp_path: Path) -> None:
    run.steps(3)
    run.estimator._example = PROBE
    other = RunOrigin(identity="f" * 32, model_dir=str(run.folder))
    predictor = load(export_model(run.model, PROBE, tmp_path / "other", heads=HEADS, run=other))
    before = predictor.predict(PROBE)["click"].clone()
    run.steps(20)
    identity = run_identity(str(run.folder))
    run.finish()
    follower = TrainingFollower.of_run(predictor, RunWriters(str(run.folder)), silent_secs=NEVER)
    try:
        assert follower.catch_up() is None
        assert f"has run {identity}, and the model was exported from run {other.identity}" in follower.lag().missing
        assert predictor.predict(PROBE)["click"].equal(before)
    finally:
        follower.close()


def test_changes_that_may_be_missing_are_said_until_the_run_answers(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.steps(3)
    predictor = exported(run, tmp_path / "export")
    elsewhere = tmp_path / "not-mounted"
    with followed(run, predictor, model_dir=elsewhere, silent_secs=0.05) as (follower, cable):
        assert not follower.lag().missing
        with caplog.at_level(logging.WARNING):
            cut(follower, cable)
            until(lambda: bool(follower.lag().missing))
        assert f"{elsewhere}: there is no such folder here" in follower.lag().missing
        assert f"run {run.folder}" in follower.lag().missing
        assert sum("the last changes of the run may be missing" in line for line in caplog.messages) == 1
        cable.cut.clear()
        run.steps(3)
        until(lambda: not follower.lag().missing)


def test_a_replica_that_knows_no_model_dir_says_that_changes_may_be_missing() -> None:
    one, copies = table(), Copies()
    train(one, range(50))
    process = FeedProcess({"item": one})
    follower = RunFollower(copies, [writer_at(process.address, "server 0")], silent_secs=0.05)
    try:
        assert follower.wait_until_read(240)
        process.close()
        until(lambda: "start the replica with --run" in follower.lag().missing)
        assert copies.rows() == rows_of(one)
    finally:
        follower.close()
        process.close()


def test_writers_that_answer_keep_their_rows_and_send_their_weights_again(run: Run) -> None:
    run.steps(3)
    run.finish()
    one, copies, bias = table("user_id"), Copies("user_id"), np.array([7.0], np.float32)
    train(one, range(50))
    process = FeedProcess({"user_id": one}, dense=lambda: {"dense.bias": bias})
    chief, server = RunWriters(str(run.folder)).writer(), writer_at(process.address, "server")
    follower = RunFollower(copies, [chief, server], model_dir=str(run.folder), silent_secs=NEVER)
    try:
        until(lambda: bool(copies.weights) and not follower.wait_until_read(0.0) and copies.rows("user_id") != {})
        until(lambda: follower.describe()["server"]["connected"] is True)
        point = follower.catch_up()
        assert point is not None
        assert copies.rows("user_id") == rows_of(one)
        assert copies.weights[1]["dense.bias"].tolist() == run.model.dense.bias.tolist()
        until(lambda: len(copies.weights) == 3, "the weights of the server")
        assert copies.weights[2]["dense.bias"].tolist() == bias.tolist()
    finally:
        follower.close()
        process.close()
