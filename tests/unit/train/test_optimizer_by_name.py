"""Danger: a parameter continues with the momentum of another one, because the model declares its layers in another order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from monolith.errors import CorruptFileError
from monolith.train import ModelCheckpoints, RunConfig, Trainer


def two_layers(*order: str) -> nn.Module:
    """Two layers of one shape, declared in the order given."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in order})
    for name in order:
        nn.init.constant_(model[name].weight, ord(name))
    return model


def momentum_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> float:
    return float(optimizer.state[parameter]["momentum_buffer"].mean())


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step, whose gradients tell the parameters apart by the first letter of their names."""
    checkpoints = ModelCheckpoints(folder, model, optimizer)
    checkpoints.restore()
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, float(ord(name[0])))
    optimizer.step()
    checkpoints.save(1)


def test_layers_declared_in_another_order_keep_their_own_momentum(tmp_path: Path) -> None:
    first = two_layers("a", "b")
    save(tmp_path, first, sgd([*first.parameters()]))
    second = two_layers("b", "a")
    optimizer = sgd([*second.parameters()])
    assert ModelCheckpoints(tmp_path, second, optimizer).restore() == 1
    for name in ("a", "b"):
        assert torch.equal(second[name].weight, first[name].weight)
        assert momentum_of(optimizer, second[name].weight) == ord(name)


def test_groups_in_another_order_keep_their_own_rates(tmp_path: Path) -> None:
    def grouped(model: nn.Module, *order: str) -> torch.optim.SGD:
        rates = {"a": 0.5, "b": 0.25}
        return sgd([{"params": model[name].parameters(), "lr": rates[name]} for name in order])  # type: ignore[arg-type]

    first = two_layers("a", "b")
    optimizer = grouped(first, "a", "b")
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.1)
    save(tmp_path, first, optimizer)
    second = two_layers("a", "b")
    resumed = grouped(second, "b", "a")
    ModelCheckpoints(tmp_path, second, resumed).restore()
    assert [group["lr"] for group in resumed.param_groups] == [pytest.approx(0.025), pytest.approx(0.05)]
    assert momentum_of(resumed, second["b"].weight) == ord("b")


def test_one_group_out_of_two_that_differ_takes_the_rate_of_the_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = two_layers("a", "b")
    optimizer = sgd([{"params": [first[name].weight]} for name in "ab"])  # type: ignore[arg-type, list-item]
    checkpoints = ModelCheckpoints(tmp_path, first, optimizer)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.3, 0.4
    checkpoints.save(1)
    second = two_layers("a", "b")
    resumed = sgd([*second.parameters()])
    ModelCheckpoints(tmp_path, second, resumed).restore()
    assert resumed.param_groups[0]["lr"] == 0.1
    assert "lr was at 0.3 and 0.4 in several groups, the code now says 0.1" in caplog.text


def test_parameters_that_come_or_go_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = two_layers("a", "b", "c")
    first["c"].requires_grad_(False)
    save(tmp_path, first, sgd([first["a"].weight, first["b"].weight]))
    second = two_layers("c", "b", "a")
    optimizer = sgd([second["b"].weight, second["c"].weight])
    ModelCheckpoints(tmp_path, second, optimizer).restore()
    assert momentum_of(optimizer, second["b"].weight) == ord("b")
    assert second["c"].weight not in optimizer.state
    assert "'c.weight' was not trained before: its optimizer state starts from nothing" in caplog.text
    assert "'a.weight' is not trained any more: its optimizer state is dropped" in caplog.text


def test_a_renamed_parameter_keeps_its_momentum(tmp_path: Path) -> None:
    first = two_layers("a", "b")
    save(tmp_path, first, sgd([*first.parameters()]))
    second = two_layers("x", "a")
    optimizer = sgd([*second.parameters()])
    config = RunConfig(model_dir=str(tmp_path), reload_alias_map={"x.weight": "b.weight"})
    Trainer(second, optimizer, config=config).restore()
    assert torch.equal(second["x"].weight, first["b"].weight)
    assert momentum_of(optimizer, second["x"].weight) == ord("b")
    assert momentum_of(optimizer, second["a"].weight) == ord("a")


def test_a_shared_parameter_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    def tied(*order: str) -> nn.Module:
        model = two_layers(*order)
        model["a"].weight = model["b"].weight
        return model

    first, second = tied("a", "b"), tied("b", "a")
    save(tmp_path, first, sgd([*first.parameters()]))
    optimizer = sgd([*second.parameters()])
    ModelCheckpoints(tmp_path, second, optimizer).restore()
    assert momentum_of(optimizer, second["b"].weight) == ord("a")


def test_state_that_is_not_by_name_is_refused(tmp_path: Path) -> None:
    model = two_layers("a")
    trainer = Trainer(model, sgd([*model.parameters()]))
    state = {**trainer.state_dict(), "optimizer": trainer.optimizer.state_dict()}  # type: ignore[union-attr]
    with pytest.raises(CorruptFileError, match="optimizer: expected its class, groups of named parameters"):
        trainer.load_state_dict(state)


def test_nothing_is_said_when_nothing_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = two_layers("a", "b")
    save(tmp_path, first, sgd([*first.parameters()]))
    with caplog.at_level(logging.INFO):
        ModelCheckpoints(tmp_path, second := two_layers("a", "b"), sgd([*second.parameters()])).restore()
    assert "optimizer" not in caplog.text


def test_a_parameter_that_is_not_saved_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other = two_layers("a"), nn.Parameter(torch.zeros(1))
    ModelCheckpoints(tmp_path, model, sgd([*model.parameters(), other])).restore()
    assert "optimizer: 1 of its parameters are not in the model: their values are not saved" in caplog.text
