"""Danger: a dense optimizer that is nearly right. It still trains, a little worse, and no one notices; so every rule is held
against the original's golden numbers and against its formula in float64 over many steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from monolith.optim import Adamom, RMSprop

State = dict[str, np.ndarray | float]


def adamom(w: np.ndarray, g: np.ndarray, state: State, h: dict[str, Any]) -> np.ndarray:
    g = g + h["weight_decay"] * w
    state["m"] = h["mom_decay"] * state.get("m", 0.0) + (1 - h["mom_decay"]) * g
    state["v"] = h["ada_decay"] * state.get("v", 0.0) + g**2
    state["c"] = h["ada_decay"] * state.get("c", 0.0) + np.ones_like(w)
    return w - h["lr"] * state["m"] / np.sqrt(state["v"] / state["c"] + h["epsilon"])


def rmsprop(w: np.ndarray, g: np.ndarray, state: State, h: dict[str, Any]) -> np.ndarray:
    g = g + h["weight_decay"] * w
    v = state.get("v", np.zeros_like(w))
    if h["use_v2"]:
        state["v"] = h["beta2"] * v + g**2
        scale = np.sqrt(state["v"]) + h["epsilon"]
    else:
        state["v"] = v + (g**2 - v) * (1 - h["beta2"])
        scale = np.sqrt(state["v"] + h["epsilon"])
    state["m"] = h["beta1"] * state.get("m", 0.0) + h["lr"] * g / scale
    return w - state["m"]


Case = tuple[type[torch.optim.Optimizer], Callable[..., np.ndarray], dict[str, Any]]
ADAMOM = {"lr": 0.1, "ada_decay": 0.99, "mom_decay": 0.9, "epsilon": 1e-6, "weight_decay": 0.01}
RMSPROP = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "epsilon": 0.1, "weight_decay": 1.0, "use_v2": False}
CASES: list[Case] = [
    (Adamom, adamom, ADAMOM),
    (Adamom, adamom, ADAMOM | {"weight_decay": 0.0, "epsilon": 0.01}),
    (RMSprop, rmsprop, RMSPROP),
    (RMSprop, rmsprop, RMSPROP | {"use_v2": True}),
    (RMSprop, rmsprop, RMSPROP | {"weight_decay": 0.0, "beta1": 0.5}),
]


@pytest.mark.parametrize(
    ("kind", "settings", "golden"),
    [
        (Adamom, ADAMOM, {"m": 0.0121, "v": 0.014641, "c": 1.0, "weight": 0.090000336}),
        (RMSprop, RMSPROP, {"m": 0.06794526153774846, "v": 0.00484, "weight": 0.03205473846225154}),
        (RMSprop, RMSPROP | {"use_v2": True}, {"m": 0.06875, "v": 0.0484, "weight": 0.03125}),
    ],
)
def test_one_step_has_the_golden_numbers_of_the_original(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], golden: dict[str, float]
) -> None:
    weight = torch.nn.Parameter(torch.tensor([0.1]))
    optimizer = kind([weight], **settings)
    (0.12 * weight).sum().backward()
    optimizer.step()
    found = {name: slot.item() for name, slot in optimizer.state[weight].items()} | {"weight": weight.item()}
    assert found == pytest.approx(golden, abs=1e-6)


@pytest.mark.parametrize(("kind", "rule", "settings"), CASES)
def test_many_steps_follow_the_formula(kind: type, rule: Callable[..., np.ndarray], settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    # Small tensors that are updated together, one too large for that, a scalar, and one that is not contiguous.
    expected = [rng.normal(size=shape) for shape in [(3,), (4, 5), (300, 200), (), (2, 3, 4)]]
    weights = [torch.nn.Parameter(torch.from_numpy(w.copy())) for w in expected]
    weights.append(torch.nn.Parameter(torch.from_numpy(rng.normal(size=(5, 6))).T))
    expected.append(weights[-1].detach().numpy().copy())
    states: list[State] = [{} for _ in expected]
    optimizer = kind(weights, **settings)
    for _ in range(5):
        for index, weight in enumerate(weights):
            gradient = rng.normal(size=weight.shape)
            weight.grad = torch.from_numpy(np.asarray(gradient))
            expected[index] = rule(expected[index], gradient, states[index], settings)
        optimizer.step()
    for weight, state, want in zip(weights, states, expected, strict=True):
        np.testing.assert_allclose(weight.detach().numpy(), want, rtol=1e-9, atol=1e-12)
        assert set(optimizer.state[weight]) == set(state)
        for name, slot in state.items():
            np.testing.assert_allclose(optimizer.state[weight][name].numpy(), slot, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "rule", "settings"), CASES)
def test_groups_keep_their_own_settings(kind: type, rule: Callable[..., np.ndarray], settings: dict[str, Any]) -> None:
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    optimizer = kind([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], **settings)
    for weight in weights:
        weight.grad = torch.full((3,), 0.25, dtype=torch.float64)
    optimizer.step()
    for weight, rate in zip(weights, (settings["lr"], 0.5), strict=True):
        want = rule(np.ones(3), np.full(3, 0.25), {}, settings | {"lr": rate})
        np.testing.assert_allclose(weight.detach().numpy(), want, rtol=1e-9)
