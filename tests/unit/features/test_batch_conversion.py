"""Batches as people have them: NumPy arrays and lists. The danger is a column that is refused, or read with another meaning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import EmbeddingBagCollection, Estimator, Feature, load
from monolith.errors import InvalidArgumentError
from monolith.features import Ragged, as_batch
from monolith.train import Trainer


def features() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([Feature(name="user", dim=2), Feature(name="tags", dim=2)])


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = features()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        user, tags = self.embeddings(batch).values()
        return (user + tags).sum(1) + batch["price"].float()


TENSORS = {
    "user": torch.tensor([1, 2]),
    "tags": Ragged.from_lists([[5], []]),
    "price": torch.tensor([0.5, 1.0]),
    "label": torch.tensor([0.0, 1.0]),
}
AS_NUMPY = {
    "user": np.array([1, 2], dtype=np.int32),
    "tags": [np.array([5]), np.array([], dtype=np.int64)],
    "price": np.array([0.5, 1.0], dtype=np.float32),
    "label": np.array([0, 1]),
}
AS_LISTS = {"user": [1, 2], "tags": [[5], []], "price": [0.5, 1.0], "label": [0, 1]}
FORMS = pytest.mark.parametrize("columns", [AS_NUMPY, AS_LISTS], ids=["numpy", "lists"])


@FORMS
def test_a_collection_looks_up_the_same_rows(columns: dict[str, object]) -> None:
    embeddings = features()
    expected = embeddings(TENSORS)
    for name, vectors in embeddings(columns).items():
        assert torch.equal(vectors, expected[name])


@FORMS
def test_a_run_trains_evaluates_and_predicts_the_same(columns: dict[str, object], tmp_path: Path) -> None:
    losses = [Trainer(Sum()).train_step(batch).loss.item() for batch in (TENSORS, columns)]
    assert losses[0] == losses[1]
    estimator = Estimator(Sum())
    assert estimator.train([columns]) == 1
    assert estimator.evaluate([columns])["output/examples"] == 2
    predictor = load(estimator.export_saved_model(tmp_path, example=columns))
    assert torch.equal(predictor.predict(columns)["output"], predictor.predict(TENSORS)["output"])


def test_integers_become_ids_and_floats_keep_what_they_say() -> None:
    batch = as_batch({"flag": [True, False], "u8": np.array([1], dtype=np.uint8), "x": [0.5], "d": np.array([0.1])})
    assert {name: column.dtype for name, column in batch.items()} == {
        "flag": torch.int64,
        "u8": torch.int64,
        "x": torch.float32,
        "d": torch.float64,
    }


def test_a_batch_of_tensors_is_not_copied() -> None:
    assert as_batch(TENSORS) is TENSORS


def test_an_array_that_must_not_be_written_is_read() -> None:
    ids = np.array([1, 2])
    ids.setflags(write=False)
    assert features()({"user": ids, "tags": [[], []]})["user"].shape == (2, 2)


@pytest.mark.parametrize("column", [["red", "green"], [None, 1], [[1], 2], 3, np.array([2**63, 1], dtype=np.uint64)])
def test_a_column_that_is_no_numbers_is_refused_where_it_is_read(column: object) -> None:
    columns = {**TENSORS, "user": column}
    with pytest.raises(InvalidArgumentError, match=r"batch\['user'\]: expected one number per row.*hash_strings"):
        features()(columns)
    # Nobody reads it here: a column that only a person looks at is no fault.
    assert Trainer(Sum()).train_step({**TENSORS, "comment": column}).examples == 2
