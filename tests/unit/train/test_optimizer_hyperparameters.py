"""Danger: a run that is started again with another learning rate and trains on with the old one, or forgets its schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.optimizer import ParamsT

from monolith.errors import CheckpointMismatchError, InvalidArgumentError
from monolith.nn import dense_state_dict
from monolith.optim import LinearWarmup, RMSprop, Shampoo, lr_scheduler
from monolith.train import Estimator, ModelCheckpoints, RunConfig, Trainer
from training import ClickModel, Stream

Make = Callable[..., torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
EARLY = {"warmup": 1, "tau_1": 2, "eigen_tail": 0}


def loop(
    folder: Path,
    optimizer_of: Make,
    *,
    steps: int,
    scheduler_of: MakeScheduler | None = None,
    keep_scheduler: bool = True,
) -> tuple[torch.optim.Optimizer, list[float], nn.Module]:
    """A plain loop over `folder`: the optimizer, the rate of each step, and the model."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    optimizer = optimizer_of(model.parameters())
    scheduler = None if scheduler_of is None else scheduler_of(optimizer)
    kept = scheduler if keep_scheduler else None
    checkpoints = ModelCheckpoints(folder, model, optimizer, scheduler=kept)
    start, rates = checkpoints.restore(), []
    for step in range(start, start + steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        model(torch.tensor([[1.0, step]])).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    checkpoints.save(start + steps)
    return optimizer, rates, model


@pytest.mark.parametrize(
    ("optimizer_of", "was", "now"),
    [
        (torch.optim.SGD, {"lr": 0.5}, {"lr": 0.1}),
        (torch.optim.AdamW, {"weight_decay": 0.5}, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"betas": (0.9, 0.99)}, {"betas": (0.8, 0.99)}),
        (torch.optim.Adam, {"amsgrad": False}, {"amsgrad": True}),
        (torch.optim.RMSprop, {"momentum": 0.0, "centered": False}, {"momentum": 0.9, "centered": True}),
        (RMSprop, {"use_v2": False}, {"use_v2": True}),
        (Shampoo, {"eigen_head": 1, **EARLY}, {"eigen_head": 2, **EARLY}),
    ],
)
def test_the_code_wins_and_the_change_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optimizer_of: Make, was: dict[str, Any], now: dict[str, Any]
) -> None:
    loop(tmp_path, lambda p: optimizer_of(p, **was), steps=4)
    optimizer, _, model = loop(tmp_path, lambda p: optimizer_of(p, **now), steps=4)
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in now} == now
    for key in now:
        if was.get(key, now[key]) != now[key]:
            text = f"optimizer: {key} was declared as {was[key]!r}, the code now says {now[key]!r}: the code's value is used"
            assert text in caplog.text
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_rate_that_was_set_before_the_run_is_the_codes(tmp_path: Path) -> None:
    def run(rate: float) -> torch.optim.SGD:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        checkpoints = ModelCheckpoints(tmp_path, model, optimizer)
        optimizer.param_groups[0]["lr"] = rate
        checkpoints.restore()
        checkpoints.save(1)
        return optimizer

    run(0.3)
    assert run(0.2).param_groups[0]["lr"] == 0.2


def test_a_rate_that_the_loop_moved_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> torch.optim.SGD:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        checkpoints = ModelCheckpoints(tmp_path, model, optimizer)
        checkpoints.restore()
        optimizer.param_groups[0]["lr"] *= 0.5
        checkpoints.save(1)
        return optimizer

    run()
    with caplog.at_level(logging.INFO):
        assert run().param_groups[0]["lr"] == 0.125
    assert run().param_groups[0]["lr"] == 0.0625
    assert "optimizer: lr continues at 0.25, declared as 0.5" in caplog.text


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, total_iters=3), ExponentialLR(optimizer, 0.5)]
    return SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS: list[MakeScheduler] = [
    lambda o: StepLR(o, 2, gamma=0.5),
    lambda o: MultiStepLR(o, [1, 5], gamma=0.5),
    lambda o: ExponentialLR(o, 0.9),
    lambda o: CosineAnnealingLR(o, T_max=8),
    lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: lr_scheduler(o, LinearWarmup(learning_rate=0.5, warmup_steps=6)),
    lambda o: OneCycleLR(o, max_lr=0.5, total_steps=12),
    sequence,
]


