"""Danger: columns of one id per row, which go to the tables a shorter way, give or train something else than bags of one id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from monolith import InvalidArgumentError
from monolith.features import Batch, Feature, Ragged
from monolith.nn import EmbeddingBagCollection
from monolith.table import SGD, Adagrad, DelayCompensation, LocalStore

OPTIMIZER = Adagrad(learning_rate=0.3)
LARGE = 2**50
ROWS = 5

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "tables of their own": {name: {} for name in "abcd"},
    "of several dims": {"a": {"dim": 2}, "b": {"dim": 3}, "c": {"dim": 2}, "d": {"dim": 9}},
    "one table": {name: {"slot": slot} for slot, name in enumerate("abcd")},
    "one stack in one table": {name: {"slot": slot, "stack": "s"} for slot, name in enumerate("abcd")},
    "one stack over tables": {name: {"stack": "s"} for name in "abcd"},
    "two stacks over tables": {"a": {"stack": "s"}, "b": {"stack": "t"}, "c": {"stack": "s"}, "d": {"stack": "t"}},
    "stacks beside others": {"a": {"slot": 1, "stack": "s"}, "b": {}, "c": {"slot": 2, "stack": "s"}, "d": {"slot": 3}},
    "a stack over a table with more": {
        "a": {"stack": "s"},
        "b": {"stack": "s"},
        "c": {"shared_with": "a", "dim": None},
        "d": {},
    },
    "shared rows": {
        "a": {},
        "b": {"shared_with": "a", "dim": None},
        "c": {"pooling": "mean"},
        "d": {"pooling": "sqrtn"},
    },
    "biases": {"a": {"bias": True}, "b": {"bias": True, "slot": 1}, "c": {"bias": True, "slot": 2}, "d": {}},
    "pooled differently": {
        "a": {"slot": 1},
        "b": {"slot": 2, "pooling": "mean"},
        "c": {"slot": 3, "pooling": "sqrtn"},
        "d": {},
    },
    "compensated": {"a": {"optimizer": DelayCompensation(base=SGD(learning_rate=0.3))}, "b": {}, "c": {}, "d": {}},
}


def collection(case: str) -> EmbeddingBagCollection:
    fields = ({"optimizer": OPTIMIZER, "dim": 4, **own} for own in CASES[case].values())
    made = [
        {k: v for k, v in one.items() if not ("shared_with" in one and k in ("dim", "optimizer"))} for one in fields
    ]
    return EmbeddingBagCollection([Feature(name=name, **own) for name, own in zip(CASES[case], made, strict=True)])


def columns(step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    drawn = {name: torch.randint(0, 7, (ROWS,), generator=random) for name in "abcd"}
    drawn["d"][0] = LARGE + step  # a slot hashes it
    return drawn


def as_bags(batch: dict[str, torch.Tensor]) -> Batch:
    return {name: Ragged(column, np.arange(ROWS + 1)) for name, column in batch.items()}


def train(embeddings: EmbeddingBagCollection, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    outputs = embeddings(batch)
    loss = sum((out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum() for out in outputs.values())
    loss.backward()  # type: ignore[union-attr]
    embeddings.step()
    return {name: out.detach() for name, out in outputs.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("case", CASES)
def test_one_id_per_row_is_a_bag_of_one(case: str) -> None:
    short, long, arrays, narrow = (collection(case) for _ in range(4))
    for step in range(3):
        batch = columns(step)
        outputs = train(short, batch)
        for other, same in (
            (long, as_bags(batch)),
            (arrays, {name: column.numpy() for name, column in batch.items()}),
            (narrow, {name: column.unsqueeze(1) for name, column in batch.items()}),
        ):
            answer = train(other, same)
            assert list(answer) == list(outputs)
            assert all(torch.equal(answer[name], outputs[name]) for name in outputs)
    assert isinstance(short.store, LocalStore)
    assert isinstance(long.store, LocalStore)
    for name, table in short.store.tables.items():
        other_table = long.store.tables[name]
        ids = torch.tensor(sorted(table))
        assert sorted(table) == sorted(other_table)
        assert torch.equal(table.lookup_entry(ids).values, other_table.lookup_entry(ids).values)


@pytest.mark.parametrize("case", ["tables of their own", "one stack over tables", "one table"])
def test_the_memory_of_a_batch_can_be_used_again_before_the_step(case: str) -> None:
    kept, reused = collection(case), collection(case)
    batch = columns(0)
    for embeddings in (kept, reused):
        sum(out.sum() for out in embeddings(batch).values()).backward()  # type: ignore[union-attr]
        if embeddings is reused:
            batch["a"].fill_(6)
        embeddings.step()
    same = columns(0)
    assert all(torch.equal(a, b) for a, b in zip(kept(same).values(), reused(same).values(), strict=True))  # type: ignore[arg-type]


def test_a_table_whose_output_is_not_used_is_left_alone() -> None:
    embeddings = collection("tables of their own")
    outputs = embeddings(columns(0))
    (outputs["a"].sum() + outputs["c"].sum()).backward()  # type: ignore[union-attr]
    assert [gradient.bags.table for gradient in embeddings.gradients] == ["a", "c"]
    embeddings.step()
    assert {name: stats.rows > 0 for name, stats in embeddings.store.stats().items()} == {
        "a": True,
        "b": False,
        "c": True,
        "d": False,
    }


def test_outputs_can_be_changed_in_place() -> None:
    embeddings, expected = collection("tables of their own"), collection("tables of their own")
    out, plain = embeddings(columns(0)), expected(columns(0))
    (out["a"].mul_(2).sum() + out["b"].sum()).backward()  # type: ignore[union-attr]
    ((plain["a"] * 2).sum() + plain["b"].sum()).backward()  # type: ignore[operator,union-attr]
    for one, other in zip(embeddings.gradients, expected.gradients, strict=True):
        assert torch.equal(one.values, other.values)
    assert torch.equal(out["c"], plain["c"])  # type: ignore[arg-type]


def test_gradients_are_changed_table_by_table_in_a_stack_too() -> None:
    stacked, apart = collection("one stack over tables"), collection("tables of their own")
    weight = torch.linspace(-1, 1, ROWS * 4 * 4).reshape(ROWS, 4, 4)
    (stacked(columns(0))["s"] * weight).sum().backward()  # type: ignore[operator]
    (torch.stack(list(apart(columns(0)).values()), dim=1) * weight).sum().backward()  # type: ignore[arg-type]
    for embeddings in (stacked, apart):
        embeddings.change_gradients(lambda values: values / values.norm())
        embeddings.scale_gradients(0.5)
    for one, other in zip(stacked.gradients, apart.gradients, strict=True):
        assert one.bags.table == other.bags.table
        assert torch.equal(one.values, other.values)


def test_passes_that_wait_together_make_one_step() -> None:
    twice, once = collection("one stack over tables"), collection("one stack over tables")
    for _ in range(2):
        twice(columns(0))["s"].sum().backward()  # type: ignore[union-attr]
    (2 * once(columns(0))["s"]).sum().backward()  # type: ignore[operator]
    assert len(twice.gradients) == 8
    twice.step()
    once.step()
    assert torch.allclose(twice(columns(0))["s"], once(columns(0))["s"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.zeros(ROWS + 1, dtype=torch.int64)}, r"batch\['b'\]: expected 5 rows as in batch\['a'\], got 6"),
        ({"c": torch.zeros(ROWS)}, r"batch\['c'\]: expected ids of type int64, got torch.float32"),
        ({"c": torch.zeros(ROWS, dtype=torch.bool)}, r"batch\['c'\]: expected ids of type int64, got torch.bool"),
        ({"d": torch.zeros(ROWS, 1, 1, dtype=torch.int64)}, r"batch\['d'\]: expected \[rows\] or \[rows, n\]"),
        ({"d": "text"}, r"batch\['d'\]: expected one number per row"),
    ],
)
@pytest.mark.parametrize("case", ["tables of their own", "stacks beside others"])
def test_a_wrong_column_is_named(case: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        collection(case)({**columns(0), **change})


def test_a_missing_column_is_named() -> None:
    batch = columns(0)
    del batch["c"]
    with pytest.raises(InvalidArgumentError, match=r"batch\['c'\]: there is no such column"):
        collection("tables of their own")(batch)


def test_narrow_ids_are_ids() -> None:
    embeddings = collection("one table")
    batch = columns(0) | {"d": columns(1)["a"]}
    narrow = {name: column.int() for name, column in batch.items()}
    mixed = {**batch, "b": batch["b"].int()}
    expected = embeddings(batch)
    for other in (narrow, mixed):
        assert all(torch.equal(a, b) for a, b in zip(embeddings(other).values(), expected.values(), strict=True))  # type: ignore[arg-type]


def test_schedules_are_asked_once_a_step_however_many_tables_share_them() -> None:
    asked: list[int] = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.5 / (1 + step)

    features = [Feature(name=name, dim=4, optimizer=OPTIMIZER, learning_rate=schedule) for name in "abcd"]
    embeddings = EmbeddingBagCollection(features)
    for step in range(3):
        train(embeddings, columns(step))
    assert asked == [0, 1, 2]
