"""Danger: an interaction of features that is not its formula, or gives its pairs in another order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from layer_oracle import assert_same, mlp, prepared, random, relu, softmax, tensor
from monolith.nn import CAN, CIN, FFM, FM, AllInt, AutoInt, CDot, DotInteraction


def test_fm_is_the_sum_over_pairs() -> None:
    x = random(3, 5, 4)
    pairs = sum((x[:, i] * x[:, j]).sum(1) for i, j in itertools.combinations(range(5), 2))
    assert_same(FM()(tensor(x)), np.asarray(pairs)[:, None])


def test_dot_interaction_is_the_lower_triangle_row_by_row() -> None:
    x = random(3, 5, 4)
    pairs = [(x[:, i] * x[:, j]).sum(1) for i in range(5) for j in range(i)]
    assert_same(DotInteraction()(tensor(x)), np.stack(pairs, 1))


def test_dot_interaction_puts_the_dense_vector_first_twice() -> None:
    x, dense = random(3, 5, 4), random(3, 4)
    every = np.concatenate([dense[:, None], x], 1)
    pairs = [(every[:, i] * every[:, j]).sum(1) for i in range(6) for j in range(i)]
    assert_same(DotInteraction()(tensor(x), tensor(dense)), np.concatenate([dense, np.stack(pairs, 1)], 1))


def test_ffm_pairs_are_left_major() -> None:
    left, right = random(3, 2, 4), random(3, 5, 4)
    pairs = [left[:, i] * right[:, j] for i in range(2) for j in range(5)]
    assert_same(FFM()(tensor(left), tensor(right)), np.stack(pairs, 1))
    assert_same(FFM(interaction_type="dot")(tensor(left), tensor(right)), np.stack(pairs, 1).sum(2))


def test_ffm_attention_scales_each_pair_by_one_number() -> None:
    layer, p = prepared(FFM(embed_dim=4, attention_units=[6, 1], weight_norm=None))
    left, right = random(3, 2, 4), random(3, 5, 4)
    pairs = np.stack([left[:, i] * right[:, j] for i in range(2) for j in range(5)], 1)
    assert_same(layer(tensor(left), tensor(right)), pairs * mlp(pairs, p, "attention.", [relu, None]))


@pytest.mark.parametrize("use_bias", [True, False])
def test_all_int(use_bias: bool) -> None:
    layer, p = prepared(AllInt(5, 2, use_bias=use_bias))
    x = random(3, 5, 4)
    inner = x.transpose(0, 2, 1) @ p["compress.weight"].T + p.get("compress.bias", 0)
    assert_same(layer(tensor(x)), x @ inner)


def test_auto_int_without_projections_is_the_originals() -> None:
    x = expected = random(3, 5, 4)
    for _ in range(2):
        expected = softmax(expected @ expected.transpose(0, 2, 1)) @ expected
    layer = AutoInt(4, 2, projected=False)
    assert not list(layer.parameters())
    assert_same(layer(tensor(x)), expected)


def test_auto_int_projects_per_head_and_adds_the_input() -> None:
    layer, p = prepared(AutoInt(4, 2, num_heads=2))
    x = random(3, 5, 4)
    expected = x
    for i in range(2):
        q, k, v, r = (expected @ p[f"attention.{i}.{n}.weight"].T for n in ("query", "key", "value", "residual"))
        heads = [softmax(q[..., h] @ k[..., h].transpose(0, 2, 1)) @ v[..., h] for h in (slice(0, 2), slice(2, 4))]
        expected = relu(np.concatenate(heads, 2) + r)
    assert_same(layer(tensor(x)), expected)


def test_cdot() -> None:
    layer, p = prepared(CDot(5, 4, 2, [6], weight_norm=None))
    x = random(3, 5, 4)
    mixtures = (x.transpose(0, 2, 1) @ p["project.weight"].T).reshape(3, 8)
    z = mlp(mixtures, p, "compress.", [relu, None])
    products = (x @ z.reshape(3, 4, 2)).reshape(3, 10)
    assert_same(layer(tensor(x)), np.concatenate([products, z], 1))


def test_cin_is_a_convolution_over_all_products() -> None:
    layer, p = prepared(CIN(5, [4, 3], activation="relu"))
    x = hidden = random(2, 5, 6)
    sums = []
    for i, (width, units) in enumerate([(5, 4), (4, 3)]):
        weight = p[f"compress.{i}.weight"].reshape(units, width, 5)
        hidden = np.einsum("hij,bik,bjk->bhk", weight, hidden, x) + p[f"compress.{i}.bias"][:, None]
        hidden = relu(hidden) if i == 0 else hidden
        sums.append(hidden.sum(2))
    assert_same(layer(tensor(x)), np.concatenate(sums, 1))


@pytest.mark.parametrize("is_seq", [True, False])
@pytest.mark.parametrize("middle", [(), (4,), (2, 4)])
def test_can_runs_the_user_through_the_items_weights(middle: tuple[int, ...], is_seq: bool) -> None:
    if is_seq and not middle:
        middle = (1,)
    user, item = random(5, *middle, 3), random(5, 24)
    expected = user
    for layer in range(2):
        cut = item[:, layer * 12 : (layer + 1) * 12]
        rows = [relu(expected[b] @ cut[b, :9].reshape(3, 3) + cut[b, 9:]) for b in range(5)]
        expected = np.stack(rows)
    expected = expected.sum(-2) if is_seq else expected
    assert_same(CAN(3, 2, is_seq=is_seq)(tensor(user), tensor(item)), expected)


def test_explicit_gradients_of_pairs() -> None:
    left, right = (tensor(random(2, 3, 4, seed=s)).requires_grad_() for s in (0, 1))
    for layer in (FFM(), FFM(interaction_type="dot")):
        assert torch.autograd.gradcheck(layer, (left, right))
