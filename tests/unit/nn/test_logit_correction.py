"""Danger: probabilities that are off by the sampling rate: correcting what is served, or not correcting what is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layer_oracle import assert_same, random, sigmoid, tensor
from monolith import InvalidArgumentError
from monolith.nn import LogitCorrection, correct_logits, get_sigmoid_loss_and_pred, get_softmax_loss_and_pred

Z, RATE = 3 * random(8), np.linspace(0.05, 1, 8)
LABELS = np.array([0, 1, 0, 1, 1, 0, 0, 1.0])


def bce(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -(y * np.log(sigmoid(z)) + (1 - y) * np.log(1 - sigmoid(z)))


@pytest.mark.parametrize("sample_bias", [True, False])
@pytest.mark.parametrize("rate", [RATE, None])
def test_formula(sample_bias: bool, rate: np.ndarray | None) -> None:
    expected = np.log(sigmoid(Z)) if sample_bias else Z
    expected = expected if rate is None else expected - np.log(rate)
    corrected = correct_logits(tensor(Z), None if rate is None else tensor(rate), sample_bias=sample_bias)
    assert_same(corrected, expected)


def test_trains_on_the_corrected_and_serves_the_plain_logit() -> None:
    layer = LogitCorrection(activation="sigmoid", sample_bias=True)
    assert_same(layer(tensor(Z), tensor(RATE)), sigmoid(np.log(sigmoid(Z)) - np.log(RATE)))
    layer.eval()
    assert_same(layer(tensor(Z), tensor(RATE)), sigmoid(Z))
    assert_same(layer(tensor(Z)), sigmoid(Z))


def test_a_model_of_sampled_data_learns_the_rate_before_sampling() -> None:
    clicks, shows, rate = 50, 1000, 0.1
    kept_negatives = (shows - clicks) * rate
    labels = torch.cat([torch.ones(clicks), torch.zeros(int(kept_negatives))]).double()
    z = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([z], max_iter=50)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss, _ = get_sigmoid_loss_and_pred(z.expand(len(labels)), labels, sample_rate=rate)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.sigmoid(z).item() == pytest.approx(clicks / shows, rel=1e-4)


def test_sigmoid_loss_is_summed_masked_and_weighed() -> None:
    mask, weight = np.array([1, 1, 0, 1, 1, 1, 0, 1.0]), np.arange(8.0)
    loss, pred = get_sigmoid_loss_and_pred(
        tensor(Z), tensor(LABELS), sample_rate=tensor(RATE), mask=tensor(mask), instance_weight=tensor(weight)
    )
    assert_same(loss, (bce(Z - np.log(RATE), LABELS) * mask * weight).sum())
    assert_same(pred, sigmoid(Z))


def test_prediction_after_correction_and_clipping_of_the_loss() -> None:
    limit = np.log(0.9 / 0.1)
    loss, pred = get_sigmoid_loss_and_pred(
        tensor(Z),
        tensor(LABELS),
        sample_rate=tensor(RATE),
        sample_bias=True,
        logit_clip_threshold=0.1,
        predict_before_correction=False,
    )
    corrected = np.log(sigmoid(Z)) - np.log(RATE)
    assert_same(loss, bce(np.clip(corrected, -limit, limit), LABELS).sum())
    assert_same(pred, sigmoid(corrected))
    with pytest.raises(InvalidArgumentError, match="logit_clip_threshold"):
        get_sigmoid_loss_and_pred(tensor(Z), tensor(LABELS), logit_clip_threshold=0.5)


def test_extreme_logits_stay_finite() -> None:
    z = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss, _ = get_sigmoid_loss_and_pred(z, torch.tensor([1.0, 0.0]), sample_rate=0.5, sample_bias=True)
    loss.backward()
    assert loss.isfinite()
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_softmax_loss_is_per_example() -> None:
    z, labels = random(5, 3), np.array([0, 2, 1, 1, 0])
    loss, pred = get_softmax_loss_and_pred(tensor(z), tensor(labels))
    assert_same(loss, np.log(np.exp(z).sum(1)) - z[np.arange(5), labels])
    assert pred.tolist() == z.argmax(1).tolist()
