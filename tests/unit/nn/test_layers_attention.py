"""Danger: attention that sees padding, or that is a softmax where the strength of interest should count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layer_oracle import Array, assert_same, mlp, prepared, random, relu, softmax, tensor
from monolith.features import Ragged
from monolith.nn import DIN, DMRU2I, CausalAttention, sequence_mask

MASK = np.array([[True, False, True], [False, False, False]])


@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_din(decay: bool, masked: bool) -> None:
    layer, p = prepared(DIN(4, [6, 1], decay=decay, weight_norm=None))
    q, keys = random(2, 4), random(2, 3, 4)
    query = np.broadcast_to(q[:, None], keys.shape)
    scores = mlp(np.concatenate([query, keys, query - keys, query * keys], 2), p, "attention.", [relu, None])
    scores = scores / 2 if decay else scores
    scores = scores * MASK[:, :, None] if masked else scores
    mask = tensor(MASK) if masked else None
    assert_same(layer(tensor(q), tensor(keys), mask), (scores * keys).sum(1))
    layer.mode = "none"
    assert_same(layer(tensor(q), tensor(keys), mask), scores * keys)


def test_masks_may_be_numbers() -> None:
    layer, _ = prepared(DIN(4, [1]))
    q, keys = tensor(random(2, 4)), tensor(random(2, 3, 4))
    assert torch.equal(layer(q, keys, tensor(MASK.astype(np.float32))), layer(q, keys, tensor(MASK)))


@pytest.mark.parametrize("masked", [True, False])
def test_dmr_u2i(masked: bool) -> None:
    layer, p = prepared(DMRU2I(5, 4, 7, 2))
    item, sequence = random(2, 5), random(2, 3, 4)
    scores = (p["position"][:3] + sequence @ p["content.weight"].T + p["content.bias"]) @ p["score"]
    weights = softmax(np.where(MASK, scores, -1e300)) * MASK if masked else softmax(scores)
    summary = (weights[:, :, None] * sequence).sum(1) @ p["match.weight"].T + p["match.bias"]
    summary = np.where(summary > 0, summary, p["match.activation.slope"] * summary)
    assert_same(layer(tensor(item), tensor(sequence), tensor(MASK) if masked else None), summary * item)


@pytest.mark.parametrize("layer", [DIN(4, [1]), DMRU2I(4, 4, 3, 2)])
def test_padding_changes_nothing_and_gets_no_gradient(layer: torch.nn.Module) -> None:
    query, keys = torch.randn(2, 4), torch.randn(2, 3, 4)
    other = torch.where(tensor(MASK)[:, :, None], keys, 1e3).requires_grad_()
    y = layer(query, other, tensor(MASK))
    torch.testing.assert_close(y, layer(query, keys, tensor(MASK)))
    y.sum().backward()
    assert other.grad is not None
    assert not other.grad[~tensor(MASK)].any()
    assert other.grad.isfinite().all()


def test_sequence_mask_of_splits_and_of_the_ragged_itself() -> None:
    expected = [[True, True], [False, False], [True, False]]
    rows = Ragged.from_lists([[1, 2, 3], [], [4]])
    assert sequence_mask(rows, 2).tolist() == expected
    assert sequence_mask(rows.offsets, 2).tolist() == expected


@pytest.mark.parametrize("num_heads", [1, 2])
def test_causal_attention_is_a_block_of_a_transformer(num_heads: int) -> None:
    layer, p = prepared(CausalAttention(4, num_heads=num_heads))
    x = random(3, 5, 4)

    def norm(values: Array, which: int) -> Array:
        centred = values - values.mean(2, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(2, keepdims=True) + 1e-5)
        return scaled * p[f"norms.{which}.weight"] + p[f"norms.{which}.bias"]

    q, k, v = np.split(norm(x, 0) @ p["project.weight"].T + p["project.bias"], 3, axis=2)
    attended = []
    for head in np.split(np.arange(4), num_heads):
        scores = np.einsum("bik,bjk->bij", q[..., head], k[..., head]) / np.sqrt(len(head))
        scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
        attended.append(softmax(scores) @ v[..., head])
    h = x + np.concatenate(attended, 2) @ p["combine.weight"].T
    hidden = relu(norm(h, 1) @ p["mlp.0.weight"].T + p["mlp.0.bias"])
    assert_same(layer(tensor(x)), h + hidden @ p["mlp.1.weight"].T + p["mlp.1.bias"])


def test_causal_attention_does_not_see_later_steps() -> None:
    layer, _ = prepared(CausalAttention(4))
    x = tensor(random(2, 5, 4))
    later = x.clone()
    later[:, 3:] = 7.0
    assert torch.equal(layer(x)[:, :3], layer(later)[:, :3])
    assert not torch.equal(layer(x)[:, 3:], layer(later)[:, 3:])
