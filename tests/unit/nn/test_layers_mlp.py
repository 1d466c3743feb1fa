"""Danger: a dense stack computes another function: weight norm, gates or activations at the wrong position."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from layer_oracle import Array, assert_same, mlp, prepared, random, relu, sigmoid, softmax, tensor
from monolith import InvalidArgumentError
from monolith.nn import MLP, AddBias, BatchNorm, Dense, LHUCTower
from monolith.nn.layers.dense import make_activation

KERAS_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "exponential": np.exp,
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
    "hard_sigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "leakyrelu": lambda x: np.where(x > 0, x, 0.3 * x),
    "linear": lambda x: x,
    "prelu": relu,
    "relu": relu,
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
    "sigmoid": sigmoid,
    "sigmoid2": lambda x: 2 * sigmoid(x),
    "softmax": softmax,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "swish": lambda x: x * sigmoid(x),
    "tanh": np.tanh,
    "thresholdedrelu": lambda x: np.where(x > 1, x, 0),
}


@pytest.mark.parametrize("name", KERAS_ACTIVATIONS)
def test_activation_names_mean_what_they_meant(name: str) -> None:
    x = 2 * random(7, 5)
    assert_same(make_activation(name.upper(), 5).double()(tensor(x)), KERAS_ACTIVATIONS[name](x))


def test_prelu_learns_one_slope_per_unit_of_the_last_dimension() -> None:
    activation, parameters = prepared(make_activation("prelu", 3))
    x = random(2, 4, 3)
    assert_same(activation(tensor(x)), np.where(x > 0, x, parameters["slope"] * x))


def test_an_unknown_activation_names_the_nearest() -> None:
    with pytest.raises(InvalidArgumentError, match="unknown name 'leaky_relu'; did you mean 'leakyrelu'"):
        make_activation("leaky_relu", 3)
    instance: Any = nn.ReLU()
    with pytest.raises(InvalidArgumentError, match="a callable that makes a module"):
        make_activation(instance, 3)


def test_add_bias_has_one_bias_per_position() -> None:
    layer, parameters = prepared(AddBias([3, 2]))
    x = random(4, 3, 2)
    assert parameters["bias"].shape == (3, 2)
    assert_same(layer(tensor(x)), x + parameters["bias"])


def test_dense_is_a_linear_map_with_activation() -> None:
    layer, parameters = prepared(Dense(4, 3, activation="tanh"))
    x = random(5, 2, 4)
    assert_same(layer(tensor(x)), np.tanh(x @ parameters["weight"].T + parameters["bias"]))


def test_weight_norm_normalises_each_unit_and_leaves_tiny_ones_finite() -> None:
    layer, parameters = prepared(Dense(4, 3, bias=False, weight_norm="fixed"))
    with torch.no_grad():
        layer.weight[1] = 1e-5
        layer.weight[2] = 0
    norm = np.sqrt((parameters["weight"] ** 2).sum(1))
    x = random(5, 4)
    assert_same(layer(tensor(x)), x @ (parameters["weight"] / np.maximum(norm, np.sqrt(1e-6))[:, None]).T)


def test_learnable_weight_norm_starts_as_the_plain_layer_and_multiplies_by_its_scale() -> None:
    torch.manual_seed(0)
    layer = Dense(4, 3, weight_norm="learnable").double()
    x = random(5, 4)
    assert_same(layer(tensor(x)), x @ layer.weight.detach().numpy().T, 1e-6)
    layer, parameters = prepared(layer)
    norm = np.sqrt((parameters["weight"] ** 2).sum(1))
    weight = parameters["weight"] / norm[:, None] * parameters["scale"][:, None]
    assert_same(layer(tensor(x)), x @ weight.T + parameters["bias"])


def test_dense_starts_xavier_uniform_with_zero_bias() -> None:
    torch.manual_seed(0)
    layer = Dense(100, 50)
    limit = np.sqrt(6 / 150)
    assert layer.weight.abs().max().item() == pytest.approx(limit, rel=1e-2)
    assert layer.weight.std().item() == pytest.approx(limit / np.sqrt(3), rel=0.05)
    assert layer.bias is not None
    assert not layer.bias.any()


def test_inactive_relu_follows_the_share_of_dead_outputs_in_training_only() -> None:
    layer = Dense(1, 2, activation="relu", inactive_relu_decay=0.25)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    layer(torch.tensor([[1.0], [2.0], [-1.0], [3.0]]))
    assert_same(layer.get_buffer("inactive_relu"), [0.25 * 0.25, 0.25 * 0.75], 1e-6)
    layer(torch.tensor([[1.0]]))
    assert_same(layer.get_buffer("inactive_relu"), [0.75 * 0.0625, 0.75 * 0.1875 + 0.25], 1e-6)
    layer.eval()(torch.tensor([[1.0]]))
    assert_same(layer.get_buffer("inactive_relu"), [0.75 * 0.0625, 0.75 * 0.1875 + 0.25], 1e-6)


@pytest.mark.parametrize(
    ("activations", "expected"),
    [(None, [relu, relu, None]), ("tanh", [np.tanh, np.tanh, None]), (["tanh", None, "relu"], [np.tanh, None, relu])],
)
def test_mlp_places_activations(activations: Any, expected: list[Any]) -> None:  # noqa: ANN401
    layer, parameters = prepared(MLP(4, [6, 5, 2], activations=activations, weight_norm=None))
    x = random(3, 4)
    assert_same(layer(tensor(x)), mlp(x, parameters, "", expected))


def test_mlp_learns_weight_norms_by_default() -> None:
    assert [name for name, _ in MLP(2, [3]).named_parameters()] == [
        f"layers.0.0.{n}" for n in ("weight", "bias", "scale")
    ]


def test_batch_norm_is_before_the_first_and_after_every_dense_but_the_last() -> None:
    kinds = [type(m) for m in MLP(4, [6, 2], batch_norm=True).modules() if isinstance(m, Dense | BatchNorm | nn.ReLU)]
    assert kinds == [BatchNorm, Dense, BatchNorm, nn.ReLU, Dense]


@pytest.mark.parametrize("hidden", [None, [3], [[3, 6], [2]]])
def test_lhuc_scales_every_layer_by_its_gate(hidden: Any) -> None:  # noqa: ANN401
    layer, p = prepared(LHUCTower(4, [6, 2], gate_features=5, lhuc_output_dims=hidden, weight_norm=None))
    x, u = random(3, 4), random(3, 5)
    h = x
    for index, activation in enumerate([relu, lambda v: v]):
        depth = sum(name.startswith(f"gates.{index}.") for name in p) // 2
        gate = 2 * sigmoid(mlp(u, p, f"gates.{index}.", [relu] * (depth - 1) + [None]))
        h = activation(h @ p[f"layers.{index}.0.weight"].T + p[f"layers.{index}.0.bias"]) * gate
    assert_same(layer(tensor(x), tensor(u)), h)


def test_lhuc_without_a_second_input_gates_itself() -> None:
    layer, _ = prepared(LHUCTower(4, [3]))
    x = tensor(random(2, 4))
    assert torch.equal(layer(x), layer(x, x))


def test_lhuc_gates_start_near_one() -> None:
    torch.manual_seed(0)
    tower = LHUCTower(4, [3], gate_features=2)
    assert_same(tower.gates[0](torch.zeros(1, 2)), np.ones((1, 3)), 1e-6)


def test_lhuc_options_of_the_gates_override_those_of_the_tower() -> None:
    tower = LHUCTower(4, [3], weight_norm=None, lhuc_options={"weight_norm": "fixed", "bias": False})
    gate = next(m for m in tower.gates.modules() if isinstance(m, Dense))
    assert (gate.weight_norm, gate.bias) == ("fixed", None)
    assert next(m for m in tower.layers.modules() if isinstance(m, Dense)).weight_norm is None
