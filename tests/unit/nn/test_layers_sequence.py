"""Danger: a recurrence that ignores its kind of attention or its mask, as the original's DIEN does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layer_oracle import Array, assert_same, prepared, random, relu, sigmoid, softmax, tensor
from monolith import InvalidArgumentError
from monolith.nn import AGRU, DIEN, AGRUCell
from monolith.nn.layers.sequence import AttentionType

KINDS: tuple[AttentionType, ...] = ("GRU", "AGRU", "AUGRU")
MASK = np.array([[True, True, True, True], [True, False, True, False], [False, False, False, False]])


def attentive_step(
    p: dict[str, Array], prefix: str, kind: str, x: Array, h: Array, a: Array, activation: object
) -> Array:
    gates = sigmoid(np.concatenate([x, h], 1) @ p[f"{prefix}gates.weight"].T + p[f"{prefix}gates.bias"])
    r, u = np.split(gates, 2, axis=1)
    c = np.concatenate([x, r * h], 1) @ p[f"{prefix}candidate.weight"].T + p[f"{prefix}candidate.bias"]
    c = relu(c) if activation == "relu" else np.tanh(c)
    if kind == "GRU":
        return (1 - u) * h + u * c
    if kind == "AGRU":
        return (1 - a) * h + a * c
    u = (1 - a) * u
    return u * h + (1 - u) * c


@pytest.mark.parametrize("kind", KINDS)
def test_cell(kind: AttentionType) -> None:
    cell, p = prepared(AGRUCell(3, 4, att_type=kind))
    x, h, a = random(5, 3), random(5, 4), sigmoid(random(5, 1))
    assert_same(cell(tensor(x), tensor(h), tensor(a)), attentive_step(p, "", kind, x, h, a, "tanh"))


def test_biases_start_at_one() -> None:
    cell = AGRUCell(3, 4)
    assert (cell.get_parameter("gates.bias") == 1).all()
    assert (cell.get_parameter("candidate.bias") == 1).all()


def test_attention_is_needed_by_the_kinds_that_use_it() -> None:
    x, h = torch.zeros(2, 3), torch.zeros(2, 4)
    AGRUCell(3, 4, att_type="GRU")(x, h)
    with pytest.raises(InvalidArgumentError, match="attention: needed with att_type 'AUGRU'"):
        AGRUCell(3, 4, att_type="AUGRU")(x, h)


@pytest.mark.parametrize("kind", KINDS)
def test_unroll_keeps_the_state_over_masked_steps(kind: AttentionType) -> None:
    layer, p = prepared(AGRU(AGRUCell(2, 3, att_type=kind)))
    x, a = random(3, 4, 2), sigmoid(random(3, 4))
    h, states = np.zeros((3, 3)), []
    for t in range(4):
        moved = attentive_step(p, "cell.", kind, x[:, t], h, a[:, t : t + 1], "tanh")
        h = np.where(MASK[:, t : t + 1], moved, h)
        states.append(h)
    assert_same(layer(tensor(x), tensor(a), tensor(MASK)), np.stack(states, 1))


def gru_states(p: dict[str, Array], keys: Array) -> Array:
    h, states = np.zeros((len(keys), 5)), []
    for t in range(keys.shape[1]):
        x_r, x_z, x_n = np.split(keys[:, t] @ p["interest.weight_ih"].T + p["interest.bias_ih"], 3, axis=1)
        h_r, h_z, h_n = np.split(h @ p["interest.weight_hh"].T + p["interest.bias_hh"], 3, axis=1)
        z = sigmoid(x_z + h_z)
        h = (1 - z) * np.tanh(x_n + sigmoid(x_r + h_r) * h_n) + z * h
        states.append(h)
    return np.stack(states, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_dien_evolves_towards_the_query_by_its_kind_of_attention(kind: AttentionType) -> None:
    layer, p = prepared(DIEN(3, 4, 5, att_type=kind))
    query, keys = random(2, 3), random(2, 6, 4)
    states = gru_states(p, keys)
    attention = softmax(np.einsum("btu,bu->bt", states, query @ p["query.weight"].T))
    h = np.zeros((2, 5))
    for t in range(6):
        h = attentive_step(p, "evolution.cell.", kind, states[:, t], h, attention[:, t : t + 1], "relu")
    assert_same(layer(tensor(query), tensor(keys)), h)


def test_dien_skips_masked_steps_wherever_they_are() -> None:
    layer, _ = prepared(DIEN(3, 4, 5))
    query, keys = tensor(random(3, 3)), tensor(random(3, 4, 4))
    whole = layer(query, keys, tensor(MASK))
    torch.testing.assert_close(whole[:1], layer(query[:1], keys[:1]))
    torch.testing.assert_close(whole[1:2], layer(query[1:2], keys[1:2, [0, 2]]))
    assert not whole[2].any()
