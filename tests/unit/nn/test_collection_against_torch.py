"""Danger: embeddings or gradients that end up under the wrong id, row, feature or weight.

The oracle is torch itself: dense `nn.Embedding` weights with the same values, pooled by plain tensor code, trained by
`torch.optim.Adagrad`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from monolith.features import Batch, Feature, Ragged
from monolith.nn import EmbeddingBagCollection
from monolith.table import Adagrad

VOCABULARY, DIM, ROWS = 7, 3, 5
OPTIMIZER = Adagrad(learning_rate=0.3, initial_accumulator_value=0.1)


def collection(slots: bool) -> EmbeddingBagCollection:
    def feature(name: str, slot: int, **fields: object) -> Feature:
        return Feature(name=name, slot=slot if slots else None, dim=DIM, optimizer=OPTIMIZER, **fields)  # type: ignore[arg-type]

    return EmbeddingBagCollection(
        [
            feature("user", 1),
            feature("tags", 2, pooling="mean"),
            feature("words", 3, pooling="sqrtn"),
            Feature(name="liked", shared_with="item", pooling="mean"),
            feature("item", 4),
            Feature(name="first", shared_with="item", pooling="first_n", max_length=2),
            Feature(name="last", shared_with="item", pooling="last_n", max_length=2),
            Feature(name="history", shared_with="item", pooling="none"),
            feature("pair", 5),
        ]
    )


OWNER = dict.fromkeys(("liked", "item", "first", "last", "history"), "item")
RAGGED = ("tags", "words", "liked", "first", "last", "history")


def lists_of(rng: np.random.Generator) -> dict[str, list[list[int]]]:
    single = {name: rng.integers(0, VOCABULARY, (ROWS, 1)).tolist() for name in ("user", "item")}
    pair = {"pair": rng.integers(0, VOCABULARY, (ROWS, 2)).tolist()}
    return (
        single
        | pair
        | {name: [rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(0, 5, ROWS)] for name in RAGGED}
    )


def batch_of(lists: dict[str, list[list[int]]]) -> Batch:
    batch: Batch = {name: Ragged.from_lists(rows) for name, rows in lists.items() if name in RAGGED}
    return batch | {
        "user": torch.tensor(lists["user"])[:, 0],
        "item": torch.tensor(lists["item"]),
        "pair": torch.tensor(lists["pair"]),
    }


def pooled(name: str, weight: torch.Tensor, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """The output of a feature, row by row."""
    out = []
    for ids in rows:
        x = weight[torch.tensor(ids, dtype=torch.int64)]
        n = max(len(ids), 1)
        if name == "first":
            x = nn.functional.pad(x[:2], (0, 0, 0, max(2 - len(ids), 0)))
        elif name == "last":
            x = nn.functional.pad(x[-2:], (0, 0, 0, max(2 - len(ids), 0)))
        elif name in ("tags", "liked"):
            x = x.sum(0) / n
        elif name == "words":
            x = x.sum(0) / n**0.5
        elif name != "history":
            x = x.sum(0)
        out.append(x)
    return torch.cat(out) if name == "history" else torch.stack(out)


@pytest.mark.parametrize("slots", [False, True])
def test_ten_steps_give_the_weights_of_dense_torch(slots: bool) -> None:
    rng = np.random.default_rng(3)
    embeddings = collection(slots)
    all_ids = torch.arange(VOCABULARY)
    weights = {}
    for table in embeddings.declaration.tables:
        for feature, slot in zip(table.features, table.slots, strict=True):
            if feature.shared_with is None:
                ids = all_ids if slot is None else all_ids + (slot << 48)
                values = embeddings.store.tables[table.config.name].lookup(ids)  # type: ignore[attr-defined]
                weights[feature.name] = (table.config.name, ids, nn.Parameter(values.clone()))
    dense = torch.optim.Adagrad([w for *_, w in weights.values()], lr=0.3, initial_accumulator_value=0.1, eps=0)
    for _ in range(10):
        lists = lists_of(rng)
        outputs = embeddings(batch_of(lists))
        loss = expected_loss = torch.zeros(())
        for name, rows in lists.items():
            expected = pooled(name, weights[OWNER.get(name, name)][2], rows)
            output = outputs[name]
            if isinstance(output, Ragged):
                assert output.row_lengths().tolist() == [len(row) for row in rows]
                output = output.values
            torch.testing.assert_close(output, expected)
            factor = torch.from_numpy(rng.normal(size=expected.shape).astype(np.float32))
            loss, expected_loss = loss + (output * factor).sum(), expected_loss + (expected * factor).sum()
        loss.backward()
        embeddings.step()
        dense.zero_grad()
        expected_loss.backward()
        dense.step()
    for table_name, ids, weight in weights.values():
        table = embeddings.store.tables[table_name]  # type: ignore[attr-defined]
        torch.testing.assert_close(table.lookup(ids), weight.detach(), rtol=1e-5, atol=1e-6)


def test_masks_say_where_the_padding_is() -> None:
    embeddings = collection(slots=True)
    lists = lists_of(np.random.default_rng(0)) | {"first": [[], [1], [1, 2], [1, 2, 3], []]}
    mask = embeddings(batch_of(lists))["first.mask"]
    assert isinstance(mask, torch.Tensor)
    assert mask.tolist() == [[False, False], [True, False], [True, True], [True, True], [False, False]]


def test_one_call_per_table_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = collection(slots=True)
    asked: list[str] = []
    lookup = embeddings.store.lookup
    monkeypatch.setattr(
        embeddings.store, "lookup", lambda requests: (asked.extend(r.table for r in requests), lookup(requests))[1]
    )
    embeddings(batch_of(lists_of(np.random.default_rng(0))))
    assert asked == ["slots_3_adagrad"]


def test_the_same_seed_and_data_give_the_same_bits() -> None:
    def run() -> torch.Tensor:
        embeddings, rng = collection(slots=True), np.random.default_rng(1)
        for _ in range(3):
            outputs = embeddings(batch_of(lists_of(rng)))
            sum(
                o.values.square().sum() if isinstance(o, Ragged) else o.float().square().sum() for o in outputs.values()
            ).backward()
            embeddings.step()
        return embeddings.store.tables["slots_3_adagrad"].lookup(torch.arange(VOCABULARY) + (4 << 48))  # type: ignore[attr-defined]

    assert torch.equal(run(), run())
