"""Danger: a replica that answers with rows or weights which the run had long ago, or never."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from followed_tables import until
from monolith import Estimator, Feature, RunConfig
from monolith.cli import main
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.follow.run_service import run_identity
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head
from monolith.serve import Predictor, export_model, load
from monolith.serve.follow import RunWriters, TrainingFollower
from monolith.serve.manifest import RunOrigin
from monolith.train.hooks.hook import Hook

PROBE = {"user_id": torch.arange(50), "item_id": torch.arange(50)}


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection([Feature(name="user_id", dim=4), Feature(name="item_id", dim=4)])
        self.norm = nn.BatchNorm1d(8)
        self.dense = nn.Linear(8, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = self.embeddings(batch)
        return self.dense(self.norm(torch.cat([rows["user_id"], rows["item_id"]], dim=1))).squeeze(1)


class Gate(Hook):
    """Lets the run make steps when the test says so."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.made = 0

    def before_step(self, trainer: object) -> None:
        assert self.allowed.acquire(timeout=60)

    def after_step(self, trainer: object, result: object) -> None:
        self.made += 1


class Run:
    """A run in a thread, made step by step."""

    def __init__(self, folder: Path, batches: int = 60) -> None:
        torch.manual_seed(0)
        self.folder, self.gate, self.total = folder, Gate(), batches
        config = RunConfig(model_dir=str(folder), feed_secs=0.01, feed_dense_secs=0.01, log_flush_secs=0.01)
        self.model = Clicks()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.estimator = Estimator(self.model, config, optimizer=optimizer, heads=[Head(name="click", label="label")])
        data = ClickStream(ClickStreamConfig(users=50, items=50, batches=batches, batch_size=64))
        self.thread = threading.Thread(target=lambda: self.estimator.train(data, hooks=[self.gate]))

    def start(self) -> Run:
        self.thread.start()
        return self

    def steps(self, count: int) -> None:
        wanted = self.gate.made + count
        for _ in range(count):
            self.gate.allowed.release()
        until(lambda: self.gate.made == wanted)

    def finish(self) -> None:
        for _ in range(self.total + 1):
            self.gate.allowed.release()
        self.thread.join(60)

    def predictions(self) -> list[float]:
        self.model.eval()
        with torch.no_grad():
            found = torch.sigmoid(self.model(PROBE))
        self.model.train()
        return found.tolist()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path / "run").start()
    try:
        yield one
    finally:
        one.finish()


def exported(run: Run, folder: Path) -> Predictor:
    return load(export_model(run.model, PROBE, folder, heads=[Head(name="click", label="label")]))


def equal(predictor: Predictor, run: Run) -> bool:
    found = predictor.predict(PROBE)["click"]
    return bool(torch.allclose(found, torch.tensor(run.predictions()), atol=1e-6, rtol=0))


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
    heads = [Head(name="click", label="label")]
    own = load(export_model(run.model, PROBE, tmp_path / "own", heads=heads, run=origin))
    foreign = origin.model_copy(update={"identity": "f" * 32})
    other = load(export_model(run.model, PROBE, tmp_path / "other", heads=heads, run=foreign))
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
