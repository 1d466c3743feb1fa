"""Danger: rows that change on the way to the original's format and back, for tables nobody thought of."""

from __future__ import annotations

import tempfile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from comparison import INT64_MAX, INT64_MIN
from dumps import assert_same_rows
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.original import dump_counts, export_dump, export_multi_dump, import_dump, import_multi_dump
from monolith.table import Zeros
from monolith.table.exchange import export_parquet, import_parquet
from monolith.testing import every_optimizer

IN_THE_ORIGINAL = sorted(set(every_optimizer()) - {"adamom", "rowwise_adagrad"})
IDS = st.integers(INT64_MIN, INT64_MAX)
TIMES = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 127, 128, 2**28 - 1, 2**28]))


@st.composite
def tables(draw: st.DrawFn, optimizers: list[str], name: str = "t") -> EmbeddingTable:
    parts = draw(st.lists(st.tuples(st.sampled_from(optimizers), st.integers(1, 5)), min_size=1, max_size=3))
    segments = [
        Segment(dim=1 if kind == "batch_softmax" else dim, optimizer=every_optimizer()[kind], initializer=Zeros())
        for kind, dim in parts
    ]
    table = EmbeddingTable(TableConfig(name=name, segments=tuple(segments)))
    for _ in range(draw(st.integers(0, 3))):
        ids = np.array(draw(st.lists(IDS, max_size=20, unique=True)), np.int64)
        grads = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(len(ids), table.dim)).astype(np.float32)
        step = draw(st.integers(0, 2**62))
        table.apply_gradients(ids, grads, step=step, event_time=draw(TIMES), snapshot=np.zeros_like(grads))
    return table


@given(tables(IN_THE_ORIGINAL), st.integers(1, 4))
@settings(max_examples=60)
def test_single_table_dump(table: EmbeddingTable, shards: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        export_dump(table, f"{folder}/t", shards=shards)
        assert_same_rows(import_dump(f"{folder}/t", table.config), table)


@given(tables(IN_THE_ORIGINAL, "a"), tables(IN_THE_ORIGINAL, "b/b"), st.integers(1, 3))
@settings(max_examples=40)
def test_multi_table_dump(first: EmbeddingTable, second: EmbeddingTable, shards: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        export_multi_dump([first, second], f"{folder}/all", shards=shards)
        assert dump_counts(f"{folder}/all") == {"a": len(first), "b/b": len(second)}
        copies = import_multi_dump(f"{folder}/all", {"b/b": second.config, "a": first.config})
    assert_same_rows(copies["a"], first)
    assert_same_rows(copies["b/b"], second)


@given(tables(sorted(every_optimizer())))
@settings(max_examples=40)
def test_parquet(table: EmbeddingTable) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = import_parquet(export_parquet(table, f"{folder}/t.parquet"))
    assert copy.config == table.config
    assert_same_rows(copy, table)
