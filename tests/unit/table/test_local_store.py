"""Danger: a store that mixes up its tables, or a folder of tables that is restored half, wrong, or in part from another save."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monolith import (
    ConfigError,
    CorruptFileError,
    EmbeddingTable,
    InvalidArgumentError,
    Segment,
    StorageError,
    TableConfig,
)
from monolith.table import (
    SGD,
    Adagrad,
    AdmissionFilter,
    Bags,
    Gradient,
    LocalStore,
    Ones,
    SlidingAdmission,
    Store,
    Zeros,
)


def store(
    *,
    dim: int = 2,
    seed: int = 0,
    learning_rate: float = 1.0,
    threshold: int = 0,
    names: tuple[str, ...] = ("user", "a/b"),
) -> LocalStore:
    segment = Segment(dim=dim, initializer=Zeros(), optimizer=Adagrad(learning_rate=learning_rate))
    configs = [TableConfig(name=name, segments=(segment,), seed=seed) for name in names]
    admission = SlidingAdmission(capacity=1000, default_threshold=threshold)
    return LocalStore(EmbeddingTable(c, admission=AdmissionFilter(admission) if threshold else None) for c in configs)


def bags(table: str, *rows: list[int], pooling: Any = "sum") -> Bags:  # noqa: ANN401
    ids = np.array([i for row in rows for i in row], dtype=np.int64)
    return Bags(table=table, ids=ids, offsets=np.cumsum([0, *map(len, rows)]), pooling=pooling)


def contents(store: LocalStore) -> dict[str, list[list[float]]]:
    return {name: table.lookup(torch.arange(5)).tolist() for name, table in store.tables.items()}


def test_a_local_store_is_a_store() -> None:
    assert isinstance(store(), Store)
    assert list(store().configs()) == ["user", "a/b"]


def test_requests_are_answered_in_order_table_by_table() -> None:
    tables = store()
    tables.assign("user", [1, 2], torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    tables.assign_add("a/b", [1], torch.tensor([[5.0, 5.0]]))
    asked = [bags("a/b", [1]), bags("user", [1, 2], []), bags("user", [1, 2], pooling="mean")]
    assert [answer.tolist() for answer in tables.lookup(asked)] == [
        [[5.0, 5.0]],
        [[3.0, 3.0], [0.0, 0.0]],
        [[1.5, 1.5]],
    ]
    assert tables.reinitialize("user", [1, 7]).tolist() == [1, 0]
    assert {name: stats.rows for name, stats in tables.stats().items()} == {"user": 3, "a/b": 1}


def test_gradients_of_one_table_are_one_step() -> None:
    apart, together = store(), store()
    first, second = (
        Gradient(bags=b, values=torch.full((1, 2), g))
        for b, g in ((bags("user", [1, 2]), 1.0), (bags("user", [2]), 3.0))
    )
    apart.apply([first, Gradient(bags=bags("a/b", [1]), values=torch.ones(1, 2)), second])
    joined = Gradient(bags=bags("user", [1, 2], [2]), values=torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
    together.apply([joined, Gradient(bags=bags("a/b", [1]), values=torch.ones(1, 2))])
    assert contents(apart) == contents(together)
    # One Adagrad step with the sum 4, not two with 1 and 3: w = -4 / sqrt(0.1 + 16).
    assert apart.tables["user"].lookup([2])[0, 0].item() == pytest.approx(-4 / 16.1**0.5)


def test_learning_rates_step_and_time_reach_the_table() -> None:
    config = TableConfig(name="t", segments=(Segment(dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),))
    tables = LocalStore([EmbeddingTable(config)])
    tables.apply([Gradient(bags=bags("t", [1]), values=torch.ones(1, 1), learning_rates=(0.5,))], event_time=9)
    assert tables.tables["t"].lookup([1]).item() == -0.5
    assert tables.stats()["t"].max_event_time == 9


def test_learning_rates_survive_the_joining_of_gradients() -> None:
    config = TableConfig(name="t", segments=(Segment(dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),))
    tables = LocalStore([EmbeddingTable(config)])
    tables.apply([Gradient(bags=bags("t", [1]), values=torch.ones(1, 1), learning_rates=(0.25,))] * 2)
    assert tables.tables["t"].lookup([1]).item() == -0.5


def test_what_a_store_refuses() -> None:
    config = TableConfig(name="t", segments=(Segment(dim=1, initializer=Ones()),))
    with pytest.raises(ConfigError, match="two are named 't'"):
        LocalStore([EmbeddingTable(config), EmbeddingTable(config)])
    with pytest.raises(InvalidArgumentError, match="the store has no 'item'; it has 'user', 'a/b'"):
        store().lookup([bags("item", [1])])
    mixed = [Gradient(bags=bags("user", [1], pooling=p), values=torch.ones(1, 2)) for p in ("sum", "mean")]
    with pytest.raises(InvalidArgumentError, match="expected one way of pooling, got mean, sum"):
        store().apply(mixed)


def trained(**fields: Any) -> LocalStore:  # noqa: ANN401
    tables = store(**fields)
    for name in tables.tables:
        tables.apply(
            [Gradient(bags=bags(name, [1], [2, 3]), values=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))], event_time=50
        )
    return tables


def test_a_restored_store_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    original = trained()
    original.save(tmp_path / "save")
    restored = store()
    restored.restore(tmp_path / "save")
    for tables in (original, restored):
        tables.apply([Gradient(bags=bags("user", [1, 4]), values=torch.ones(1, 2))])
    assert contents(restored) == contents(original)
    assert restored.stats()["user"].max_event_time == 50
    assert sorted(path.name for path in (tmp_path / "save").iterdir()) == ["a%2Fb.table", "store.json", "user.table"]
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_counters_of_admission_are_restored_and_new_thresholds_count(tmp_path: Path) -> None:
    original = store(threshold=2)
    gradient = Gradient(bags=bags("user", [1]), values=torch.ones(1, 2))
    original.apply([gradient])
    original.save(tmp_path / "save")
    restored = store(threshold=2)
    restored.restore(tmp_path / "save")
    restored.apply([gradient])
    assert restored.stats()["user"].rows == 0
    restored.apply([gradient])
    assert restored.stats()["user"].rows == 1
    without = store()
    without.restore(tmp_path / "save")
    without.apply([gradient])
    assert without.stats()["user"].rows == 1


def test_gradients_of_one_table_with_different_rates_are_refused_before_anything_changes() -> None:
    tables = LocalStore([EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=1, optimizer=SGD()),)))])
    gradients = [Gradient(bags=bags("t", [1]), values=torch.ones(1, 1), learning_rates=(rate,)) for rate in (0.25, 0.5)]
    with pytest.raises(
        InvalidArgumentError, match=r"expected one set of learning rates in a step, got \(0.25,\), \(0.5,\)"
    ):
        tables.apply(gradients)
    assert len(tables.tables["t"]) == 0


def test_learning_rates_may_change_between_save_and_restore(tmp_path: Path) -> None:
    trained().save(tmp_path / "save")
    restored = store(learning_rate=0.125)
    restored.restore(tmp_path / "save")
    assert restored.tables["user"].config.learning_rates == (0.125,)
    assert contents(restored) == contents(trained())


def test_a_save_never_lands_on_another(tmp_path: Path) -> None:
    trained().save(tmp_path / "save")
    with pytest.raises(StorageError, match="expected a new or empty folder"):
        store().save(tmp_path / "save")
    restored = store()
    restored.restore(tmp_path / "save")
    assert contents(restored) == contents(trained())
    (tmp_path / "empty").mkdir()
    store().save(tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "save"]


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = trained()
    monkeypatch.setattr(tables.tables["a/b"], "save", lambda path: (_ for _ in ()).throw(StorageError("disk full")))
    with pytest.raises(StorageError, match="disk full"):
        tables.save(tmp_path / "save")
    assert list(tmp_path.iterdir()) == []


def _without_index(folder: Path) -> None:
    (folder / "store.json").unlink()


def _without_table(folder: Path) -> None:
    (folder / "user.table").unlink()


def _damaged_table(folder: Path) -> None:
    path = folder / "user.table"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _swapped_tables(folder: Path) -> None:
    shutil.copy(folder / "a%2Fb.table", folder / "user.table")


def _newer(folder: Path) -> None:
    index = json.loads((folder / "store.json").read_text()) | {"version": 2}
    (folder / "store.json").write_text(json.dumps(index))


def _binary_index(folder: Path) -> None:
    (folder / "store.json").write_bytes(b"\xff\xfe")


def _list_without_a_table(folder: Path) -> None:
    index = json.loads((folder / "store.json").read_text()) | {"tables": ["a/b"]}
    (folder / "store.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (_without_index, StorageError, "store.json: cannot read the list of tables"),
        (_without_table, StorageError, "user.table"),
        (_damaged_table, CorruptFileError, "user.table"),
        (_swapped_tables, CorruptFileError, "holds table 'a/b' with seed 0, expected 'user'"),
        (_newer, CorruptFileError, "version 2, but this release reads version 1"),
        (_binary_index, CorruptFileError, "store.json: is not text"),
        (_list_without_a_table, CorruptFileError, "has no table 'user'; it has 'a/b'"),
    ],
)
def test_a_damaged_folder_is_refused_and_nothing_changes(
    tmp_path: Path, harm: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    trained().save(tmp_path / "save")
    harm(tmp_path / "save")
    tables = store()
    tables.assign("user", [1], torch.ones(1, 2))
    before = contents(tables)
    with pytest.raises(error, match=message):
        tables.restore(tmp_path / "save")
    assert contents(tables) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 3}, "layout"),
        ({"seed": 1}, "with seed 0, expected 'user' with seed 1"),
        ({"names": ("user", "c")}, "has no table 'c'"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    trained().save(tmp_path / "save")
    with pytest.raises(CorruptFileError, match=message):
        store(**fields).restore(tmp_path / "save")
