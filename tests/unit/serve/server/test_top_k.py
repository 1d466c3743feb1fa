"""Danger: a ranking of candidates that differs from sorting the predictions of all rows, or depends on ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Ragged
from monolith.serve import Client
from monolith.serve.replica import Replica
from monolith.serve.server.model_server import ModelServer
from monolith.serve.server.ranking import broadcast_context, top_rows


def test_the_best_rows_are_those_of_all_predictions(clicks: tuple[ModelServer, Replica]) -> None:
    server, replica = clicks
    items = torch.arange(200)
    user = {"user": torch.tensor([3]), "tags": Ragged.from_lists([[1, 2, 5]]), "age": torch.tensor([[0.5]])}
    repeated = {
        "user": torch.full((200,), 3),
        "tags": Ragged.from_lists([[1, 2, 5]] * 200),
        "age": torch.full((200, 1), 0.5),
        "item": items,
    }
    scores = replica.predict(repeated)["click"]
    order = sorted(range(200), key=lambda row: (-float(scores[row]), row))[:7]
    with Client(server.http_address) as client:
        answer = client.infer({**user, "item": items}, top_k=7, output="click")
    assert answer["indices"].tolist() == order
    np.testing.assert_array_equal(answer["scores"], scores[order].numpy())


def test_ties_keep_the_order_of_rows_and_nan_is_last() -> None:
    found = top_rows({"out": torch.tensor([1.0, torch.nan, 2.0, 1.0, 2.0])}, 9, None)
    assert found["indices"].tolist() == [2, 4, 0, 3, 1]
    equal = top_rows({"out": torch.zeros(50_000)}, 50_000, None)
    assert torch.equal(equal["indices"], torch.arange(50_000))


def test_all_rows_are_returned_if_there_are_fewer() -> None:
    assert top_rows({"out": torch.tensor([1.0, 2.0])}, 5, "out")["indices"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("k", "output", "message"),
    [
        (0, "one", r"parameters\['top_k'\]: expected a number >= 1, got 0"),
        (1, None, r"parameters\['output'\]: expected one of 'one', 'many' for top_k"),
        (1, "none", r"parameters\['output'\]: expected one of 'one', 'many', got 'none'"),
        (1, "many", r"'many' has \[2\] numbers per row, top_k needs one"),
    ],
)
def test_what_cannot_be_ranked_is_an_error(k: int, output: str | None, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        top_rows({"one": torch.zeros(3), "many": torch.zeros(3, 2)}, k, output)


def test_columns_of_candidates_must_agree() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"inputs\['b'\]: expected 1 row, of the context, or 2 as in inputs\['a'\]"
    ):
        broadcast_context({"a": torch.zeros(2), "b": torch.zeros(3)})


def test_one_row_cannot_be_repeated_until_the_memory_is_full() -> None:
    with pytest.raises(InvalidArgumentError, match=r"inputs\['a'\]: expected at most 67,108,864 elements"):
        broadcast_context({"a": torch.zeros(1, 2**20), "b": torch.zeros(2**10)})
