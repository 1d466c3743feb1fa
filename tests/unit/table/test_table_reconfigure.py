"""Danger: hyperparameters that are changed under rows: a setting that does not act, or a row that is read while it changes."""

from __future__ import annotations

import threading

import pytest
import torch

from monolith import EmbeddingTable, InvalidArgumentError, Segment, TableConfig
from monolith.table import SGD, Adagrad, AdmissionFilter, Expiry, RandomUniform, SlidingAdmission, Zeros


def config(rate: float = 1.0, **changes: object) -> TableConfig:
    segment = Segment(dim=2, initializer=Zeros(), optimizer=SGD(learning_rate=rate))
    return TableConfig.model_validate({"name": "item", "segments": (segment,), **changes})


def test_rates_initial_values_and_expiry_are_the_new_ones_and_rows_stay() -> None:
    table = EmbeddingTable(config(expiry=Expiry(default=1000)))
    table.apply_gradients([1], torch.ones(1, 2), event_time=100)
    part = Segment(dim=2, initializer=RandomUniform(low=5.0, high=6.0), optimizer=SGD(learning_rate=0.25))
    table.reconfigure(config(segments=(part,), expiry=Expiry(default=10)))
    assert table.lookup([1]).tolist() == [[-1.0, -1.0]]
    table.apply_gradients([1], torch.ones(1, 2), event_time=100)
    assert table.lookup([1]).tolist() == [[-1.25, -1.25]]
    assert ((table.lookup([7]) >= 5) & (table.lookup([7]) < 6)).all()
    assert table.evict(now=200) == 1


def test_changes_are_still_remembered() -> None:
    table = EmbeddingTable(config())
    table.track_changes()
    table.apply_gradients([1], torch.ones(1, 2))
    table.reconfigure(config(0.5))
    table.apply_gradients([2], torch.ones(1, 2))
    assert sorted(int(id_) for piece in table.cut_changes() for id_ in piece.ids) == [1, 2]


def test_counts_of_another_filter_are_used() -> None:
    table = EmbeddingTable(config(), admission=AdmissionFilter(SlidingAdmission(capacity=300, default_threshold=9)))
    table.apply_gradients([1], torch.ones(1, 2))
    assert len(table) == 0
    table.reconfigure(config())
    table.apply_gradients([1], torch.ones(1, 2))
    assert len(table) == 1


@pytest.mark.parametrize(
    "other",
    [
        config(name="user"),
        config(seed=1),
        config(unseen="zeros"),
        config(segments=(Segment(dim=3, optimizer=SGD()),)),
        config(segments=(Segment(dim=2, optimizer=Adagrad()),)),
        config(segments=(Segment(dim=2, optimizer=SGD(), precision="fp16"),)),
    ],
)
def test_other_rows_are_refused_and_nothing_changes(other: TableConfig) -> None:
    table = EmbeddingTable(config())
    with pytest.raises(
        InvalidArgumentError, match="reconfigure: expected the name, seed, mode and layout of table 'item'"
    ):
        table.reconfigure(other)
    assert table.config == config()
    table.apply_gradients([1], torch.ones(1, 2))
    assert table.lookup([1]).tolist() == [[-1.0, -1.0]]


def test_lookups_go_on_meanwhile() -> None:
    table = EmbeddingTable(config())
    table.assign(ids := torch.arange(10_000), torch.ones(10_000, 2))
    stop, wrong = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            if not bool((table.lookup(ids) == 1).all()):
                wrong.append(True)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(50):
        table.reconfigure(config(1.0 + number))
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