@pytest.mark.parametrize("scheduler_of", SCHEDULERS)
def test_a_scheduler_of_torch_continues_in_a_plain_loop(tmp_path: Path, scheduler_of: MakeScheduler) -> None:
    def sgd(parameters: ParamsT) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    _, whole, _ = loop(tmp_path / "whole", sgd, steps=8, scheduler_of=scheduler_of)
    _, first, _ = loop(tmp_path / "parts", sgd, steps=3, scheduler_of=scheduler_of)
    _, second, _ = loop(tmp_path / "parts", sgd, steps=5, scheduler_of=scheduler_of)
    assert first + second == pytest.approx(whole)


def test_a_rate_continues_also_if_only_the_optimizer_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def sgd(parameters: ParamsT) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    kwargs: dict[str, Any] = {"scheduler_of": lambda o: ExponentialLR(o, 0.5), "keep_scheduler": False}
    _, whole, _ = loop(tmp_path / "whole", sgd, steps=6, **kwargs)
    _, first, _ = loop(tmp_path / "parts", sgd, steps=3, **kwargs)
    _, second, _ = loop(tmp_path / "parts", sgd, steps=3, **kwargs)
    assert first + second == whole
    assert "a scheduler that is not saved with it" in caplog.text


def test_a_scheduler_made_after_the_restore_finds_the_declared_rate(tmp_path: Path) -> None:
    def run(steps: int) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        checkpoints = ModelCheckpoints(tmp_path, model, optimizer)
        start, rates = checkpoints.restore(), []
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step), last_epoch=start - 1)
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        checkpoints.save(start + steps)
        return rates

    assert run(2) + run(2) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_the_schedule_is_the_codes_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def sgd(parameters: ParamsT) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    loop(tmp_path, sgd, steps=3, scheduler_of=lambda o: ExponentialLR(o, 0.5))
    _, rates, _ = loop(tmp_path, sgd, steps=2, scheduler_of=lambda o: ExponentialLR(o, 0.1))
    assert rates == pytest.approx([0.125, 0.0125])
    assert "scheduler: gamma was declared as 0.5, the code now says 0.1" in caplog.text
    _, rates, _ = loop(tmp_path, sgd, steps=2, scheduler_of=lambda o: StepLR(o, 100))
    assert "scheduler: was torch.optim.ExponentialLR, the code now has torch.optim.StepLR" in caplog.text


def test_a_function_of_the_step_acts_from_the_first_step_on(tmp_path: Path) -> None:
    def run(top: float) -> list[float]:
        schedule = LinearWarmup(learning_rate=top, warmup_steps=4)
        return loop(
            tmp_path, lambda p: torch.optim.SGD(p, lr=1.0), steps=2, scheduler_of=lambda o: lr_scheduler(o, schedule)
        )[1]

    assert run(0.4) == pytest.approx([0.0, 0.1])
    assert run(0.8) == pytest.approx([0.4, 0.6])


def trainer(folder: Path, optimizer_of: Make, scheduler_of: MakeScheduler | None = None, **config: object) -> Trainer:
    model = ClickModel()
    optimizer = optimizer_of(model.parameters())
    scheduler = None if scheduler_of is None else scheduler_of(optimizer)
    return Trainer(
        model, optimizer, scheduler=scheduler, config=RunConfig.model_validate({"model_dir": str(folder), **config})
    )


