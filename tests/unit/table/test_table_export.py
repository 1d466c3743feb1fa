"""Danger: an export that skips or repeats rows, so that a migration loses users without an error."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from comparison import INT64_MAX, INT64_MIN, assert_equal, float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import Adagrad, BatchSoftmax
from monolith.testing import sgd_table_config


def filled(rows: int) -> tuple[EmbeddingTable, np.ndarray]:
    ids = np.random.default_rng(1).integers(INT64_MIN, INT64_MAX, rows, endpoint=True)
    ids[: min(rows, 4)] = [0, -1, INT64_MIN, INT64_MAX][:rows]
    parts = (Segment(dim=3, optimizer=Adagrad()), Segment(dim=1, optimizer=BatchSoftmax()))
    table = EmbeddingTable(TableConfig(name="t", segments=parts))
    if rows:
        table.apply_gradients(torch.from_numpy(ids), torch.ones(rows, 4), step=5, event_time=6)
    return table, ids


@pytest.mark.parametrize("rows", [0, 1, 7, 1_000, 30_000])
@pytest.mark.parametrize("batch_size", [1, 64, 10_000, 10**9])
def test_iteration_gives_each_id_exactly_once(rows: int, batch_size: int) -> None:
    table, ids = filled(rows)
    batches = list(table.iter_batches(batch_size))
    seen = np.concatenate([np.empty(0, np.int64), *(batch.ids.numpy() for batch in batches)])
    assert len(seen) == rows == len(table)
    assert_equal(np.sort(seen), np.sort(ids))
    assert all(len(batch.ids) for batch in batches)
    for batch in batches[:50]:
        again = table.lookup_entry(batch.ids)
        assert batch.found.all()
        assert_equal(batch.values, again.values)
        assert_equal(batch.times, again.times)
        assert list(batch.slots) == list(again.slots)
        for slot, values in again.slots.items():
            assert_equal(batch.slots[slot], values, slot)


def test_iteration_is_in_pieces() -> None:
    table, _ = filled(100_000)
    sizes = [len(batch.ids) for batch in table.iter_batches(1_000)]
    assert len(sizes) > 10
    assert max(sizes) < 50_000


def test_a_table_iterates_over_its_ids() -> None:
    table, ids = filled(1_000)
    assert sorted(table) == sorted(ids.tolist())


def test_numpy_export() -> None:
    table, ids = filled(2_000)
    columns = table.to_numpy()
    assert sorted(columns) == ["0/norm", "1/global_step", "ids", "times", "values"]
    assert_equal(np.sort(columns["ids"]), np.sort(ids))
    entries = table.lookup_entry(columns["ids"])
    assert_equal(columns["values"], entries.values)
    assert_equal(columns["times"], np.full(2_000, 6))
    assert_equal(columns["0/norm"], entries.slots["0/norm"])
    assert_equal(columns["1/global_step"], np.full((2_000, 1), 5))


def test_arrow_export() -> None:
    table, ids = filled(2_000)
    arrow = table.to_arrow()
    arrow.validate(full=True)
    assert arrow.num_rows == 2_000
    assert arrow.schema.field("ids").type == pa.int64()
    assert arrow.schema.field("values").type == pa.list_(pa.float32(), 4)
    assert arrow.schema.field("1/global_step").type == pa.list_(pa.int64(), 1)
    order = arrow["ids"].to_numpy()
    assert_equal(np.sort(order), np.sort(ids))
    values = arrow["values"].combine_chunks().flatten().to_numpy().reshape(-1, 4)
    assert_equal(values, table.lookup_entry(order).values)


@pytest.mark.parametrize("rows", [0, 1])
def test_small_exports_keep_their_columns(rows: int) -> None:
    table, _ = filled(rows)
    assert table.to_numpy()["values"].shape == (rows, 4)
    assert table.to_numpy()["1/global_step"].dtype == np.int64
    assert table.to_arrow().num_rows == rows
    assert table.to_arrow().schema.field("values").type == pa.list_(pa.float32(), 4)


def test_an_export_is_a_copy() -> None:
    table = EmbeddingTable(sgd_table_config(2))
    table.assign(int64([1]), float32([[1.0, 2.0]]))
    columns, arrow = table.to_numpy(), table.to_arrow()
    columns["values"].fill(9)
    table.assign(int64([1]), float32([[5.0, 6.0]]))
    assert table.lookup(int64([1])).tolist() == [[5.0, 6.0]]
    assert arrow["values"].to_pylist() == [[1.0, 2.0]]


def test_an_export_imports() -> None:
    table, ids = filled(500)
    columns = table.to_numpy()
    copy = EmbeddingTable(table.config)
    copy.assign(torch.from_numpy(columns["ids"]), torch.from_numpy(columns["values"]), event_time=6)
    assert_equal(copy.lookup(torch.from_numpy(ids)), table.lookup(torch.from_numpy(ids)))
