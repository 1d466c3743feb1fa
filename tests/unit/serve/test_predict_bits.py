"""Danger: the quick path of a prediction answers with other numbers than the model, or than its own first answer for a shape.

With torch's operators they have the same bits. The loops of the core round differently, see test_native_program.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Feature, Ragged
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head
from monolith.serve import Predictor, export_model, load
from monolith.serve import program as program_module

FEATURES = ("user", "item", "place")


class Clicks(nn.Module):
    """Two collections, a bias, a stack, slots in a shared table, and a dense column."""

    heads = (Head(name="click"),)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name="user", dim=4, bias=True), Feature(name="item", dim=4, slot=7, pooling="mean")]
        )
        self.more = EmbeddingBagCollection(
            [Feature(name="item", dim=4, stack="both"), Feature(name="place", dim=4, stack="both")], seed=5
        )
        self.deep = nn.Sequential(nn.Linear(18, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        rows, more = self.embeddings(batch), self.more(batch)["both"]
        wide = torch.cat([rows["user"], rows["item"], more.flatten(1), batch["age"]], dim=1)
        pairs = (more.sum(1).square() - more.square().sum(1)).sum(1, keepdim=True)
        return (self.deep(wide) + rows["user.bias"] + 0.5 * pairs).squeeze(1)


def batch_of(rows: int, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = {name: torch.randint(0, 50, (rows,), generator=random) for name in FEATURES}
    return {**ids, "age": torch.rand(rows, 2, generator=random)}


@pytest.fixture(scope="module")
def model() -> Clicks:
    model = Clicks().eval()
    for collection in (model.embeddings, model.more):
        for name, table in collection.store.tables.items():
            table.assign(
                torch.arange(40), torch.randn(40, table.dim, generator=torch.Generator().manual_seed(len(name)))
            )
    return model


@pytest.fixture(scope="module")
def predictor(model: Clicks, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return load(export_model(model, batch_of(4), tmp_path_factory.mktemp("exports"), heads=model.heads))


@pytest.fixture(params=["torch", "core"])
def atol(request: pytest.FixtureRequest, predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> float:
    """Run programs with torch or with the core. Returns how far answers may be from those of the model."""
    for remembered in ("_native", "_bound"):
        monkeypatch.setattr(predictor._program, remembered, {})
    if request.param == "torch":
        monkeypatch.setattr(program_module, "lower", lambda *_: None)
        return 0
    return 1e-6


def expected(model: Clicks, batch: Batch) -> Tensor:
    with torch.no_grad():
        return torch.sigmoid(model(batch))


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000])
def test_all_answers_for_a_shape_are_those_of_the_model(
    model: Clicks, predictor: Predictor, atol: float, rows: int
) -> None:
    for seed in range(3):  # the first measures, the second binds
        batch = batch_of(rows, seed)
        torch.testing.assert_close(predictor.predict(batch)["click"], expected(model, batch), rtol=0, atol=atol)
    assert bool(predictor._program._native) == (atol > 0 and rows < 1000)


def test_an_empty_batch(predictor: Predictor) -> None:
    for _ in range(2):
        assert predictor.predict(batch_of(0))["click"].shape == (0,)
    arrays = {name: column.numpy() for name, column in batch_of(0).items()}
    assert predictor.predict(arrays)["click"].shape == (0,)


def test_every_form_of_a_column_gives_the_same(model: Clicks, predictor: Predictor, atol: float) -> None:
    batch = batch_of(5)
    want = expected(model, batch)
    forms: list[dict[str, Any]] = [
        {name: column.numpy() for name, column in batch.items()},
        {
            name: np.asarray(column, dtype=np.int32 if name in FEATURES else np.float32)
            for name, column in batch.items()
        },
        {name: column.tolist() for name, column in batch.items() if name != "age"} | {"age": batch["age"]},
        {**batch, "user": batch["user"].numpy()},
        {**batch, "user": batch["user"].view(5, 1)},
        {**batch, "item": Ragged(batch["item"], torch.arange(6))},
        {**batch, "age": torch.stack([batch["age"], batch["age"]], dim=2)[..., 0]},  # not contiguous
    ]
    for form in forms:
        for _ in range(3):
            torch.testing.assert_close(predictor.predict(form)["click"], want, rtol=0, atol=atol)


def test_read_only_arrays_are_neither_changed_nor_kept(predictor: Predictor) -> None:
    raw = np.arange(5).tobytes()
    arrays: dict[str, Any] = {name: np.frombuffer(raw, dtype=np.int64) for name in FEATURES}
    first = predictor.predict({**arrays, "age": torch.zeros(5, 2)})["click"]
    again = predictor.predict({**arrays, "age": torch.zeros(5, 2)})["click"]
    torch.testing.assert_close(again, first, rtol=0, atol=1e-6)


def test_columns_that_do_not_agree_are_named_on_every_path(predictor: Predictor) -> None:
    for _ in range(2):
        predictor.predict(batch_of(5))
        for name in (*FEATURES, "age"):
            short: dict[str, Any] = {**batch_of(5), name: batch_of(4)[name]}
            with pytest.raises(
                InvalidArgumentError, match=r"batch\['\w+'\]: expected \d rows as in batch\['\w+'\], got \d"
            ):
                predictor.predict(short)
            with pytest.raises(InvalidArgumentError, match=f"batch\\['{name}'\\]: there is no such column"):
                predictor.predict({key: column for key, column in batch_of(5).items() if key != name})
    with pytest.raises(InvalidArgumentError, match=r"expected float32 \[rows, 2\], got float64"):
        predictor.predict({**batch_of(5), "age": torch.zeros(5, 2, dtype=torch.float64)})


def test_rows_of_tables_that_change_are_seen(model: Clicks, tmp_path: Path) -> None:
    predictor = load(export_model(model, batch_of(4), tmp_path, heads=model.heads))
    batch = batch_of(3)
    before = predictor.predict(batch)["click"]
    predictor.stores["embeddings"].tables["user"].assign(batch["user"], torch.ones(3, 5))
    assert not torch.equal(predictor.predict(batch)["click"], before)


class Words(nn.Module):
    """The number of its ids, not only that of its rows, determines the shapes inside."""

    heads = (Head(name="out", kind="regression"),)

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(
            [Feature(name="words", dim=3, pooling="none"), Feature(name="user", dim=3)]
        )

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        rows = self.embeddings(batch)
        words = rows["words"]
        sums = torch.zeros(words.row_lengths().shape[0], 3).index_add(0, words.value_rowids(), words.values)
        return (rows["user"] * sums).sum(1)


def test_ids_that_are_not_pooled_come_in_any_number(tmp_path: Path) -> None:
    model = Words().eval()
    lists: list[list[list[int]]] = [[[1, 2], [3]], [[1], [2]], [[], [1, 2, 3]], [[], []], [[5, 6, 7], []]]
    batches: list[Batch] = [{"words": Ragged.from_lists(words), "user": torch.arange(2)} for words in lists]
    predictor = load(export_model(model, batches[0], tmp_path, heads=model.heads))
    for _ in range(3):
        for batch in batches:
            with torch.no_grad():
                want = model(batch)
            assert torch.equal(predictor.predict(batch)["out"], want)
