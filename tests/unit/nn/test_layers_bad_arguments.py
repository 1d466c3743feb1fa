"""Danger: a wrong size that broadcasts into a wrong answer, or surfaces as a matmul error without the name of the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layer_catalog import CATALOG, build, inputs
from monolith import InvalidArgumentError, nn

x = torch.zeros

CONSTRUCTORS: dict[str, tuple[Callable[[Any], object], str]] = {
    "size zero": (lambda c: nn.MLP(0, [1]), r"MLP\.in_features: expected an int >= 1, got 0"),
    "size true": (lambda c: nn.Dense(c(True), 1), r"Dense\.in_features: expected an int >= 1, got True"),
    "no layers": (lambda c: nn.MLP(2, []), r"MLP\.output_dims: expected at least one layer size"),
    "negative layer": (lambda c: nn.MLP(2, [3, -1]), r"MLP\.output_dims\[1\]: expected an int >= 1, got -1"),
    "activations": (lambda c: nn.MLP(2, [3, 1], activations=["relu"]), "activations: expected one per layer, 2, got 1"),
    "weight norm": (lambda c: nn.Dense(2, 3, weight_norm=c("on")), "weight_norm: expected one of None, 'fixed'"),
    "dead relu": (lambda c: nn.Dense(2, 3, inactive_relu_decay=0.1), "needs activation 'relu', got None"),
    "dead decay": (lambda c: nn.Dense(2, 3, activation="relu", inactive_relu_decay=0), r"a number in \(0, 1\], got 0"),
    "lhuc lists": (lambda c: nn.LHUCTower(4, [6, 2], lhuc_output_dims=[[6]]), "for each of 2 layers"),
    "lhuc mixed": (lambda c: nn.LHUCTower(4, [6, 2], lhuc_output_dims=c([[6], 2])), "for each of 2 layers"),
    "lhuc end": (lambda c: nn.LHUCTower(4, [6], lhuc_output_dims=[[3, 5]]), r"\[0\]: expected the last to be 6"),
    "momentum": (lambda c: nn.BatchNorm(3, momentum=0.0), r"momentum: expected a number in \(0, 1\]"),
    "cross type": (lambda c: nn.DCN(4, dcn_type=c("v2")), "expected one of 'vector', 'matrix', 'mixed', got 'v2'"),
    "low rank": (lambda c: nn.DCN(4, dcn_type="mixed"), r"DCN\.low_rank: expected an int >= 1, got 0"),
    "dropout": (lambda c: nn.DCN(4, dropout=1.0), r"DCN\.dropout: expected a number in \[0, 1\)"),
    "ffm type": (lambda c: nn.FFM(interaction_type=c("add")), "expected one of 'multiply', 'dot'"),
    "ffm dot": (
        lambda c: nn.FFM(interaction_type="dot", embed_dim=4, attention_units=[1]),
        "needs interaction_type 'multiply' and embed_dim",
    ),
    "ffm end": (lambda c: nn.FFM(embed_dim=4, attention_units=[2]), "attention_units: expected the last to be 1"),
    "heads": (lambda c: nn.AutoInt(4, num_heads=3), "expected a divisor of embed_dim 4"),
    "plain heads": (lambda c: nn.AutoInt(4, num_heads=2, projected=False), "1 if not projected"),
    "causal heads": (
        lambda c: nn.CausalAttention(4, num_heads=3),
        "num_heads: expected a divisor of embed_dim 4, got 3",
    ),
    "din end": (lambda c: nn.DIN(4, [8]), r"DIN\.hidden_units: expected the last to be 1, got \[8\]"),
    "din mode": (lambda c: nn.DIN(4, [1], mode=c("max")), "expected one of 'sum', 'none', got 'max'"),
    "attention": (lambda c: nn.DIEN(3, 4, 5, att_type=c("LSTM")), "expected one of 'GRU', 'AGRU', 'AUGRU'"),
    "nas space": (lambda c: nn.IRazor(3, [1, 4]), r"ascending sizes from 0 to the embedding's, .* got \[1, 4\]"),
    "nas order": (lambda c: nn.IRazor(3, [0, 4, 4]), "ascending sizes"),
    "nas weights": (lambda c: nn.IRazor(3, [0, 4], feature_weight=[1.0]), "for each of 3 features, got 1"),
    "nas temperature": (lambda c: nn.IRazor(3, [0, 4], temperature=0.0), "temperature: expected a number > 0"),
    "experts": (lambda c: nn.MMoE(4, 2, [3]), r"MMoE\.num_experts: needed"),
    "expert count": (lambda c: nn.MMoE(4, 2, [[3], [3]], num_experts=3), "for each of 3 experts"),
    "expert ends": (lambda c: nn.MMoE(4, 2, [[3], [2]]), "the same last size for all experts"),
    "gate type": (lambda c: nn.MMoE(4, 2, [3], num_experts=2, gate_type=c("max")), "'softmax', 'topk', 'noise_topk'"),
    "cgc experts": (lambda c: nn.CGC(4, 2, 3, num_experts=0), r"CGC\.num_experts: expected an int >= 1, got 0"),
    "top k": (
        lambda c: nn.MMoE(4, 2, [3], num_experts=2, gate_type="topk", top_k=3),
        "from 1 to the number of experts, 2",
    ),
    "aver": (lambda c: nn.SNR([3, 4], 2, 3, snr_type="aver"), "expected only 3, out_subnet_dim"),
    "zeta": (lambda c: nn.SNR([3], 2, 3, zeta=1.0), "zeta: expected a number > 1"),
    "gamma": (lambda c: nn.SNR([3], 2, 3, gamma=0.0), "gamma: expected a number < 0"),
    "lambda topn": (lambda c: nn.DCGLambdaWeight(topn=0), "topn: expected an int >= 1"),
    "lambda smooth": (
        lambda c: nn.DCGLambdaWeight(smooth_fraction=1.1),
        r"smooth_fraction: expected a number in \[0, 1\]",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_wrong_constructor_arguments_are_named(name: str) -> None:
    make, message = CONSTRUCTORS[name]

    def untyped(value: Any) -> Any:  # noqa: ANN401 - what a type checker would refuse
        return value

    with pytest.raises(InvalidArgumentError, match=message):
        make(untyped)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "mlp": (lambda: nn.MLP(4, [2])(x(3, 5)), r"Dense\.x: expected shape \[\*, 4\], got \[3, 5\]"),
    "features": (lambda: nn.SENet(5)(x(3, 4, 2)), r"SENet\.x: expected shape \[B, 5, k\], got \[3, 4, 2\]"),
    "flat": (lambda: nn.FM()(x(3, 4)), r"FM\.x: expected shape \[B, n, k\], got \[3, 4\]"),
    "ffm": (lambda: nn.FFM()(x(3, 2, 4), x(3, 2, 1)), r"FFM\.right: expected shape \[B, R, 4\], got \[3, 2, 1\]"),
    "can": (lambda: nn.CAN(3)(x(2, 3), x(2, 23)), r"CAN\.item: expected shape \[B, 24\], got \[2, 23\]"),
    "mask": (
        lambda: nn.DIN(4, [1])(x(2, 4), x(2, 3, 4), x(2, 1)),
        r"DIN\.mask: expected shape \[2, 3\], one per step, got \[2, 1\]",
    ),
    "too long": (lambda: nn.DMRU2I(4, 4, 2, 2)(x(2, 4), x(2, 3, 4)), "at most max_length=2 steps, got 3"),
    "no steps": (lambda: nn.DIEN(3, 4, 5)(x(2, 3), x(2, 0, 4)), "steps: expected an int >= 1, got 0"),
    "gate": (lambda: nn.LHUCTower(4, [2], gate_features=3)(x(2, 4)), r"LHUCTower\.u: expected shape \[\*, 3\]"),
    "inputs": (lambda: nn.SNR([3, 4], 2, 5)([x(2, 3)]), r"SNR\.inputs: expected 2 tensors, got 1"),
    "input": (lambda: nn.SNR([3, 4], 2, 5)([x(2, 3), x(2, 3)]), r"SNR\.inputs\[1\]: expected shape \[B, 4\]"),
    "splits": (lambda: nn.sequence_mask(x(2, 2), 3), r"sequence_mask\.offsets: expected shape \[B \+ 1\]"),
    "labels": (lambda: nn.softmax_loss(x(2, 3), x(2, 4)), r"labels: expected shape \[2, 3\], got \[2, 4\]"),
    "weights": (lambda: nn.softmax_loss(x(2, 3), x(2, 3), x(2, 2)), r"weights: expected shape \[2, 3\], got \[2, 2\]"),
    "list weights": (lambda: nn.list_mle_loss(x(2, 3), x(2, 3), x(2, 3)), r"weights: expected shape \[2, 1\]"),
    "flat lists": (lambda: nn.list_mle_loss(x(3), x(3)), r"logits: expected shape \[B, L\], got \[3\]"),
    "auc": (lambda: nn.inbatch_auc_loss(x(3), x(3, 1)), r"labels: expected shape \[3\], got \[3, 1\]"),
    "sigmoid": (lambda: nn.get_sigmoid_loss_and_pred(x(3, 1), x(3)), r"labels: expected shape \[3, 1\], got \[3\]"),
    "pairs": (lambda: nn.batch_softmax_loss(x(3, 2), x(2, 2), x(3), x(3)), r"item: expected shape \[3, 2\]"),
    "not a tensor": (lambda: nn.FM()([1.0]), r"FM\.x: expected a tensor, got list"),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_inputs_are_named_with_their_shapes(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(InvalidArgumentError, match=message):
        call()


FREE = {
    "AvgPooling",
    "DotInteraction",
    "FFM",
    "FFM dot",
    "FM",
    "LogitCorrection",
    "MaxPooling",
    "Sigmoid2",
    "SumPooling",
}


@pytest.mark.parametrize("name", [name for name in CATALOG if name not in FREE])
def test_every_layer_with_a_size_refuses_another_last_dimension(name: str) -> None:
    first, *rest = inputs(name)
    wrong = (
        [torch.cat([part, part], -1) for part in first] if isinstance(first, list) else torch.cat([first, first], -1)
    )
    if name in {"AllInt", "CIN", "SENet"}:  # free in the embedding size, not in the number of features
        wrong = torch.cat([first, first], 1)
    with pytest.raises(InvalidArgumentError, match="expected shape"):
        build(name)(wrong, *rest)
