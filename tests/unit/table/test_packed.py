"""Danger: bags of many tables in one array whose answer or update is not that of the same bags table by table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable, InvalidArgumentError, Segment, TableConfig
from monolith.table import Adagrad, LocalStore
from monolith.table.bags import LearningRates, PackedBags, PackedGradients, PackedLayout

DIMS = (4, 2, 4, 4)
NAMES = tuple("abcd")
ARRAYS = {
    "apart": ((0,), (1,), (2,), (3,)),
    "side by side": ((0, 3), (1,), (2,)),
    "in another order": ((3, 0, 2), (1,)),
}


def new_store() -> LocalStore:
    segments = [Segment(dim=dim, optimizer=Adagrad(learning_rate=0.5)) for dim in DIMS]
    return LocalStore(
        EmbeddingTable(TableConfig(name=name, segments=(segment,)))
        for name, segment in zip(NAMES, segments, strict=True)
    )


def layout(arrays: str, pooling: str = "sum") -> PackedLayout:
    return PackedLayout(tables=NAMES, dims=DIMS, poolings=[pooling] * 4, arrays=ARRAYS[arrays])  # type: ignore[list-item]


def packed(arrays: str, kind: str, rng: np.random.Generator) -> PackedBags:
    counts = (6, 6, 6, 6) if arrays != "apart" else (6, 1, 0, 9)
    if kind == "single ids":
        return PackedBags(layout(arrays), ids=rng.integers(0, 9, sum(counts)), offsets=None, counts=counts)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, sum(counts)))])
    return PackedBags(layout(arrays, kind), ids=rng.integers(0, 9, offsets[-1]), offsets=offsets, counts=counts)


def gradients(bags: PackedBags, rng: np.random.Generator) -> PackedGradients:
    rows = [bags.counts[tables[0]] for tables in bags.layout.arrays]
    shapes = zip(rows, bags.layout.widths, strict=True)
    arrays = [torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]
    return PackedGradients(bags, arrays, learning_rates=LearningRates.of([(0.5,), (0.25,), (1.0,), (0.1,)]))


@pytest.mark.parametrize("kind", ["single ids", "sum", "mean", "sqrtn"])
@pytest.mark.parametrize("arrays", ARRAYS)
def test_a_packed_request_is_that_of_its_tables(arrays: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    together, apart = new_store(), new_store()
    for _ in range(3):
        bags = packed(arrays, kind, rng)
        for one, other in zip(together.lookup(bags), apart.lookup(list(bags)), strict=True):
            assert torch.equal(one, other)
        update = gradients(bags, rng)
        together.apply(update)
        apart.apply(list(update))
    for name in NAMES:
        assert torch.equal(together.tables[name].lookup(np.arange(9)), apart.tables[name].lookup(np.arange(9)))


def test_gradients_can_be_slices_of_a_larger_tensor() -> None:
    rng = np.random.default_rng(4)
    bags = packed("side by side", "single ids", rng)
    whole = torch.from_numpy(rng.standard_normal((6, 30), dtype=np.float32))
    slices = PackedGradients(bags, [whole[:, 3:11], whole[:, :2], whole[:, 20:24]])
    copies = PackedGradients(bags, [array.contiguous() for array in slices.arrays if array is not None])
    one, other = new_store(), new_store()
    one.apply(slices)
    other.apply(copies)
    for name in NAMES:
        assert torch.equal(one.tables[name].lookup(np.arange(9)), other.tables[name].lookup(np.arange(9)))


def test_a_table_without_a_gradient_is_left_alone() -> None:
    rng, store = np.random.default_rng(5), new_store()
    bags = packed("side by side", "single ids", rng)
    update = PackedGradients(bags, [None, torch.ones(6, 2), None])
    assert [gradient.bags.table for gradient in update] == ["b"]
    assert len(update) == 1
    store.apply(update)
    assert {name: len(table) > 0 for name, table in store.tables.items()} == {
        "a": False,
        "b": True,
        "c": False,
        "d": False,
    }


def test_answers_of_one_table_do_not_share_changes_with_those_of_another() -> None:
    bags = packed("apart", "single ids", np.random.default_rng(6))
    first, second, _, last = new_store().lookup(bags)
    before = last.clone()
    first.fill_(7.0)
    second.fill_(7.0)
    assert torch.equal(last, before)


@pytest.mark.parametrize(
    ("ids", "offsets", "counts", "message"),
    [
        (5, None, (2, 2, 2, 0), "ids: expected those of the bags"),
        (7, None, (2, 2, 2, 0), "ids: expected those of the bags"),
        (4, [0, 1, 2, 3], (1, 1, 1, 1), "offsets: expected those of the bags"),
        (4, [0, 1, 2, 3, 5], (1, 1, 1, 1), "offsets: expected those of the bags"),
        (4, [0, 3, 2, 3, 4], (1, 1, 1, 1), "offsets: expected those of the bags"),
        (4, [0, 2, 1, 3, 4], (2, 1, 1, 0), r"table 'a': offsets\[2\]"),
        (4, [1, 2, 3, 4, 4], (1, 1, 1, 1), "offsets: expected those of the bags"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_changes(
    ids: int, offsets: list[int] | None, counts: tuple[int, ...], message: str
) -> None:
    store = new_store()
    bags = PackedBags(
        layout("apart"), ids=np.arange(ids), offsets=None if offsets is None else np.array(offsets), counts=counts
    )
    with pytest.raises(InvalidArgumentError, match=message):
        store.lookup(bags)
    with pytest.raises(InvalidArgumentError, match=message):
        store.apply(PackedGradients(bags, [torch.ones(n, dim) for n, dim in zip(counts, DIMS, strict=True)]))
    assert all(len(table) == 0 for table in store.tables.values())


def test_gradients_that_do_not_fit_are_refused_by_table_before_anything_changes() -> None:
    store, bags = new_store(), packed("apart", "single ids", np.random.default_rng(7))
    right = [torch.ones(n, dim) for n, dim in zip(bags.counts, DIMS, strict=True)]
    for wrong, rates, message in (
        ([*right[:3], torch.ones(8, 4)], None, r"table 'd': grads: expected \[9, 4\], got \[8, 4\]"),
        ([*right[:3], torch.ones(9, 8)[:, ::2]], None, "table 'd': grads: expected rows without gaps"),
        (right, LearningRates.of([(0.5,)] * 3), "learning_rates: expected one per segment"),
        (right, LearningRates.of([*[(0.5,)] * 3, (-1.0,)]), r"table 'd': learning_rates\[0\]"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            store.apply(PackedGradients(bags, wrong, learning_rates=rates))
    assert all(len(table) == 0 for table in store.tables.values())


def test_a_request_for_a_table_that_is_not_there_names_it() -> None:
    unknown = PackedLayout(tables=("a", "x"), dims=(4, 4), poolings=("sum", "sum"), arrays=((0,), (1,)))
    with pytest.raises(InvalidArgumentError, match="the store has no 'x'; it has 'a', 'b', 'c', 'd'"):
        new_store().lookup(PackedBags(unknown, ids=np.arange(2), offsets=None, counts=(1, 1)))