def test_a_trainer_brings_its_scheduler_to_the_global_step(tmp_path: Path) -> None:
    def make() -> Trainer:
        return trainer(tmp_path, lambda p: torch.optim.SGD(p, lr=1.0), lambda o: ExponentialLR(o, 0.5))

    first = make()
    first.fit(Stream(), steps=3)
    assert first.optimizer is not None
    assert first.optimizer.param_groups[0]["lr"] == 0.125
    second = make()
    second.fit(Stream(), steps=2)
    assert second.optimizer is not None
    assert second.optimizer.param_groups[0]["lr"] == 0.03125


def test_groups_stay_those_that_a_script_has_at_hand(tmp_path: Path) -> None:
    """A loop that keeps a group, to set its rate, must not set that of a copy which nobody uses any more."""
    momentum: Make = lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)  # noqa: E731 - as a factory
    loop(tmp_path, momentum, steps=2)
    model = nn.Linear(2, 3)
    optimizer = momentum(model.parameters())
    groups, (group,) = optimizer.param_groups, optimizer.param_groups
    assert ModelCheckpoints(tmp_path, model, optimizer).restore() == 2
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group
    assert optimizer.state[model.weight]["momentum_buffer"].shape == (3, 2)


def test_a_model_may_configure_a_scheduler_for_its_estimator() -> None:
    class Scheduled(ClickModel):
        def configure_optimizer(self) -> tuple[torch.optim.Optimizer, LRScheduler]:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return optimizer, ExponentialLR(optimizer, 0.5)

    estimator = Estimator(Scheduled())
    estimator.train(Stream(), steps=2)
    assert estimator.trainer.optimizer is not None
    assert estimator.trainer.optimizer.param_groups[0]["lr"] == 0.25


def test_a_trainer_refuses_a_scheduler_that_needs_a_metric(tmp_path: Path) -> None:
    made = trainer(tmp_path, lambda p: torch.optim.SGD(p, lr=1.0), ReduceLROnPlateau)
    with pytest.raises(InvalidArgumentError, match="ReduceLROnPlateau needs a metric"):
        made.fit(Stream(), steps=1)


def test_another_class_of_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    trainer(tmp_path, lambda p: torch.optim.SGD(p, lr=0.1)).fit(Stream(), steps=2)
    other = trainer(tmp_path, torch.optim.Adam)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(
            CheckpointMismatchError, match=r"torch\.optim\.SGD.*torch\.optim\.Adam.*clear_nn=True.*warm_start_from"
        ):
            other.fit(Stream(), steps=1)
    assert other.step == 0
    assert other.table_stats()["user"].rows == 0
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())


def test_clear_nn_leads_to_another_optimizer(tmp_path: Path) -> None:
    trainer(tmp_path, lambda p: torch.optim.SGD(p, lr=0.1)).fit(Stream(), steps=2)
    other = trainer(tmp_path, torch.optim.Adam, clear_nn=True)
    assert other.fit(Stream(), steps=1) == 1
    assert other.table_stats()["user"].rows > 0
    assert trainer(tmp_path, torch.optim.Adam, clear_nn=True).fit(Stream(), steps=1) == 2


def test_warm_start_from_leads_to_another_optimizer(tmp_path: Path) -> None:
    first = trainer(tmp_path / "old", lambda p: torch.optim.SGD(p, lr=0.1))
    first.fit(Stream(), steps=2)
    other = trainer(tmp_path / "new", torch.optim.Adam, warm_start_from=str(tmp_path / "old"))
    other.restore(training=True)
    assert all(
        torch.equal(value, dense_state_dict(first.model)[name]) for name, value in other.model.named_parameters()
    )
    assert other.fit(Stream(), steps=1) == 1


def test_a_subclass_is_another_optimizer(tmp_path: Path) -> None:
    class Mine(torch.optim.SGD):
        pass

    loop(tmp_path, lambda p: torch.optim.SGD(p, lr=0.1), steps=1)
    with pytest.raises(CheckpointMismatchError, match="Mine"):
        loop(tmp_path, lambda p: Mine(p, lr=0.1), steps=1)
