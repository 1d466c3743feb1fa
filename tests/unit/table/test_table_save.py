"""Danger: a restart that changes the model. After save and load every bit must be there, and training must continue
as if nothing had happened, for every optimizer and precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comparison import INT64_MAX, INT64_MIN, assert_equal, int64, snapshot
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import (
    SGD,
    BatchSoftmax,
    Bf16,
    Constant,
    Expiry,
    FixedR8,
    Fp16,
    OneBit,
    RandomNormal,
    XavierUniform,
    Zeros,
)
from monolith.testing import every_optimizer, sgd_table_config

IDS = torch.tensor([0, -1, 5, INT64_MIN, INT64_MAX, 7 << 48, *range(100, 400)])


def train(table: EmbeddingTable, steps: range) -> None:
    for step in steps:
        grads = np.random.default_rng(step).normal(size=(len(IDS), table.dim)).astype(np.float32)
        options: dict[str, Any] = {}
        if table.config.segments[0].optimizer.kind == "delay_compensation":
            options["snapshot"] = table.lookup(IDS) * 0.5
        table.apply_gradients(IDS, torch.from_numpy(grads), step=step, event_time=1000 + step, **options)


def reload(table: EmbeddingTable, folder: Path) -> EmbeddingTable:
    size = table.save(folder / "t.table")
    assert (folder / "t.table").stat().st_size == size
    return EmbeddingTable.load(folder / "t.table")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", every_optimizer())
def test_training_continues_as_if_it_had_not_stopped(name: str, precision: str, tmp_path: Path) -> None:
    optimizer = every_optimizer()[name]
    dim = 1 if isinstance(optimizer, BatchSoftmax) else 9
    segment = Segment(dim=dim, optimizer=optimizer, precision=precision)
    table = EmbeddingTable(TableConfig(name="t", seed=4, segments=(segment,)))
    train(table, range(1, 4))
    loaded = reload(table, tmp_path)
    assert loaded.config == table.config
    assert snapshot(loaded) == snapshot(table)
    train(table, range(4, 7))
    train(loaded, range(4, 7))
    assert snapshot(loaded) == snapshot(table)


def test_everything_of_a_config_comes_back(tmp_path: Path) -> None:
    parts = (
        Segment(dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=0.1), compressor=Fp16()),
        Segment(dim=3, initializer=RandomNormal(mean=0.25, std=0.1), compressor=OneBit(step_size=3, amplitude=0.1)),
        Segment(dim=2, initializer=XavierUniform(gain=0.3), precision="bf16", stochastic_rounding=False),
        Segment(dim=2, initializer=Constant(value=1 / 3), compressor=FixedR8(range=0.7)),
        *(Segment(dim=1, optimizer=optimizer, compressor=Bf16()) for optimizer in every_optimizer().values()),
    )
    config = TableConfig(
        name='naïve/名前 "quoted"',
        seed=2**64 - 1,
        segments=parts,
        unseen="zeros",
        initial_capacity=10,
        expiry=Expiry(default=123, slots={0: 5, 32767: 0}),
    )
    loaded = reload(EmbeddingTable(config), tmp_path)
    assert loaded.config == config
    assert len(loaded) == 0


def test_an_empty_table(tmp_path: Path) -> None:
    table = EmbeddingTable(sgd_table_config(3))
    loaded = reload(table, tmp_path)
    assert len(loaded) == 0
    loaded.assign(int64([1]), torch.ones(1, 3))
    assert len(loaded) == 1


def test_many_rows(tmp_path: Path) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=16),)))
    ids = torch.from_numpy(np.random.default_rng(1).integers(INT64_MIN, INT64_MAX, 100_000))
    table.apply_gradients(ids, torch.randn(100_000, 16, generator=torch.Generator().manual_seed(1)), event_time=3)
    table.erase(ids[::7])
    loaded = reload(table, tmp_path)
    assert len(loaded) == len(table)
    assert snapshot(loaded) == snapshot(table)


def test_the_clock_of_expiry_comes_back(tmp_path: Path) -> None:
    table = EmbeddingTable(sgd_table_config(1))
    table.assign(int64([1]), torch.ones(1, 1), event_time=500)
    table.assign(int64([1]), torch.ones(1, 1), event_time=20)
    assert reload(table, tmp_path).stats().max_event_time == 500


def test_saving_changes_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=4),)))
    train(table, range(3))
    before = snapshot(table)
    table.save(tmp_path / "a")
    table.save(tmp_path / "b")
    assert snapshot(table) == before
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_save_replaces_the_older_file(tmp_path: Path) -> None:
    table = EmbeddingTable(sgd_table_config(1))
    table.assign(int64([1]), torch.ones(1, 1))
    table.save(tmp_path / "t")
    table.assign(int64([2]), torch.ones(1, 1))
    table.save(tmp_path / "t")
    assert len(EmbeddingTable.load(tmp_path / "t")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_paths_may_be_strings_relative_or_strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = EmbeddingTable(sgd_table_config(1))
    table.assign(int64([1]), torch.ones(1, 1))
    monkeypatch.chdir(tmp_path)
    for name in ("plain", str(tmp_path / "absolute"), "with space", "ünïcödé", "-dash", ".hidden"):
        table.save(name)
        assert_equal(EmbeddingTable.load(name).lookup(int64([1])), [[1.0]])


def test_a_loaded_table_is_independent_of_the_file(tmp_path: Path) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=4),)))
    train(table, range(3))
    loaded = reload(table, tmp_path)
    (tmp_path / "t.table").write_bytes(b"")
    (tmp_path / "t.table").unlink()
    assert snapshot(loaded) == snapshot(table)
