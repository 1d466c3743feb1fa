"""Danger: a loss that is not the one in the formula, or bad labels that train silently."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Ragged
from monolith.nn.heads import logits_by_head, total_loss
from monolith.train import Head

Z = np.array([-3.0, -0.5, 0.0, 0.7, 4.0])
Y = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
W = np.array([1.0, 2.0, 0.0, 0.5, 3.0])
R = np.array([1.0, 0.1, 0.5, 0.25, 1.0])


def cross_entropy(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    p = 1 / (1 + np.exp(-z))
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


def batch(**extra: np.ndarray) -> dict[str, torch.Tensor]:
    columns = {"y": Y, "w": W, "r": R, **extra}
    return {name: torch.from_numpy(column).float() for name, column in columns.items()}


def loss(head: Head, z: np.ndarray = Z, **extra: np.ndarray) -> float:
    return head.loss(torch.from_numpy(z).float(), batch(**extra)).item()


def test_binary_loss_is_the_sum_of_cross_entropies() -> None:
    assert loss(Head(label="y")) == pytest.approx(cross_entropy(Z, Y).sum(), rel=1e-6)
    assert loss(Head(label="y", reduction="mean")) == pytest.approx(cross_entropy(Z, Y).mean(), rel=1e-6)


def test_logits_may_have_a_second_dimension_of_one() -> None:
    assert loss(Head(label="y"), Z[:, None]) == loss(Head(label="y"))


def test_weights_multiply_examples() -> None:
    assert loss(Head(label="y", sample_weight="w")) == pytest.approx((W * cross_entropy(Z, Y)).sum(), rel=1e-6)


def test_sample_rate_shifts_the_trained_logit_and_not_the_prediction() -> None:
    head = Head(label="y", sample_rate="r")
    assert loss(head) == pytest.approx(cross_entropy(Z - np.log(R), Y).sum(), rel=1e-6)
    predicted = head.predict(torch.from_numpy(Z).float())
    assert predicted.numpy() == pytest.approx(1 / (1 + np.exp(-Z)), rel=1e-6)


def test_correction_recovers_the_rate_of_the_whole_stream() -> None:
    # 10% positives; negatives kept at 1/5, so 10 of 28 remain positive. A constant logit is fitted by Newton's method.
    y = torch.cat([torch.ones(100), torch.zeros(180)])
    columns = {"y": y, "r": torch.full_like(y, 0.2)}
    logit = torch.zeros((), requires_grad=True)
    head = Head(label="y", sample_rate="r")
    for _ in range(20):
        loss = head.loss(logit.expand(len(y)), columns)
        (slope,) = torch.autograd.grad(loss, logit, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, logit)
        with torch.no_grad():
            logit -= slope / curvature
    assert head.predict(logit.detach().reshape(1)).item() == pytest.approx(0.1, abs=1e-4)


def test_masked_examples_do_not_count_even_with_broken_labels() -> None:
    keep = np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    broken = np.where(keep, Y, np.nan)
    expected = cross_entropy(Z, Y)[keep > 0]
    assert loss(Head(label="b", mask="m"), m=keep, b=broken) == pytest.approx(expected.sum(), rel=1e-6)
    mean = Head(label="b", mask="m", reduction="mean")
    assert loss(mean, m=keep, b=broken) == pytest.approx(expected.mean(), rel=1e-6)
    assert loss(mean, m=np.zeros(5), b=broken) == 0.0


def test_regression_and_multiclass() -> None:
    assert loss(Head(label="y", kind="regression")) == pytest.approx(np.square(Z - Y).sum(), rel=1e-6)
    logits = np.random.default_rng(0).normal(size=(5, 3))
    classes = np.array([0, 2, 1, 1, 0])
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    head = Head(label="c", kind="multiclass")
    assert loss(head, logits, c=classes) == pytest.approx(-np.log(softmax[np.arange(5), classes]).sum(), rel=1e-6)
    assert head.predict(torch.from_numpy(logits)).numpy() == pytest.approx(softmax)


def test_total_is_the_weighted_sum_of_heads() -> None:
    heads = [Head(name="a", label="y"), Head(name="b", label="y", kind="regression", weight=0.25)]
    z = torch.from_numpy(Z).float()
    total = total_loss({"a": z, "b": 2 * z}, batch(), heads).item()
    assert total == pytest.approx(cross_entropy(Z, Y).sum() + 0.25 * np.square(2 * Z - Y).sum(), rel=1e-6)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (Head(label="yy"), r"head 'output', label: the batch has no column 'yy'; it has 'y', 'w'"),
        (Head(label="nan"), r"column 'nan' must hold numbers in \[0, 1\], got nan"),
        (Head(label="inf", kind="regression"), r"must hold finite numbers, got inf"),
        (Head(label="minus"), r"must hold numbers in \[0, 1\], got -1.0; filter such examples out, or name a `mask`"),
        (Head(label="minus", kind="multiclass"), r"must hold classes from 0, got -1"),
        (Head(label="tags"), r"column 'tags' must be a tensor, got Ragged"),
        (Head(label="short"), r"expected logits \[2\]"),
        (Head(label="y", sample_rate="zero"), r"column 'zero' must be in \(0, 1\], got values from 0"),
        (Head(label="y", sample_weight="nothing"), r"sample_weight: the batch has no column 'nothing'"),
        (Head(label="y", kind="multiclass"), r"expected logits \[5, classes\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_columns_are_named(head: Head, message: str) -> None:
    columns = {
        **batch(),
        "nan": torch.tensor([0.0, float("nan"), 1.0, 0.0, 0.0]),
        "inf": torch.full((5,), float("inf")),
        "short": torch.ones(2),
        "minus": torch.tensor([0.0, 1.0, -1.0, 1.0, 0.0]),
        "zero": torch.zeros(5),
        "tags": Ragged.from_lists([[1]] * 5),
    }
    with pytest.raises(InvalidArgumentError, match=message):
        head.loss(torch.from_numpy(Z).float(), columns)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "regression", "sample_rate": "r"}, "sample_rate corrects the logit of a binary head"),
        ({"kind": "regression", "metrics": ("auc",)}, "auc is not for a regression head"),
        ({"metrics": ("gauc",)}, "gauc needs `group`"),
        ({"metrics": ("acu",)}, "metrics"),
        ({"name": ""}, "name"),
        ({"weight": 0.0}, "weight"),
        ({"lable": "y"}, "did you mean 'label'"),
    ],
)
def test_bad_heads_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Head(**fields)  # type: ignore[arg-type]


def test_outputs_must_name_every_head() -> None:
    heads = [Head(name="ctr"), Head(name="cvr")]
    with pytest.raises(InvalidArgumentError, match=r"expected a mapping with the logits of 'ctr', 'cvr', got Tensor"):
        logits_by_head(torch.ones(2), heads)
    with pytest.raises(InvalidArgumentError, match=r"no logits for head 'cvr'; the model returned 'ctr', 'other'"):
        logits_by_head({"ctr": torch.ones(2), "other": torch.ones(2)}, heads)


def test_a_class_beyond_the_logits_is_named() -> None:
    head = Head(label="c", kind="multiclass")
    with pytest.raises(InvalidArgumentError, match=r"column 'c' has class 3, but the model gives 3 logits"):
        head.loss(torch.zeros(2, 3), {"c": torch.tensor([0, 3])})
