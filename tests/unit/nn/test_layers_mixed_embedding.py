"""Danger: a search over embedding sizes that never tries some of them, or cannot learn from what it tried."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layer_oracle import assert_same, prepared, random, softmax, tensor
from monolith import InvalidArgumentError
from monolith.nn import MixedEmbedding


def test_serving_uses_the_likeliest_size() -> None:
    layer, p = prepared(MixedEmbedding([2, 0, 5], 4))
    x = random(3, 7)
    for choice, expected in [(0, x[:, :2] @ p["projections.0.weight"].T), (1, np.zeros((3, 4)))]:
        with torch.no_grad():
            layer.logits.zero_()[choice] = 1
        assert_same(layer(tensor(x)), expected)
    with torch.no_grad():
        layer.logits[2] = 2
    assert_same(layer(tensor(x)), x[:, 2:] @ p["projections.1.weight"].T)
    assert layer.size() == 5


def test_training_draws_sizes_by_their_probability() -> None:
    layer, p = prepared(MixedEmbedding([1, 2, 3], 1))
    layer.train()
    torch.manual_seed(0)
    x = random(1, 6)
    candidates = [x[:, a:b] @ p[f"projections.{i}.weight"].T for i, (a, b) in enumerate([(0, 1), (1, 3), (3, 6)])]
    drawn = np.array([layer(tensor(x)).item() for _ in range(2000)])
    counts = [np.isclose(drawn, candidate.item()).sum() for candidate in candidates]
    assert sum(counts) == 2000
    np.testing.assert_allclose(np.array(counts) / 2000, softmax(p["logits"]), atol=0.04)


def test_the_gradient_of_the_choice_is_that_of_the_softmax() -> None:
    layer, p = prepared(MixedEmbedding([1, 2], 1))
    x = random(4, 3)
    layer(tensor(x)).sum().backward()
    values = np.array([(x[:, :1] @ p["projections.0.weight"].T).sum(), (x[:, 1:] @ p["projections.1.weight"].T).sum()])
    probability = softmax(p["logits"])
    assert_same(layer.logits.grad, probability * (values - (probability * values).sum()))


def test_pretraining_is_uniform_and_warmup_keeps_size_zero_out() -> None:
    layer = MixedEmbedding([0, 2, 4], 3, pretraining_steps=2, warmup_steps=3)
    with torch.no_grad():
        layer.logits.copy_(torch.tensor([5.0, 0.0, 0.0]))
    x = torch.zeros(1, 6)
    seen = []
    for _ in range(4):
        seen.append([round(value, 2) for value in layer.probabilities().tolist()])
        layer(x)
    assert seen == [[0.0, 0.5, 0.5], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5], [0.99, 0.01, 0.01]]
    assert layer.state_dict()["calls"].item() == 4
    layer.eval()(x)
    assert layer.calls.item() == 4


@pytest.mark.parametrize("sizes", [[], [0], [2, 2], [-1, 2]])
def test_wrong_sizes(sizes: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="sizes: expected different sizes >= 0, one of them > 0"):
        MixedEmbedding(sizes, 4)
