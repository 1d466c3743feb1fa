"""Danger: spreading tables over shards changes a value, a step, an expiry, or loses a shard's rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_tables import rows_of
from monolith import ConfigError, CorruptFileError, EmbeddingTable, InvalidArgumentError, Segment, TableConfig
from monolith.table import (
    SGD,
    Adagrad,
    Adam,
    AdmissionFilter,
    Bags,
    Expiry,
    Gradient,
    LocalStore,
    OneBit,
    ShardedStore,
    SlidingAdmission,
    Store,
    Zeros,
    bucket_of,
    bucket_ranges,
)

NAMES = ("user", "a/b")
# Whole floats: stochastic rounding of half precision depends on what else is in a call.
SEGMENTS = (Segment(dim=3, optimizer=Adam()), Segment(dim=2, optimizer=Adagrad()))


def local(*, threshold: int = 0) -> LocalStore:
    admission = SlidingAdmission(capacity=1000, default_threshold=threshold)
    return LocalStore(
        EmbeddingTable(
            TableConfig(name=name, segments=SEGMENTS), admission=AdmissionFilter(admission) if threshold else None
        )
        for name in NAMES
    )


def sharded(count: int, **options: Any) -> ShardedStore:  # noqa: ANN401
    return ShardedStore([local(**options) for _ in range(count)])


def tables(store: Store, name: str) -> list[EmbeddingTable]:
    shards: Sequence[Store] = store.shards if isinstance(store, ShardedStore) else [store]
    found: list[EmbeddingTable] = []
    for shard in shards:
        found += [shard.tables[name]] if isinstance(shard, LocalStore) else tables(shard, name)
    return found


def rows(store: Store) -> dict[str, dict[int, bytes]]:
    return {name: rows_of(*tables(store, name)) for name in NAMES}


def random_bags(chance: np.random.Generator, name: str, pooling: Any) -> Bags:  # noqa: ANN401
    """Bags with duplicates within and between them, some empty, ids of both signs."""
    lengths = chance.integers(0, 6, 40)
    ids = chance.integers(-150, 150, lengths.sum())
    return Bags(table=name, ids=ids, offsets=np.concatenate([[0], np.cumsum(lengths)]), pooling=pooling)


def exercise(store: Store) -> list[Any]:
    """Every call of the interface, with all that was answered."""
    chance = np.random.default_rng(5)
    answers: list[Any] = []
    for step in range(6):
        pooling = ("sum", "mean", "sqrtn")[step % 3]
        requests = [random_bags(chance, name, pooling) for name in (*NAMES, NAMES[0])]
        answers += [answer.numpy().tobytes() for answer in store.lookup(requests)]
        gradients = [
            Gradient(bags=bags, values=torch.from_numpy(chance.standard_normal((40, 5), dtype=np.float32)))
            for bags in requests
        ]
        store.apply(gradients, step=step, event_time=1000 * step)
        ids = chance.integers(-200, 200, 30)
        values = torch.from_numpy(chance.standard_normal((30, 5), dtype=np.float32))
        store.assign("user", ids, values, event_time=1000 * step)
        store.assign_add("a/b", ids, values)
        answers.append(store.reinitialize("user", ids.reshape(5, 6)[:, ::2].copy()).tolist())
    answers.append({name: (stats.rows, stats.max_event_time) for name, stats in store.stats().items()})
    return answers


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_sharded_store_answers_and_learns_like_one_table(count: int) -> None:
    one, many = local(), sharded(count)
    assert isinstance(many, Store)
    assert exercise(many) == exercise(one)
    assert rows(many) == rows(one)
    for shard, owned in zip(tables(many, "user"), bucket_ranges(count), strict=True):
        assert all(bucket in owned for bucket in bucket_of(shard.entries().ids))


def test_shards_may_be_sharded_themselves() -> None:
    inner = ShardedStore([local(), local()], ranges=[range(1000), range(1000, 4096)])
    outer = ShardedStore([inner, local()])
    assert exercise(outer) == exercise(local())


def test_a_shard_without_an_id_of_a_step_still_sees_the_step() -> None:
    segment = Segment(
        dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=1.0), compressor=OneBit(step_size=1, amplitude=1.0)
    )
    config = TableConfig(name="t", segments=(segment,))
    store = ShardedStore([LocalStore([EmbeddingTable(config)]) for _ in range(2)])
    bags = Bags(table="t", ids=np.array([0]), offsets=np.array([0, 1]))
    store.apply([Gradient(bags=bags, values=torch.ones(1, 1))], step=1000, event_time=77)
    first, second = (shard.tables["t"].state() for shard in store.shards)  # type: ignore[attr-defined]
    assert first == second
    assert first.max_event_time == 77


def test_expiry_goes_by_the_newest_time_of_any_shard() -> None:
    config = TableConfig(name="t", segments=(Segment(dim=1, initializer=Zeros()),), expiry=Expiry(default=100))
    store = ShardedStore([LocalStore([EmbeddingTable(config)]) for _ in range(4)])
    ids = np.arange(50)
    store.assign("t", ids, torch.zeros(50, 1), event_time=10)
    store.assign("t", ids[:1], torch.zeros(1, 1), event_time=200)  # one shard alone knows that it is late
    assert store.evict() == {"t": 49}
    assert store.evict(now=400) == {"t": 1}
    assert LocalStore([EmbeddingTable(config)]).evict(now={"t": 5}) == {"t": 0}


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_any_store_restores_what_any_store_saved(tmp_path: Path, saved: int) -> None:
    original: Store = sharded(saved) if saved > 1 else local()
    exercise(original)
    original.save(tmp_path / "save")
    for count in (1, 2, 4):
        copy = sharded(count)
        copy.restore(tmp_path / "save")
        assert rows(copy) == rows(original)
        assert copy.is_initialised()
    copy = ShardedStore([sharded(2), local()])
    copy.restore(tmp_path / "save")
    assert rows(copy) == rows(original)
    alone = local()
    alone.restore(tmp_path / "save")
    assert rows(alone) == rows(original)
    assert alone.stats()["user"].max_event_time == original.stats()["user"].max_event_time


def test_admission_counts_follow_their_ids_where_they_can(tmp_path: Path) -> None:
    store = sharded(2, threshold=1)
    bags = Bags(table="user", ids=np.arange(30), offsets=np.arange(31))
    gradient = Gradient(bags=bags, values=torch.ones(30, 5))
    store.apply([gradient])
    store.save(tmp_path / "save")
    for count, admitted in ((2, 30), (4, 30), (1, 0)):
        copy = sharded(count, threshold=1)
        copy.restore(tmp_path / "save")
        copy.apply([gradient])
        assert copy.stats()["user"].rows == admitted


def test_only_lost_shards_come_back(tmp_path: Path) -> None:
    """One step is saved, one more is not: what was kept stays at 2, what was restarted goes back to 1."""

    def step(store: ShardedStore) -> None:
        store.assign_add("t", ids, torch.ones(2, 1))

    def shard() -> LocalStore:
        return LocalStore([EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=1, initializer=Zeros()),)))])

    first, second = (next(i for i in range(99) if bucket_of([i])[0] in owned) for owned in bucket_ranges(2))
    ids = [first, second]
    bags = Bags(table="t", ids=np.array(ids), offsets=np.arange(3))
    servers = [shard(), shard()]
    store = ShardedStore(servers)
    store.mark_initialised()
    step(store)
    store.save(tmp_path / "model.ckpt-1")
    step(store)
    restarted = ShardedStore([servers[0], shard()])
    assert not restarted.is_initialised()
    restarted.prepare_fresh(tmp_path / "model.ckpt-1")()
    assert restarted.lookup([bags])[0].tolist() == [[2.0], [1.0]]
    assert restarted.is_initialised()
    everything_new = ShardedStore([shard(), shard()])
    everything_new.prepare_fresh(tmp_path / "model.ckpt-1")()
    assert everything_new.lookup([bags])[0].tolist() == [[1.0], [1.0]]
    restarted.restore(tmp_path / "model.ckpt-1")
    assert restarted.lookup([bags])[0].tolist() == [[1.0], [1.0]]


def test_when_one_shard_cannot_be_restored_none_is(tmp_path: Path) -> None:
    store = sharded(2)
    exercise(store)
    store.save(tmp_path / "save")
    (tmp_path / "save" / "shard-00001" / "user.table").write_bytes(b"")
    copy = sharded(2)
    copy.assign("user", [1], torch.ones(1, 5))
    before = rows(copy)
    with pytest.raises(CorruptFileError):
        copy.restore(tmp_path / "save")
    assert rows(copy) == before
    (tmp_path / "save" / "shards.json").write_text('{"version": 2, "buckets": []}')
    with pytest.raises(CorruptFileError, match="upgrade"):
        copy.restore(tmp_path / "save")


def test_what_a_sharded_store_refuses() -> None:
    with pytest.raises(ConfigError, match=r"ranges\[1\]: some of range\(10, 4096\) belong to an earlier owner"):
        ShardedStore([local(), local()], ranges=[range(11), range(10, 4096)])
    with pytest.raises(ConfigError, match="nobody owns bucket 7"):
        ShardedStore([local(), local()], ranges=[range(7), range(8, 4096)])
    with pytest.raises(ConfigError, match="expected one for each of 2 owners, got 1"):
        ShardedStore([local(), local()], ranges=[range(4096)])
    with pytest.raises(ConfigError, match=r"shards\[1\]: expected the tables of the first shard"):
        ShardedStore([local(), LocalStore([])])
    with pytest.raises(InvalidArgumentError, match="the store has no 'item'; it has 'user', 'a/b'"):
        sharded(2).lookup([Bags(table="item", ids=np.array([1]), offsets=np.array([0, 1]))])
    with pytest.raises(InvalidArgumentError, match=r"values: expected \[2, 5\], one row per id, got \[1, 5\]"):
        sharded(2).assign("user", [1, 2], torch.ones(1, 5))
    with pytest.raises(InvalidArgumentError, match=r"expected 1\.\.4096 owners, got 0"):
        bucket_ranges(0)
