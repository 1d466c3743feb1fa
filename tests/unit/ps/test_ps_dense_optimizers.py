"""Danger: dense parameters that several workers train by another rule, or at another rate, than the script says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from monolith.errors import CheckpointMismatchError, ConfigError, InvalidArgumentError
from monolith.optim import Adamom, RMSprop, Shampoo
from monolith.ps import (
    CachedParameters,
    DenseOptimizer,
    ParameterServer,
    ServerOptimizer,
    ServerParameters,
    ServerStore,
)
from monolith.ps.protocol.dense_optimizers import _CLASSES, group_optimizers, make_optimizer

SGD = torch.optim.SGD


@pytest.fixture
def store() -> Iterator[ServerStore]:
    """One worker of two servers."""
    with ParameterServer() as one, ParameterServer() as two, ServerStore([one.address, two.address]) as made:
        yield made
        gc.collect()


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]

OPTIMIZERS: list[Make] = [
    lambda p: SGD(p, lr=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    lambda p: torch.optim.Adagrad(p, lr=0.2, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-3),
    lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.6), eps=1e-2, weight_decay=0.2, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.01),
    lambda p: torch.optim.Adamax(p),
    lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    lambda p: torch.optim.RAdam(p),
    lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    lambda p: torch.optim.Rprop(p),
    lambda p: torch.optim.ASGD(p),
    lambda p: torch.optim.Adadelta(p),
    lambda p: torch.optim.Adafactor(p),
    lambda p: Adamom(p, lr=0.1, weight_decay=0.1),
    lambda p: RMSprop(p, lr=0.1, use_v2=True),
    lambda p: RMSprop(p, lr=0.1),
    lambda p: Shampoo(p, lr=0.1, warmup=1, tau_1=2, tau_2=1),
]


def train_both(store: ServerStore, make: Make, scheduler_of: MakeScheduler | None = None, steps: int = 6) -> None:
    """Train one model here and one on servers, and compare them after every step."""
    torch.manual_seed(0)
    mine, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(mine.state_dict())
    local, remote = make(theirs.parameters()), make(mine.parameters())
    schedulers = [] if scheduler_of is None else [scheduler_of(local), scheduler_of(remote)]
    cached = CachedParameters(mine, store, remote)
    on_servers = ServerOptimizer(cached)
    for _ in range(steps):
        inputs = torch.randn(4, 3)
        for model in (mine, theirs):
            model.zero_grad()
            model(inputs).square().sum().backward()
        local.step()
        on_servers.step()
        for scheduler in schedulers:
            scheduler.step()
        cached.fetch()
        cached.assign()
        assert torch.equal(mine.weight, theirs.weight)
        assert torch.equal(mine.bias, theirs.bias)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_servers_make_the_steps_of_a_local_optimizer(store: ServerStore, make: Make) -> None:
    train_both(store, make)


def test_a_rate_may_be_a_number_of_numpy_or_a_tensor(store: ServerStore) -> None:
    model = nn.Linear(1, 1, bias=False)
    local = SGD(model.parameters(), lr=torch.tensor(1.0))
    cached = CachedParameters(model, store, local)
    for rate in (np.float32(0.5), torch.tensor(0.25)):
        local.param_groups[0]["lr"] = rate
        model.weight.grad = torch.ones(1, 1)
        ServerOptimizer(cached).step()
        assert cached.origin.settings()["weight"].current.settings["lr"] == float(rate)


def test_muon_trains_matrices(store: ServerStore) -> None:
    mine, theirs = (nn.Linear(3, 2, bias=False) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    local = torch.optim.Muon(theirs.parameters())
    cached = CachedParameters(mine, store, torch.optim.Muon(mine.parameters()))
    for model in (mine, theirs):
        model(torch.ones(1, 3)).sum().backward()
    local.step()
    ServerOptimizer(cached).step()
    assert torch.equal(cached.origin.read()["weight"], theirs.weight)


def test_servers_have_every_optimizer_that_the_package_has() -> None:
    tried = {type(make([nn.Parameter(torch.zeros(1))])) for make in OPTIMIZERS} | {torch.optim.Muon}
    assert tried == set(_CLASSES.values())


@pytest.mark.parametrize(
    "scheduler_of",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: float(step == 0)),
        lambda o: CosineAnnealingLR(o, T_max=3),
        lambda o: OneCycleLR(o, max_lr=0.5, total_steps=10),
    ],
)
def test_servers_get_the_rate_of_each_step_and_what_else_a_scheduler_moves(
    store: ServerStore, scheduler_of: MakeScheduler
) -> None:
    train_both(store, lambda p: SGD(p, lr=1.0, momentum=0.9), scheduler_of)


def test_groups_have_hyperparameters_of_their_own(store: ServerStore) -> None:
    def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        weight, bias = parameters
        groups = [{"params": [weight], "lr": 0.1, "weight_decay": 0.5}, {"params": [bias], "lr": 0.01}]
        return torch.optim.AdamW(groups)

    train_both(store, grouped)


def test_a_parameter_that_the_optimizer_does_not_have_stays(store: ServerStore) -> None:
    model = nn.Linear(1, 1)
    cached = CachedParameters(model, store, SGD([model.bias], lr=1.0))
    before = model.weight.item()
    model(torch.ones(1, 1)).sum().backward()
    ServerOptimizer(cached).step()
    now = cached.origin.read()
    assert (now["weight"].item(), now["bias"].item()) == (before, model.bias.item() - 1)


def test_a_parameter_that_is_not_on_servers_is_refused(store: ServerStore) -> None:
    model, other = nn.Linear(1, 1), nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="1 of its parameters are not in the Linear"):
        CachedParameters(model, store, SGD([*model.parameters(), other], lr=1.0))


def test_a_scheduler_does_not_take_the_steps_on_servers_for_missing(
    store: ServerStore, recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.Linear(1, 1)
    local = SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(local, 0.5)
    model(torch.ones(1, 1)).sum().backward()
    ServerOptimizer(CachedParameters(model, store, local)).step()
    scheduler.step()
    assert [str(warning.message) for warning in recwarn if "lr_scheduler" in str(warning.message)] == []


class Mine(torch.optim.SGD):
    """Might compute anything."""


def with_hook(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = SGD(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.LBFGS, r"got torch\.optim\.LBFGS"),
        (torch.optim.SparseAdam, "SparseAdam"),
        (Mine, "Mine"),
        (with_hook, "step hooks"),
    ],
)
def test_what_servers_cannot_do_is_refused(make: Make, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        group_optimizers(make([nn.Parameter(torch.zeros(2))]))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("os.system", {}, "servers have no such optimizer"),
        ("torch.optim.LBFGS", {}, "servers have no such optimizer"),
        ("torch.optim.Optimizer", {}, "servers have no such optimizer"),
        ("torch.optim.SGD", {"params": [1]}, "has no 'params'"),
        ("torch.optim.SGD", {"foreach": True}, "has no 'foreach'"),
        ("torch.optim.SGD", {"lr": "0.1"}, "lr: Input should be a valid number"),
        ("torch.optim.SGD", {"lr": 1e300}, "lr: Input should be less than"),
        ("torch.optim.SGD", {"nesterov": 1}, "nesterov: Input should be a valid boolean"),
        ("torch.optim.Adam", {"betas": [0.9, 1.0]}, r"betas\.1: Input should be less than 1"),
        ("torch.optim.Adam", {"betas": [0.9] * 99}, "betas"),
        ("torch.optim.Adam", {"eps": [1e-8, 1e-8]}, "eps"),
        ("torch.optim.ASGD", {"lr": -1.0}, "lr"),
        ("torch.optim.Muon", {"ns_steps": 10**9}, "ns_steps"),
        ("torch.optim.Muon", {"adjust_lr_fn": "eval"}, "adjust_lr_fn"),
        ("monolith.optim.Shampoo", {"tau_1": 0}, "tau_1"),
        ("monolith.optim.RMSprop", {"use_v2": {}}, "use_v2"),
    ],
)
def test_a_client_can_only_name_what_is_listed_within_bounds(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DenseOptimizer(name=name, settings=settings)


def test_what_a_class_refuses_is_an_error_of_the_client() -> None:
    with pytest.raises(ConfigError, match="Nesterov momentum requires"):
        make_optimizer(DenseOptimizer.of(SGD, nesterov=True), [torch.zeros(1)])
    with pytest.raises(ConfigError, match="Muon"):
        make_optimizer(DenseOptimizer.of(torch.optim.Muon), [torch.zeros(1)])


def test_the_rate_of_a_step_stays_until_another_comes(store: ServerStore) -> None:
    parameters = ServerParameters(store, {"w": torch.zeros(1)}, DenseOptimizer.of(SGD, lr=1.0))
    parameters.apply({"w": torch.ones(1)}, optimizers={"w": DenseOptimizer.of(SGD, lr=0.25)})
    parameters.apply({"w": torch.ones(1)})
    assert parameters.read()["w"].item() == -0.5
    with pytest.raises(InvalidArgumentError, match=r"trained with torch\.optim\.SGD, the gradient is for torch"):
        parameters.apply({"w": torch.ones(1)}, optimizers={"w": DenseOptimizer.of(torch.optim.Adam)})
    assert parameters.read()["w"].item() == -0.5


def test_other_settings_that_a_worker_declares_take_effect(
    store: ServerStore, caplog: pytest.LogCaptureFixture
) -> None:
    one, declared = {"w": torch.zeros(1)}, DenseOptimizer.of(SGD, lr=1.0, momentum=0.5)
    first = ServerParameters(store, one, declared)
    first.apply({"w": torch.ones(1)}, optimizers={"w": declared.with_settings(lr=0.25)})
    # Declared as before: the rate that a scheduler has moved stays.
    ServerParameters(store, one, declared)
    assert first.settings()["w"].current.settings["lr"] == 0.25
    ServerParameters(store, one, declared.with_settings(momentum=0.9))
    assert first.settings()["w"].current == declared.with_settings(lr=0.25, momentum=0.9)
    assert "'w': momentum was declared as 0.5, a worker now declares 0.9" in caplog.text
    ServerParameters(store, one, declared.with_settings(lr=2.0), current={"w": declared.with_settings(lr=1.5)})
    assert first.settings()["w"].current.settings == declared.settings | {"lr": 1.5}


def test_a_setting_that_asks_for_more_state_takes_effect(store: ServerStore) -> None:
    one, declared = {"w": torch.zeros(1)}, DenseOptimizer.of(torch.optim.Adam, lr=1.0)
    parameters = ServerParameters(store, one, declared)
    parameters.apply({"w": torch.ones(1)})
    ServerParameters(store, one, declared.with_settings(amsgrad=True))
    parameters.apply({"w": torch.ones(1)})
    assert parameters.read()["w"].item() == pytest.approx(-2.0)


def test_another_class_is_refused_and_can_be_replaced(store: ServerStore) -> None:
    parameters = ServerParameters(store, {"w": torch.zeros(1)}, DenseOptimizer.of(SGD, lr=1.0))
    parameters.apply({"w": torch.ones(1)})
    adam = DenseOptimizer.of(torch.optim.Adam)
    with pytest.raises(CheckpointMismatchError, match=r"'w'.*clear_nn=True.*warm_start_from"):
        ServerParameters(store, {"w": torch.ones(1)}, adam)
    assert parameters.read()["w"].item() == -1.0
    ServerParameters(store, {"w": torch.ones(1)}, adam, replace_other=True)
    assert parameters.read()["w"].item() == 1.0
    assert parameters.settings()["w"].declared == adam


def test_slots_can_be_installed(store: ServerStore) -> None:
    model = nn.Linear(1, 1, bias=False)
    local = SGD(model.parameters(), lr=1.0, momentum=0.5)
    cached = CachedParameters(model, store, local)
    nn.init.constant_(model.weight, 3.0)
    cached.install({id(model.weight): {"momentum_buffer": torch.full((1, 1), 4.0)}})
    assert cached.origin.read()["weight"].item() == 3.0
    cached.origin.apply({"weight": torch.ones(1, 1)})
    assert cached.origin.read()["weight"].item() == 0.0
    with pytest.raises(InvalidArgumentError, match="'weight': expected"):
        cached.origin.load({"weight": {**_state(torch.zeros(3)), "declared": True}})
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        cached.origin.load({"weight": {**_state(torch.zeros(1, 1)), "optimizer": {0: {"momentum_buffer": "x"}}}})
    assert cached.origin.read()["weight"].item() == 0.0


def _state(values: torch.Tensor) -> dict[str, object]:
    sgd = DenseOptimizer.of(SGD)
    settings = f'{{"declared": {sgd.model_dump_json()}, "current": {sgd.model_dump_json()}}}'
    return {"values": values, "settings": settings, "optimizer": {}, "changed": True, "declared": True}


def test_a_successor_goes_on_at_the_rate_that_a_schedule_has_come_to(
    store: ServerStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a part of the model, as one for a rare feature, had no gradient while the rate moved."""
    model = nn.ModuleDict({"often": nn.Linear(1, 1), "rare": nn.Linear(1, 1)})
    sgd = SGD(model.parameters(), lr=1.0, momentum=0.5)
    cached = CachedParameters(model, store, sgd)
    sgd.param_groups[0]["lr"] = 0.25
    model["often"](torch.ones(1, 1)).sum().backward()
    cached.push()
    successor = SGD(model.parameters(), lr=1.0, momentum=0.5)
    CachedParameters(model, store, successor).adopt_settings()
    assert successor.param_groups[0]["lr"] == 0.25
    assert "servers have lr at 0.25, and for some parameters of its group at 1.0" in caplog.text
    assert "momentum" not in caplog.text
