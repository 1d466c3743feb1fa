"""Danger: a cross network that crosses something else, or whose experts share one constant gate, as in the original."""

from __future__ import annotations

import numpy as np
import torch

from layer_oracle import assert_same, prepared, random, softmax, tensor
from monolith.nn import DCN


def test_vector() -> None:
    layer, p = prepared(DCN(4, 3, dcn_type="vector"))
    x0 = x = random(5, 4)
    for i in range(3):
        x = x0 * (x @ p[f"crosses.{i}.projection.weight"].T) + p[f"crosses.{i}.bias"] + x
    assert_same(layer(tensor(x0)), x)


def test_matrix() -> None:
    layer, p = prepared(DCN(4, 3))
    x0 = x = random(5, 4)
    for i in range(3):
        x = x0 * (x @ p[f"crosses.{i}.projection.weight"].T + p[f"crosses.{i}.projection.bias"]) + x
    assert_same(layer(tensor(x0)), x)


def test_matrix_with_weight_norm() -> None:
    layer, p = prepared(DCN(4, weight_norm="fixed"))
    weight = p["crosses.0.projection.weight"]
    x = random(5, 4)
    unit = weight / np.sqrt((weight**2).sum(1, keepdims=True))
    assert_same(layer(tensor(x)), x * (x @ unit.T + p["crosses.0.projection.bias"]) + x)


def test_mixed_gates_are_a_softmax_over_the_experts() -> None:
    layer, p = prepared(DCN(4, 2, dcn_type="mixed", num_experts=3, low_rank=2))
    x0 = x = random(5, 4)
    for i in range(2):
        gates = softmax(x @ p[f"crosses.{i}.gate.weight"].T)
        assert gates.std() > 0.05
        mixture = np.zeros_like(x)
        for e in range(3):
            v, c, u = (p[f"crosses.{i}.experts.{e}.{j}.weight"].T for j in range(3))
            expert = np.tanh(np.tanh(x @ v) @ c) @ u + p[f"crosses.{i}.bias"]
            mixture += gates[:, e : e + 1] * expert
        x = x0 * mixture + x
    assert_same(layer(tensor(x0)), x)


def test_dropout_only_in_training() -> None:
    layer = DCN(200, dropout=0.5)
    x = torch.ones(1, 200)
    torch.manual_seed(0)
    assert 50 < (layer(x) == 0).sum() < 150
    assert (layer.eval()(x) != 0).all()
