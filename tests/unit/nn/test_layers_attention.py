"""Danger: attention that sees padding, or that is a softmax where the strength of interest should count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layer_oracle import assert_same, mlp, prepared, random, relu, softmax, tensor
from monolith.features import Ragged
from monolith.nn import DIN, DMRU2I, sequence_mask

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
