"""Danger: tasks that share a gate, experts that starve unnoticed, routes that differ between training and serving."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layer_oracle import Array, assert_same, mlp, prepared, random, relu, sigmoid, softmax, tensor
from monolith.nn import CGC, SNR, MMoE


def expected_gates(u: Array, weight: Array, top_k: int | None) -> Array:
    gates = softmax((u @ weight).reshape(len(u), 2, 3))
    if top_k is None:
        return gates
    kept = np.where(gates >= np.sort(gates)[..., -top_k][..., None], gates, 0)
    return kept / kept.sum(2, keepdims=True)


@pytest.mark.parametrize(("gate_type", "top_k"), [("softmax", None), ("topk", 1), ("topk", 2), ("noise_topk", 2)])
def test_mmoe_mixes_experts_by_each_tasks_gate(gate_type: str, top_k: int | None) -> None:
    layer, p = prepared(
        MMoE(4, 2, [6, 3], num_experts=3, gate_features=5, gate_type=gate_type, top_k=top_k or 1, weight_norm=None)
    )
    x, u = random(7, 4), random(7, 5)
    gates = expected_gates(u, p["gate_weight"], top_k)
    experts = np.stack([mlp(x, p, f"experts.{e}.", [relu, None]) for e in range(3)], 1)
    outputs = layer(tensor(x), tensor(u))
    assert len(outputs) == 2
    for task, output in enumerate(outputs):
        assert_same(output, np.einsum("be,bed->bd", gates[:, task], experts))


def test_mmoe_gates_start_equal() -> None:
    gates = MMoE(4, 2, [3], num_experts=5).gates(torch.randn(3, 4))
    torch.testing.assert_close(gates, torch.full((3, 2, 5), 0.2))


def test_mmoe_noise_is_drawn_in_training_only() -> None:
    torch.manual_seed(0)
    layer = MMoE(4, 1, [3], num_experts=5, gate_type="noise_topk", top_k=2)
    u = torch.randn(3, 4)
    assert not torch.equal(layer.gates(u), layer.gates(u))
    layer.eval()
    assert torch.equal(layer.gates(u), layer.gates(u))


def test_mmoe_balance_loss_is_the_squared_variation_of_importance() -> None:
    layer, p = prepared(MMoE(4, 2, [3], num_experts=3, gate_type="topk", top_k=2, balance_weight=0.5))
    x = random(7, 4)
    layer(tensor(x))
    assert layer.auxiliary_loss().item() == 0
    layer.train()(tensor(x))
    importance = expected_gates(x, p["gate_weight"], 2).sum(0)
    assert_same(layer.auxiliary_loss(), 0.5 * (importance.var(1) / importance.mean(1) ** 2).sum())


def test_cgc_mixes_the_experts_of_a_task_with_the_shared_ones_and_all_for_the_next_level() -> None:
    layer, p = prepared(CGC(4, 2, 3, num_experts=2))
    xs = [random(7, 4, seed=seed) for seed in range(3)]
    experts = [relu(x @ p[f"experts.{i}.weight"].T + p[f"experts.{i}.bias"]).reshape(7, 2, 3) for i, x in enumerate(xs)]
    groups = [np.concatenate([experts[t], experts[2]], 1) for t in (0, 1)] + [np.concatenate(experts, 1)]
    outputs = layer([tensor(x) for x in xs])
    assert len(outputs) == 3
    for i, (x, group, output) in enumerate(zip(xs, groups, outputs, strict=True)):
        gates = softmax(x @ p[f"gates.{i}.weight"].T)
        assert_same(output, np.einsum("be,bed->bd", gates, group))


def test_cgc_gates_start_equal() -> None:
    layer = CGC(4, 2, 3, num_experts=2)
    x = torch.randn(5, 4)
    experts = torch.stack([layer.experts[i](x).unflatten(1, (2, 3)) for i in range(3)])
    torch.testing.assert_close(layer([x] * 3)[2], experts.mean((0, 2)))


def snr_gates(log_alpha: Array) -> Array:
    return np.clip(sigmoid(log_alpha) * 1.2 - 0.1, 0, 1)


def test_snr_trans_transforms_each_route() -> None:
    layer, p = prepared(SNR([3, 4], 2, 5))
    inputs = [random(6, 3), random(6, 4)]
    z = snr_gates(p["log_alpha"])
    for out, y in enumerate(layer([tensor(x) for x in inputs])):
        assert_same(y, sum(z[i, out] * x @ p[f"weights.{i}"][out] for i, x in enumerate(inputs)))


def test_snr_aver_adds_the_inputs() -> None:
    layer, p = prepared(SNR([3, 3], 2, 3, snr_type="aver"))
    inputs = [random(6, 3), random(6, 3, seed=1)]
    z = snr_gates(p["log_alpha"])
    for out, y in enumerate(layer([tensor(x) for x in inputs])):
        assert_same(y, sum(z[i, out] * x for i, x in enumerate(inputs)))


def test_snr_gates_are_hard_concrete_in_training() -> None:
    layer, p = prepared(SNR([3, 4], 2, 5, beta=0.7))
    torch.manual_seed(3)
    gates = layer.train().gates()
    torch.manual_seed(3)
    v = torch.rand(2, 2, dtype=torch.float64).numpy()
    s = sigmoid((np.log(v) - np.log(1 - v) + p["log_alpha"]) / 0.7)
    assert_same(gates, np.clip(s * 1.2 - 0.1, 0, 1))


def test_snr_loss_is_the_expected_number_of_open_routes() -> None:
    layer, p = prepared(SNR([3, 4], 2, 5, l0_weight=0.1))
    assert_same(layer.auxiliary_loss(), 0.1 * sigmoid(p["log_alpha"] - 0.5 * np.log(0.1 / 1.1)).sum())
    # Of the routes drawn in training this is the share that is not exactly 0.
    layer = SNR([1] * 50, 200, 1).train()
    torch.manual_seed(0)
    drawn = (layer.gates() > 0).sum().item()
    assert drawn == pytest.approx(layer.auxiliary_loss().item(), rel=0.02)


@pytest.mark.parametrize("use_ste", [True, False])
def test_snr_closed_routes_learn_only_by_the_straight_through_estimator(use_ste: bool) -> None:
    layer = SNR([3], 1, 3, snr_type="aver", use_ste=use_ste).eval()
    with torch.no_grad():
        layer.log_alpha.fill_(-5)
    gates = layer.gates()
    assert gates.item() == 0
    gates.sum().backward()
    assert layer.log_alpha.grad is not None
    slope = 1.2 * sigmoid(np.array(-5.0)) * sigmoid(np.array(5.0))
    assert layer.log_alpha.grad.item() == pytest.approx(slope if use_ste else 0.0, rel=1e-5)
