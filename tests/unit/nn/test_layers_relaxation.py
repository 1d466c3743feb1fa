"""Danger: a relaxed top-k that is not near the k largest, and a counter that counts gradients instead of occurrences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layer_oracle import assert_same, random, softmax, tensor
from monolith import EmbeddingTable, InvalidArgumentError, Segment, TableConfig
from monolith.nn import Embedding, continuous_topk, fid_counter, gumbel_keys, sample_subset
from monolith.table import SGD, Zeros


def test_continuous_topk_is_k_damped_softmaxes() -> None:
    w = random(3, 6)
    keys, chosen, total = w, np.zeros_like(w), np.zeros_like(w)
    for _ in range(3):
        keys = keys + np.log(1 - chosen)
        chosen = softmax(keys / 0.5)
        total = total + chosen
    assert_same(continuous_topk(tensor(w), 3, 0.5), total)


def test_a_low_temperature_gives_the_k_largest_and_stays_differentiable() -> None:
    w = tensor(random(4, 6)).requires_grad_()
    chosen = continuous_topk(w, 2, 0.001)
    expected = torch.zeros(4, 6, dtype=torch.float64).scatter(1, w.topk(2).indices, 1.0)
    torch.testing.assert_close(chosen, expected, atol=1e-3, rtol=0)
    chosen.sum().backward()
    assert w.grad is not None
    assert w.grad.isfinite().all()


def test_gumbel_keys_draw_in_proportion_to_the_exponentials() -> None:
    w = torch.tensor([0.0, 1.0, 2.0]).expand(20000, 3)
    share = torch.bincount(gumbel_keys(w, generator=torch.Generator().manual_seed(0)).argmax(1), minlength=3) / 20000
    assert_same(share, softmax(np.arange(3.0)), 0.02)


def test_sample_subset_sums_to_k_and_repeats_with_its_generator() -> None:
    first, second = (sample_subset(torch.zeros(5, 7), 3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first.sum(1), torch.full((5,), 3.0))


def test_k_must_fit() -> None:
    with pytest.raises(InvalidArgumentError, match="k: expected an int from 1 to 4, got 5"):
        continuous_topk(torch.zeros(4), 5, 0.1)


def test_fid_counter_counts_occurrences_in_a_table_up_to_its_threshold() -> None:
    segment = Segment(dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))
    counter = Embedding(EmbeddingTable(TableConfig(name="counter", segments=(segment,))))
    ids = torch.tensor([7, 7, 8])
    for _ in range(3):
        (0.0 * fid_counter(counter(ids), threshold=3.0).sum()).backward()
    counter.eval()
    assert counter(torch.tensor([7, 8, 9])).flatten().tolist() == [4.0, 3.0, 0.0]
    assert fid_counter(counter(torch.tensor([7, 8])), threshold=3.0).flatten().tolist() == [3.0, 3.0]
