"""Danger: dense parameters that two workers train otherwise than one would: schedules ignored, optimizers forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler, StepLR

from cluster_threads import BATCH, Cluster, FeatureModel
from monolith.errors import CheckpointMismatchError
from monolith.ps import ServerConfig, ServerOptimizer
from monolith.train import RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook

SECONDS = 60

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


class RateZero(Hook):
    """A schedule as a hook: rate 1 for the first step, 0 for all others."""

    def before_step(self, trainer: Trainer) -> None:
        assert trainer.optimizer is not None
        for group in trainer.optimizer.param_groups:
            group["lr"] = 1.0 if trainer.step == 0 else 0.0


class Tell(Hook):
    """Sets an event with the first step."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._event.set()


class StartOther(Hook):
    """Starts worker 1 after the first step of worker 0, which goes on when the other has made a step, too."""

    def __init__(self, cluster: Cluster, batches: int) -> None:
        self._cluster, self._batches = cluster, batches

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == 1:
            begun = threading.Event()
            self.other = self._cluster.start("worker", 1, [BATCH] * self._batches, [RateZero(), Tell(begun)])
            assert begun.wait(SECONDS)


def alone(make: Make, hooks: list[Hook], batches: int) -> nn.Linear:
    torch.manual_seed(0)
    trainer = Trainer(model := FeatureModel(), make(model), hooks=hooks)
    trainer.fit([BATCH] * batches)
    return model.dense


def run(cluster: Cluster, batches: int, workers: int) -> list[Trainer]:
    cluster.servers()
    started = [cluster.start("worker", index, [BATCH] * batches) for index in range(workers)]
    for worker in started:
        worker.result(SECONDS)
    return [cluster.trainers[index] for index in range(workers)]


def test_a_schedule_that_a_hook_makes_acts_on_servers(tmp_path: Path) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    one = alone(sgd, [RateZero()], 8)
    cluster = Cluster(tmp_path, num_ps=2, num_workers=2, optimizer=sgd, start_timeout_secs=0.0)
    cluster.servers()
    turns = StartOther(cluster, 4)
    cluster.start("worker", 0, [BATCH] * 4, [RateZero(), turns]).result(SECONDS)
    turns.other.result(SECONDS)
    two = cluster.trainers[0].model.dense
    assert isinstance(cluster.trainers[0].optimizer, ServerOptimizer)
    assert torch.equal(two.bias, one.bias)
    assert torch.equal(two.weight, one.weight)


def test_a_scheduler_of_the_trainer_follows_the_steps_of_all_workers(tmp_path: Path) -> None:
    cluster = Cluster(
        tmp_path,
        num_ps=1,
        num_workers=2,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
        scheduler=lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    )
    for trainer in run(cluster, 5, 2):
        assert trainer.optimizer is not None
        # Ten steps in all, the last of which each learns of one step late.
        assert trainer.optimizer.param_groups[0]["lr"] <= 1 / 6


def folder(path: Path, *, num_workers: int, optimizer: Make = adam, **config: object) -> Cluster:
    """A run that saves in `path`, with discovery of its own."""
    settings = RunConfig.model_validate({"model_dir": str(path / "run"), "resume_data": False, **config})
    discovery = path / f"job-{len(list(path.glob('job-*')))}"
    discovery.mkdir(parents=True)
    return Cluster(
        discovery, num_ps=2, num_workers=num_workers, optimizer=optimizer, config=settings, model_dir=str(path / "run")
    )


def straight(batches: int) -> nn.Linear:
    return alone(adam, [], batches)


@pytest.mark.parametrize("then", [1, 2])
def test_a_run_of_one_worker_continues_with_any_number(tmp_path: Path, then: int) -> None:
    run(folder(tmp_path, num_workers=1), 3, 1)
    cluster = folder(tmp_path, num_workers=then)
    cluster.servers()
    workers = [cluster.start("worker", index, [BATCH] * (3 if index == 0 else 0)) for index in range(then)]
    for worker in workers:
        worker.result(SECONDS)
    assert cluster.trainers[0].step == 6
    # On servers the second step reads what the first has read.
    assert torch.allclose(cluster.trainers[0].model.dense.bias, straight(6).bias, atol=0.02)


def test_a_run_of_two_workers_continues_with_one(tmp_path: Path) -> None:
    first = run(folder(tmp_path, num_workers=2), 3, 2)[0]
    torch.manual_seed(0)
    model = FeatureModel()
    trainer = Trainer(model, adam(model), config=RunConfig(model_dir=str(tmp_path / "run")))
    trainer.restore(training=True)
    assert torch.equal(model.dense.bias, first.model.dense.bias)
    assert trainer.optimizer is not None
    assert trainer.optimizer.state[model.dense.bias]["step"].item() == 6


def test_another_rate_of_a_new_incarnation_takes_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(folder(tmp_path, num_workers=2), 2, 2)
    slower = folder(tmp_path, num_workers=2, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01))
    for trainer in run(slower, 2, 2):
        assert trainer.optimizer is not None
        assert trainer.optimizer.param_groups[0]["lr"] == 0.01
    assert "lr was declared as 0.1" in caplog.text


