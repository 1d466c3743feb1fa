"""Danger: tensors in a file whose rows do not belong together, or to an unknown table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file

from comparison import float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import Adam
from monolith.table.exchange import export_safetensors


def test_every_tensor_has_the_rows_of_the_table(tmp_path: Path) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=2, optimizer=Adam()),)))
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 500)
    table.apply_gradients(ids, float32(np.random.default_rng(1).normal(size=(500, 2))), event_time=7)
    tensors = load_file(export_safetensors(table, tmp_path / "new" / "t.safetensors"))
    expected = table.lookup_entry(tensors["ids"])
    assert sorted(tensors["ids"].tolist()) == sorted(ids.tolist())
    assert set(tensors) == {"ids", "times", "values", *expected.slots}
    for name, tensor in {"times": expected.times, "values": expected.values, **expected.slots}.items():
        assert tensors[name].equal(tensor), name


def test_the_file_says_which_table_it_holds(tmp_path: Path) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=2),)))
    table.reinitialize(int64([1]))
    with safe_open(export_safetensors(table, tmp_path / "t.safetensors"), "pt") as file:
        assert TableConfig.from_json(file.metadata()["table_config"]) == table.config


def test_an_empty_table(tmp_path: Path) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=2),)))
    tensors = load_file(export_safetensors(table, tmp_path / "t.safetensors"))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "0/norm": (0, 2),
        "ids": (0,),
        "times": (0,),
        "values": (0, 2),
    }
