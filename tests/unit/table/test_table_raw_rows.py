"""Danger: a row that is moved between tables as bytes changes, or is accepted by a table of another layout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import InvalidArgumentError
from monolith.table import SGD, Adam, BatchSoftmax, Bf16, FixedR8, Fp16, OneBit, TableState

CONFIGS = {
    "adam": TableConfig(name="t", segments=(Segment(dim=3, optimizer=Adam()),)),
    "half": TableConfig(
        name="t", segments=(Segment(dim=3, precision="fp16", optimizer=SGD()), Segment(dim=5, precision="bf16"))
    ),
    "int64 state": TableConfig(name="t", segments=(Segment(dim=1, optimizer=BatchSoftmax()),)),
    "serving": TableConfig(
        name="t",
        mode="serving",
        segments=tuple(Segment(dim=3, compressor=c) for c in (Fp16(), Bf16(), FixedR8(range=2.0), OneBit())),
    ),
}


def filled(config: TableConfig) -> EmbeddingTable:
    table = EmbeddingTable(config)
    ids = torch.arange(-50, 50)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(100, table.dim, generator=generator)
    table.assign(ids, values, event_time=7)
    if config.mode == "training":
        table.apply_gradients(ids[::2], values[::2], step=4, event_time=9)
    return table


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_encode_is_the_inverse_of_decode(config: TableConfig) -> None:
    table = filled(config)
    fresh = EmbeddingTable(config)
    fresh.track_changes()
    source = table.entries()
    fresh.insert_rows(source.ids, source.times, table.encode(source))
    (piece,) = fresh.cut_changes()
    entries = table.decode(piece.ids, piece.times, piece.rows)
    assert (table.encode(entries) == piece.rows).all()
    again = table.lookup_entry(piece.ids)
    assert torch.equal(entries.values, again.values)
    assert torch.equal(entries.times, again.times)
    assert entries.found.all()
    assert entries.slots.keys() == again.slots.keys()
    for name, slot in entries.slots.items():
        assert torch.equal(slot, again.slots[name])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_rows_a_cut_has_are_the_rows_a_table_takes(config: TableConfig) -> None:
    table, copy = EmbeddingTable(config), EmbeddingTable(config)
    table.track_changes()
    ids = torch.arange(-50, 50)
    table.assign(ids, torch.linspace(-3, 3, 100 * table.dim).reshape(100, table.dim), event_time=7)
    if config.mode == "training":
        table.apply_gradients(ids[::2], torch.ones(50, table.dim), step=4, event_time=9)
    for piece in table.cut_changes():
        copy.insert_rows(piece.ids, piece.times, piece.rows)
        assert (table.encode(table.lookup_entry(piece.ids)) == piece.rows).all()
    assert torch.equal(copy.lookup(ids), table.lookup(ids))
    assert copy.stats().max_event_time == table.stats().max_event_time


def test_insert_rows_replaces_rows() -> None:
    table = filled(CONFIGS["adam"])
    entries = table.lookup_entry([1, 2])
    swapped = dataclasses.replace(entries, values=entries.values.flip(0))
    table.insert_rows(entries.ids, [100, 200], table.encode(swapped))
    assert torch.equal(table.lookup([1, 2]), entries.values.flip(0))
    assert table.lookup_entry([1, 2]).times.tolist() == [100, 200]
    assert len(table) == 100


def test_read_only_arrays_are_taken() -> None:
    table = filled(CONFIGS["adam"])
    entries = table.lookup_entry([1, 2])
    rows = np.frombuffer(table.encode(entries).tobytes(), dtype=np.uint8).reshape(2, -1)
    ids = np.frombuffer(np.array([1, 2]).tobytes(), dtype=np.int64)
    table.insert_rows(ids, np.frombuffer(np.array([5, 6], dtype=np.uint32).tobytes(), dtype=np.uint32), rows)
    assert torch.equal(table.decode(ids, [5, 6], rows).values, entries.values)


@pytest.mark.parametrize(
    ("times", "rows", "message"),
    [
        ([0], np.zeros((2, 4), np.uint8), r"rows: expected uint8 \[n, 44\]"),
        ([0], np.zeros((1, 44), np.int8), r"rows: expected uint8"),
        ([0, 0], np.zeros((1, 44), np.uint8), "times"),
        ([-1], np.zeros((1, 44), np.uint8), "times: expected seconds"),
        ([2**32], np.zeros((1, 44), np.uint8), "times: expected seconds"),
        ([0.5], np.zeros((1, 44), np.uint8), "times: expected whole seconds"),
    ],
)
def test_rows_that_do_not_fit_are_refused(times: list[int], rows: np.ndarray, message: str) -> None:
    table = EmbeddingTable(CONFIGS["adam"])
    with pytest.raises(InvalidArgumentError, match=message):
        table.insert_rows([1], times, rows)
    assert len(table) == 0


def test_entries_without_a_slot_are_refused() -> None:
    table = filled(CONFIGS["adam"])
    entries = table.lookup_entry([1])
    with pytest.raises(InvalidArgumentError, match="needs 0/m"):
        table.encode(dataclasses.replace(entries, slots={"0/v": entries.slots["0/v"]}))


def test_layout_tells_which_rows_are_interchangeable() -> None:
    adam = EmbeddingTable(CONFIGS["adam"])
    assert adam.layout == EmbeddingTable(CONFIGS["adam"].model_copy(update={"name": "other"})).layout
    assert adam.layout != EmbeddingTable(CONFIGS["half"]).layout


def test_state_continues() -> None:
    config = TableConfig(name="t", segments=(Segment(dim=2, compressor=OneBit(step_size=1)),))
    table, copy = EmbeddingTable(config), EmbeddingTable(config)
    table.apply_gradients([1], torch.ones(1, 2), step=1000, event_time=5)
    assert table.state().updates == 1
    assert table.state().max_event_time == 5
    assert table.state().hashnet_scales[0] > 1
    copy.set_state(table.state())
    assert copy.state() == table.state()


@pytest.mark.parametrize(
    "state",
    [
        TableState(max_event_time=-1, updates=0, hashnet_scales=(1.0,)),
        TableState(max_event_time=0, updates=2**32, hashnet_scales=(1.0,)),
        TableState(max_event_time=0, updates=0, hashnet_scales=()),
        TableState(max_event_time=0, updates=0, hashnet_scales=(float("nan"),)),
    ],
)
def test_an_impossible_state_is_refused(state: TableState) -> None:
    table = EmbeddingTable(CONFIGS["adam"])
    before = table.state()
    with pytest.raises(InvalidArgumentError):
        table.set_state(state)
    assert table.state() == before
