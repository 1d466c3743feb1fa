"""Danger: sparse gradients that escape the joint clipping, or dense ones that are scaled by another norm than theirs together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from monolith import InvalidArgumentError
from monolith.features import Feature
from monolith.nn import EmbeddingBagCollection, clip_grad_norm_, clip_grads_
from monolith.table import SGD, Zeros


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(
            [Feature(name="user", dim=3, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))]
        )
        self.dense = nn.Parameter(torch.zeros(3))

    def backward(self, dense: list[float], *sparse: list[float]) -> None:
        out = self.embeddings({"user": torch.zeros(len(sparse), dtype=torch.int64)})["user"]
        ((self.dense * torch.tensor(dense)).sum() + (out * torch.tensor(sparse)).sum()).backward()

    def sparse_gradients(self) -> list[list[float]]:
        return [row for gradient in self.embeddings.gradients for row in gradient.values.tolist()]


def test_spec_golden() -> None:
    model = Model()
    model.backward([-3.0, 0.0, 0.0], [4.0, 0.0, 0.0])
    assert clip_grad_norm_(model, 4.0).item() == 5.0
    torch.testing.assert_close(model.dense.grad, torch.tensor([-2.4, 0.0, 0.0]))
    torch.testing.assert_close(torch.tensor(model.sparse_gradients()), torch.tensor([[3.2, 0.0, 0.0]]))
    model.embeddings.step()
    torch.testing.assert_close(model.embeddings({"user": torch.tensor([0])})["user"], torch.tensor([[-3.2, 0.0, 0.0]]))


def test_gradients_within_the_limit_are_not_touched() -> None:
    model = Model()
    model.backward([-3.0, 0.0, 0.0], [4.0, 0.0, 0.0])
    before = model.embeddings.gradients
    assert clip_grad_norm_(model).item() == 5.0
    assert model.embeddings.gradients == before
    assert model.dense.grad is not None
    assert model.dense.grad.tolist() == [-3.0, 0.0, 0.0]


def test_the_norm_counts_occurrences_of_one_id_apart() -> None:
    model = Model()
    model.backward([0.0, 0.0, 0.0], [3.0, 0.0, 0.0], [4.0, 0.0, 0.0])
    assert clip_grad_norm_(model).item() == 5.0


def test_a_sparse_limit_of_its_own() -> None:
    model = Model()
    model.backward([-3.0, 0.0, 0.0], [4.0, 0.0, 0.0])
    clip_grad_norm_(model, 10.0, sparse_max_norm=2.5)
    assert model.dense.grad is not None
    assert model.dense.grad.tolist() == [-3.0, 0.0, 0.0]
    assert model.sparse_gradients() == [[2.0, 0.0, 0.0]]


def test_not_a_number_changes_nothing_and_infinity_shows() -> None:
    model = Model()
    model.backward([1.0, 2.0, 3.0], [math.nan, 0.0, 0.0])
    assert math.isnan(clip_grad_norm_(model, 1.0).item())
    assert model.dense.grad is not None
    assert model.dense.grad.tolist() == [1.0, 2.0, 3.0]
    model = Model()
    model.backward([1.0, 2.0, 3.0], [math.inf, 1.0, 0.0])
    assert clip_grad_norm_(model, 1.0).item() == math.inf
    assert model.dense.grad is not None
    assert model.dense.grad.tolist() == [0.0, 0.0, 0.0]
    assert math.isnan(model.sparse_gradients()[0][0])


def test_nothing_to_clip() -> None:
    assert clip_grad_norm_(Model(), 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0


def test_sparse_gradients_alone() -> None:
    model = Model()
    model.backward([0.0, 0.0, 0.0], [8.0, 0.0, 0.0])
    assert clip_grad_norm_(model.embeddings, 4.0).item() == 8.0
    assert model.sparse_gradients() == [[4.0, 0.0, 0.0]]


def test_shared_parts_count_once() -> None:
    model = Model()
    model.backward([-3.0, 0.0, 0.0], [4.0, 0.0, 0.0])
    assert clip_grad_norm_([model, model.embeddings], 1000.0).item() == 5.0


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_none(limit: float) -> None:
    with pytest.raises(InvalidArgumentError, match="max_norm: expected a number above 0"):
        clip_grad_norm_(Model(), limit)


DENSE, SPARSE = [-3.0, 4.0, 0.0], ([6.0, -8.0, 0.0], [0.0, 0.0, 24.0])
"""Norms 5 and 26."""


def scaled(values: object, factor: float) -> torch.Tensor:
    return torch.tensor(values) * factor


CLIPPED: dict[str, tuple[dict, torch.Tensor, torch.Tensor]] = {
    "jointly": ({"limit": 2.0}, scaled(DENSE, 2 / math.sqrt(701)), scaled(SPARSE, 2 / math.sqrt(701))),
    "apart": ({"by": "dense_and_sparse", "limit": 2.0, "sparse_limit": 13.0}, scaled(DENSE, 0.4), scaled(SPARSE, 0.5)),
    "dense only": ({"by": "dense_and_sparse", "limit": 2.0}, scaled(DENSE, 0.4), scaled(SPARSE, 1.0)),
    "each tensor": ({"by": "norm", "limit": 10.0}, scaled(DENSE, 1.0), scaled(SPARSE, 10 / 26)),
    "each tensor, two limits": (
        {"by": "norm", "limit": 2.5, "sparse_limit": 13.0},
        scaled(DENSE, 0.5),
        scaled(SPARSE, 0.5),
    ),
    "each value": (
        {"by": "value", "limit": 3.5},
        torch.tensor([-3.0, 3.5, 0.0]),
        torch.tensor([[3.5, -3.5, 0.0], [0.0, 0.0, 3.5]]),
    ),
    "each value, two limits": (
        {"by": "value", "limit": 1.0, "sparse_limit": 7.0},
        torch.tensor([-1.0, 1.0, 0.0]),
        torch.tensor([[6.0, -7.0, 0.0], [0.0, 0.0, 7.0]]),
    ),
}


@pytest.mark.parametrize(("options", "dense", "sparse"), CLIPPED.values(), ids=CLIPPED)
def test_every_way_to_clip(options: dict, dense: torch.Tensor, sparse: torch.Tensor) -> None:
    model = Model()
    model.backward(DENSE, *SPARSE)
    assert clip_grads_(model, **options).item() == pytest.approx(math.sqrt(701))
    torch.testing.assert_close(model.dense.grad, dense)
    torch.testing.assert_close(torch.tensor(model.sparse_gradients()), sparse)


def test_an_unknown_way_or_limit_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="dense_and_sparse"):
        clip_grads_(Model(), by="values")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="sparse_limit"):
        clip_grads_(Model(), by="norm", sparse_limit=0.0)
