"""Danger: gates on the wrong feature or dimension, and auxiliary losses that are never added, as in the original."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from layer_oracle import assert_same, mlp, prepared, random, relu, sigmoid, softmax, tensor
from monolith.nn import SNR, IRazor, MMoE, SENet, auxiliary_loss


def test_senet_weighs_features_by_an_mlp_of_their_means() -> None:
    layer, p = prepared(SENet(5, 2, weight_norm=None))
    x = random(3, 5, 4)
    weights = mlp(x.mean(2), p, "excitation.", [relu, sigmoid])
    assert_same(layer(tensor(x)), x * weights[:, :, None])


def test_senet_without_an_mlp_weighs_by_the_means() -> None:
    x = random(3, 5, 4)
    assert_same(SENet(5)(tensor(x)), x * x.mean(2, keepdims=True))


def test_irazor_masks_groups_of_dimensions_by_a_softmax_per_feature() -> None:
    layer, p = prepared(IRazor(3, [0, 1, 4, 6], temperature=0.5, feature_weight=[1.0, 2.0, 3.0]))
    probability = softmax(p["logits"] / 0.5)
    mask = probability[:, [1, 2, 2, 2, 3, 3]]
    x = random(5, 3, 6)
    assert_same(layer(tensor(x)), x * mask)
    assert_same(layer.auxiliary_loss(), np.dot([1.0, 2.0, 3.0], mask.sum(1)))


def test_irazor_without_feature_weights_has_no_loss() -> None:
    assert IRazor(3, [0, 4]).auxiliary_loss().item() == 0


def test_auxiliary_losses_of_all_layers_are_found_and_train() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "razor": IRazor(2, [0, 2, 4], feature_weight=[1.0, 1.0]),
            "experts": nn.Sequential(nn.Linear(4, 4), MMoE(4, 2, [3], num_experts=4, gate_type="noise_topk", top_k=2)),
            "routes": SNR([3, 3], 2, 3),
        }
    )
    model["experts"](torch.randn(7, 4))
    parts = [module.auxiliary_loss() for module in model.modules() if isinstance(module, IRazor | MMoE | SNR)]
    assert all(part > 0 for part in parts)
    total = auxiliary_loss(model)
    torch.testing.assert_close(total, torch.stack(parts).sum())
    total.backward()
    for name in ("razor.logits", "routes.log_alpha", "experts.1.gate_weight", "experts.1.noise_weight"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        assert gradient.any(), name


def test_a_model_without_auxiliary_losses_has_zero() -> None:
    assert auxiliary_loss(nn.Linear(2, 2)).item() == 0