class Halve(Hook):
    """A schedule that the next incarnation of the job does not have: it must go on from where this has come."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        assert trainer.optimizer is not None
        trainer.optimizer.param_groups[0]["lr"] = 0.05


def test_a_rate_that_was_moved_continues_in_all_workers_of_a_new_incarnation(tmp_path: Path) -> None:
    cluster = folder(tmp_path, num_workers=2)
    cluster.servers()
    started = [cluster.start("worker", index, [BATCH] * 3, [Halve()]) for index in range(2)]
    for worker in started:
        worker.result(SECONDS)
    for trainer in run(folder(tmp_path, num_workers=2), 1, 2):
        assert trainer.optimizer is not None
        assert trainer.optimizer.param_groups[0]["lr"] == 0.05


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_schedule_that_a_hook_makes_acts_after_a_restore_too(tmp_path: Path) -> None:
    before = run(folder(tmp_path, num_workers=2, optimizer=sgd), 2, 2)[0].model.dense
    cluster = folder(tmp_path, num_workers=2, optimizer=sgd)
    cluster.servers()
    for worker in [cluster.start("worker", index, [BATCH] * 2, [RateZero()]) for index in range(2)]:
        worker.result(SECONDS)
    assert cluster.trainers[0].step == 8
    assert torch.equal(cluster.trainers[0].model.dense.bias, before.bias)


class Rates(Hook):
    """Notes the rate behind each step."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        assert trainer.optimizer is not None
        self.at[result.step] = trainer.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("rate", "scheduler", "wanted"),
    [
        (0.1, lambda o: ExponentialLR(o, 0.9), lambda step: 0.1 * 0.9**step),
        (1.0, lambda o: ExponentialLR(o, 0.5), lambda step: 0.5**step),
        (1.0, lambda o: StepLR(o, 3, gamma=0.5), lambda step: 0.5 ** (step // 3)),
    ],
)
def test_all_workers_have_one_rate_also_if_the_schedule_is_another_one_than_before(
    tmp_path: Path,
    rate: float,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler],
    wanted: Callable[[int], float],
) -> None:
    """The chief knows the schedule of the run before, the other workers do not."""
    first = folder(tmp_path, num_workers=2, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
    first._scheduler = lambda o: ExponentialLR(o, 0.9)
    run(first, 2, 2)
    again = folder(tmp_path, num_workers=2, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=rate))
    again._scheduler = scheduler
    again.servers()
    rates = [Rates(), Rates()]
    for worker in [again.start("worker", index, [BATCH] * 3, [rates[index]]) for index in range(2)]:
        worker.result(SECONDS)
    for one in rates:
        assert len(one.at) == 3
        assert one.at == pytest.approx({step: wanted(step) for step in one.at})


def test_another_class_ends_the_job_before_anything_changes(tmp_path: Path) -> None:
    run(folder(tmp_path, num_workers=2), 2, 2)
    cluster = folder(tmp_path, num_workers=2, optimizer=sgd)
    cluster.servers()
    with pytest.raises(CheckpointMismatchError, match=r"torch\.optim\.Adam.*torch\.optim\.SGD.*clear_nn"):
        cluster.start("worker", 0, [BATCH]).result(SECONDS)


def test_clear_nn_starts_the_dense_parameters_of_servers_again(tmp_path: Path) -> None:
    run(folder(tmp_path, num_workers=2), 4, 2)
    cluster = folder(tmp_path, num_workers=2, optimizer=sgd, clear_nn=True)
    cluster.servers()
    workers = [cluster.start("worker", index, []) for index in range(2)]
    for worker in workers:
        worker.result(SECONDS)
    torch.manual_seed(0)
    fresh = FeatureModel().dense
    assert torch.equal(cluster.trainers[1].model.dense.bias, fresh.bias)


@pytest.mark.parametrize("workers", [0, 2])
def test_warm_start_gives_servers_the_weights_of_another_run(tmp_path: Path, workers: int) -> None:
    """Also if that was trained by another optimizer, without servers or on some."""
    old = tmp_path / "old" / "run"
    if workers:
        model = run(folder(tmp_path / "old", num_workers=workers), 3, workers)[0].model
    else:
        torch.manual_seed(0)
        model = FeatureModel()
        Trainer(model, adam(model), config=RunConfig(model_dir=str(old))).fit([BATCH] * 3)
    cluster = folder(tmp_path / "new", num_workers=2, optimizer=sgd, warm_start_from=str(old))
    cluster.settings["server"] = ServerConfig(restore_roots=(str(old),))
    cluster.servers()
    for worker in [cluster.start("worker", index, []) for index in range(2)]:
        worker.result(SECONDS)
    assert torch.equal(cluster.trainers[1].model.dense.bias, model.dense.bias)  # type: ignore[union-attr]
