"""One of every layer with an example batch, for the promises that all layers make alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from monolith import nn as mnn

B = 6

Make = Callable[[], nn.Module]
Inputs = Callable[[int], tuple[Any, ...]]


def _random(rows: int, *dims: int) -> torch.Tensor:
    size = (rows, *dims)
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def _mask(rows: int, steps: int) -> torch.Tensor:
    """Holes anywhere, and a row without any step."""
    mask = torch.rand(rows, steps, generator=torch.Generator().manual_seed(rows)) < 0.6
    mask[0] = False
    return mask


CATALOG: dict[str, tuple[Make, Inputs]] = {
    "AGRU": (lambda: mnn.AGRU(mnn.AGRUCell(3, 4)), lambda b: (_random(b, 3, 3), _random(b, 3).sigmoid(), _mask(b, 3))),
    "AGRUCell": (
        lambda: mnn.AGRUCell(3, 4, att_type="AUGRU"),
        lambda b: (_random(b, 3), _random(b, 4), _random(b, 1).sigmoid()),
    ),
    "AddBias": (lambda: mnn.AddBias([3, 4]), lambda b: (_random(b, 3, 4),)),
    "AllInt": (lambda: mnn.AllInt(5, 2), lambda b: (_random(b, 5, 4),)),
    "AutoInt": (lambda: mnn.AutoInt(4, 2, num_heads=2), lambda b: (_random(b, 5, 4),)),
    "AutoInt plain": (lambda: mnn.AutoInt(4, 2, projected=False), lambda b: (_random(b, 5, 4),)),
    "AvgPooling": (mnn.AvgPooling, lambda b: ([_random(b, 4), _random(b, 4)],)),
    "BatchNorm": (lambda: mnn.BatchNorm(4), lambda b: (_random(b, 3, 4),)),
    "CAN": (lambda: mnn.CAN(3, is_seq=True), lambda b: (_random(b, 2, 5, 3), _random(b, 24))),
    "CDot": (lambda: mnn.CDot(5, 4, 2, [6]), lambda b: (_random(b, 5, 4),)),
    "CGC": (lambda: mnn.CGC(4, 2, 3), lambda b: ([_random(b, 4)] * 3,)),
    "CIN": (lambda: mnn.CIN(5, [4, 3], activation="relu"), lambda b: (_random(b, 5, 4),)),
    "CausalAttention": (lambda: mnn.CausalAttention(4, num_heads=2), lambda b: (_random(b, 5, 4),)),
    "DCN": (lambda: mnn.DCN(5, 2, weight_norm="fixed"), lambda b: (_random(b, 5),)),
    "DCN mixed": (lambda: mnn.DCN(5, 2, dcn_type="mixed", num_experts=3, low_rank=2), lambda b: (_random(b, 5),)),
    "DCN vector": (lambda: mnn.DCN(5, 2, dcn_type="vector"), lambda b: (_random(b, 5),)),
    "DIEN": (lambda: mnn.DIEN(3, 4, 5), lambda b: (_random(b, 3), _random(b, 3, 4), _mask(b, 3))),
    "DIN": (lambda: mnn.DIN(4, [8, 1], decay=True), lambda b: (_random(b, 4), _random(b, 5, 4), _mask(b, 5))),
    "DMRU2I": (lambda: mnn.DMRU2I(3, 4, 7, 2), lambda b: (_random(b, 3), _random(b, 5, 4), _mask(b, 5))),
    "Dense": (
        lambda: mnn.Dense(4, 3, activation="relu", weight_norm="learnable", inactive_relu_decay=0.1),
        lambda b: (_random(b, 4),),
    ),
    "DotInteraction": (mnn.DotInteraction, lambda b: (_random(b, 5, 4),)),
    "DotInteraction dense": (mnn.DotInteraction, lambda b: (_random(b, 5, 4), _random(b, 4))),
    "FFM": (lambda: mnn.FFM(embed_dim=4, attention_units=[3, 1]), lambda b: (_random(b, 2, 4), _random(b, 3, 4))),
    "FFM dot": (lambda: mnn.FFM(interaction_type="dot"), lambda b: (_random(b, 2, 4), _random(b, 3, 4))),
    "FM": (mnn.FM, lambda b: (_random(b, 5, 4),)),
    "IRazor": (lambda: mnn.IRazor(3, [0, 1, 4], feature_weight=[1, 2, 3]), lambda b: (_random(b, 3, 4),)),
    "LHUCTower": (
        lambda: mnn.LHUCTower(4, [6, 2], gate_features=3, lhuc_output_dims=[5], batch_norm=True),
        lambda b: (_random(b, 4), _random(b, 3)),
    ),
    "LogitCorrection": (
        lambda: mnn.LogitCorrection(activation="sigmoid", sample_bias=True),
        lambda b: (_random(b, 1), _random(b, 1).sigmoid()),
    ),
    "MLP": (lambda: mnn.MLP(4, [6, 5, 2], activations="prelu"), lambda b: (_random(b, 3, 4),)),
    "MLP renorm": (lambda: mnn.MLP(4, [6, 2], batch_norm=True, batch_renorm=True), lambda b: (_random(b, 4),)),
    "MMoE": (lambda: mnn.MMoE(4, 2, [[6, 3], [3]], gate_features=2), lambda b: (_random(b, 4), _random(b, 2))),
    "MMoE topk": (
        lambda: mnn.MMoE(4, 2, [6, 3], num_experts=4, gate_type="noise_topk", top_k=2),
        lambda b: (_random(b, 4),),
    ),
    "MaxPooling": (mnn.MaxPooling, lambda b: ([_random(b, 4), _random(b, 4)],)),
    "MixedEmbedding": (lambda: mnn.MixedEmbedding([0, 2, 5], 4), lambda b: (_random(b, 7),)),
    "SENet": (lambda: mnn.SENet(5, 2), lambda b: (_random(b, 5, 4),)),
    "SNR": (lambda: mnn.SNR([3, 4], 2, 5), lambda b: ([_random(b, 3), _random(b, 4)],)),
    "SNR aver": (lambda: mnn.SNR([3, 3], 2, 3, snr_type="aver", use_ste=True), lambda b: ([_random(b, 3)] * 2,)),
    "Sigmoid2": (mnn.Sigmoid2, lambda b: (_random(b, 4),)),
    "SumPooling": (mnn.SumPooling, lambda b: ([_random(b, 4), _random(b, 4)],)),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """The layer with parameters off their symmetric starting points, so that a forgotten one shows."""
    torch.manual_seed(seed)
    layer = CATALOG[name][0]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def inputs(name: str, rows: int = B) -> tuple[Any, ...]:
    """A batch for that layer."""
    return CATALOG[name][1](rows)


def tensors(tree: Any) -> list[torch.Tensor]:  # noqa: ANN401 - a tensor, or tuples and lists of them
    """The leaves."""
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for branch in tree for leaf in tensors(branch)]
