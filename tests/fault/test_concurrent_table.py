"""Danger: lost updates, torn rows and half-saved tables when threads run concurrently. Amounts are exact in float32, so that
any order of the same updates must give the same bits; every element of a row carries the same number, so that a
torn read shows.
"""

from __future__ import annotations

import select
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from comparison import assert_equal
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.table import SGD, Adagrad, Constant, Expiry, Zeros
from monolith.testing import sgd_table_config

DIM = 128  # eight cache lines: wide enough that a reader without a lock is caught half-way


def run_together(*jobs: Callable[[], None]) -> None:
    """Start all jobs at once and raise what any of them raised."""
    barrier = threading.Barrier(len(jobs))

    def start(job: Callable[[], None]) -> None:
        barrier.wait()
        job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(start, job) for job in jobs]:
            future.result()


def assert_whole(rows: torch.Tensor) -> None:
    """Every row has one value in all its elements."""
    values = rows.numpy()
    torn = (values != values[:, :1]).any(axis=1)
    assert not torn.any(), f"torn row: {values[torn][0]}"


def writers(table: EmbeddingTable, ids: np.ndarray, threads: int, rounds: int, batch: int) -> list[Callable[[], None]]:
    """Each thread adds 1 to a random batch of ids, `rounds` times; returns the jobs."""

    def job(seed: int) -> Callable[[], None]:
        def write() -> None:
            rng = np.random.default_rng(seed)
            for _ in range(rounds):
                chosen = torch.from_numpy(rng.choice(ids, batch))
                table.apply_gradients(chosen, torch.full((batch, table.dim), -1.0))

        return write

    return [job(seed) for seed in range(threads)]


def expected_counts(ids: np.ndarray, threads: int, rounds: int, batch: int) -> dict[int, int]:
    """How often each id was drawn: the oracle, outside the table."""
    counts: dict[int, int] = {}
    for seed in range(threads):
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            for id_ in rng.choice(ids, batch).tolist():
                counts[id_] = counts.get(id_, 0) + 1
    return counts


@pytest.mark.parametrize(
    ("universe", "batch"),
    [(8, 16), (500, 300), (20_000, 3_000)],
    ids=["a few hot ids", "many ids", "growing, large batches"],
)
def test_no_update_is_lost_and_no_row_is_torn(universe: int, batch: int) -> None:
    table = EmbeddingTable(sgd_table_config(DIM))
    ids = np.random.default_rng(99).integers(-(2**63), 2**63, universe)
    everything, done = torch.from_numpy(ids), threading.Event()
    rounds = 40

    def read() -> None:
        highest = np.zeros(universe)
        while not done.is_set():
            rows = table.lookup(everything)
            assert_whole(rows)
            counts = rows[:, 0].numpy()
            assert (counts >= highest).all(), "a counter went back"
            highest = counts
            assert_whole(table.lookup_pooled(everything, torch.tensor([0, universe // 2, universe])))
            entries = table.lookup_entry(everything)
            assert_whole(entries.values)

    def write() -> None:
        try:
            run_together(*writers(table, ids, 3, rounds, batch))
        finally:
            done.set()

    run_together(write, read, read)
    counts = expected_counts(ids, 3, rounds, batch)
    assert len(table) == len(counts)
    expected = np.array([counts.get(id_, 0) for id_ in ids.tolist()], np.float32)
    assert_equal(table.lookup(everything), np.repeat(expected[:, None], DIM, axis=1))


def test_all_kinds_of_writes_add_up() -> None:
    table = EmbeddingTable(sgd_table_config(DIM))
    ids = torch.arange(300)
    rounds = 60

    def gradients() -> None:
        for _ in range(rounds):
            table.apply_gradients(ids, torch.full((300, DIM), -1.0))

    def sequential() -> None:
        for _ in range(rounds):
            table.apply_gradients(ids.repeat(2), torch.full((600, DIM), -2.0), duplicates="sequential")

    def pooled() -> None:
        splits = torch.tensor([0, 100, 300])
        for _ in range(rounds):
            table.apply_pooled_gradients(ids, splits, torch.full((2, DIM), -16.0))

    def additions() -> None:
        for _ in range(rounds):
            table.assign_add(ids, torch.full((300, DIM), 64.0))

    run_together(gradients, sequential, pooled, additions)
    assert_equal(table.lookup(ids), np.full((300, DIM), rounds * (1 + 4 + 16 + 64)))


def test_inserting_and_erasing_threads_never_mix_rows() -> None:
    # Each id only ever holds its own number: a reused row read under the wrong id would show another.
    table = EmbeddingTable(sgd_table_config(DIM))
    done = threading.Event()

    def churn(offset: int) -> Callable[[], None]:
        def job() -> None:
            for round_ in range(60):
                ids = torch.arange(offset, offset + 1_000) + round_ % 3 * 1_000
                table.assign(ids, ids.float()[:, None].repeat(1, DIM))
                table.erase(ids[::2] if round_ % 2 else ids)

        return job

    def churners() -> None:
        try:
            run_together(churn(0), churn(10_000), churn(20_000))
        finally:
            done.set()

    def read() -> None:
        ids = torch.cat([torch.arange(offset, offset + 3_000) for offset in (0, 10_000, 20_000)])
        own = ids.numpy().astype(np.float32)
        while not done.is_set():
            rows = table.lookup(ids)
            assert_whole(rows)
            values = rows[:, 0].numpy()
            assert ((values == own) | (values == 0)).all(), "an id read another id's row"
            for batch in table.iter_batches(2_000):
                assert_whole(batch.values)
                assert_equal(batch.values[:, 0], batch.ids.numpy().astype(np.float32))

    run_together(churners, read)


def counting_table(**config: object) -> EmbeddingTable:
    """The first segment counts updates, the second's accumulator counts them too: norm == 1 + w in a whole row."""
    parts = (
        Segment(dim=8, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),
        Segment(dim=8, initializer=Constant(value=0.0), optimizer=Adagrad(initial_accumulator_value=1.0)),
    )
    return EmbeddingTable(TableConfig(name="t", segments=parts, **config))


GRAD = torch.cat([torch.full((8,), -1.0), torch.full((8,), 1.0)])


def assert_counts_agree(table: EmbeddingTable) -> None:
    for batch in table.iter_batches():
        counts = batch.values[:, :8]
        assert_whole(counts)
        assert_whole(batch.slots["1/norm"])
        assert_equal(batch.slots["1/norm"], counts + 1, "optimizer state and weights of different moments")


def test_tables_saved_while_training_hold_whole_rows(tmp_path: Path) -> None:
    table = counting_table()
    ids, done = torch.arange(5_000) * 7_919, threading.Event()
    table.apply_gradients(ids[:2_500], GRAD.repeat(2_500, 1))
    saved = 0

    def train(part: int) -> Callable[[], None]:
        def job() -> None:
            for _ in range(60):
                table.apply_gradients(ids[part::2], GRAD.repeat(2_500, 1))

        return job

    def both() -> None:
        try:
            run_together(train(0), train(1))
        finally:
            done.set()

    def save() -> None:
        nonlocal saved
        lowest = torch.zeros(2_500)
        while not done.is_set() or saved == 0:
            table.save(tmp_path / "t")
            loaded = EmbeddingTable.load(tmp_path / "t")
            assert_counts_agree(loaded)
            assert loaded.contains(ids[:2_500]).all(), "a row that was there throughout is missing"
            counts = loaded.lookup(ids[:2_500])[:, 0]
            assert (counts >= lowest).all(), "a later save holds an older row"
            lowest = counts
            saved += 1

    run_together(both, save)
    assert_counts_agree(table)
    table.save(tmp_path / "t")
    assert_equal(EmbeddingTable.load(tmp_path / "t").lookup(ids), table.lookup(ids))


def test_eviction_beside_training_removes_only_the_expired() -> None:
    table = counting_table(expiry=Expiry(default=10))
    keep, done = torch.arange(2_000), threading.Event()
    table.apply_gradients(keep, GRAD.repeat(2_000, 1), event_time=0)

    def train() -> None:
        for now in range(1, 60):
            table.apply_gradients(keep, GRAD.repeat(2_000, 1), event_time=now)
            passing = torch.arange(2_000) + 1_000_000 + now * 2_000
            table.apply_gradients(passing, GRAD.repeat(2_000, 1), event_time=now)
        done.set()

    def evict() -> None:
        while not done.is_set():
            table.evict()

    run_together(train, evict)
    table.evict()
    # A row that is touched every second never expires, so no update to it was lost.
    assert_equal(table.lookup(keep)[:, 0], np.full(2_000, 60))
    assert len(table) == 2_000 + 10 * 2_000
    assert_counts_agree(table)


def test_iteration_beside_writers_gives_lasting_rows_exactly_once() -> None:
    table = EmbeddingTable(sgd_table_config(4))
    lasting, done = np.arange(5_000), threading.Event()
    table.assign(torch.from_numpy(lasting), torch.ones(5_000, 4))

    def grow() -> None:
        for round_ in range(60):
            ids = torch.arange(2_000) + 1_000_000 + round_ * 2_000
            table.assign(ids, torch.ones(2_000, 4))
            if round_ % 2:
                table.erase(ids)
        done.set()

    def scan() -> None:
        while not done.is_set():
            seen = np.concatenate([batch.ids.numpy() for batch in table.iter_batches(500)])
            kept = seen[seen < 1_000_000]
            assert_equal(np.sort(kept), lasting)
            assert len(np.unique(seen)) == len(seen)

    run_together(grow, scan, scan)


def test_clear_beside_writers_leaves_a_working_table() -> None:
    table = EmbeddingTable(sgd_table_config(DIM))
    done = threading.Event()

    def write() -> None:
        for round_ in range(200):
            ids = torch.arange(500) + round_ * 100
            table.apply_gradients(ids, torch.full((500, DIM), -1.0))
        done.set()

    def clear() -> None:
        while not done.is_set():
            table.clear()

    def read() -> None:
        while not done.is_set():
            assert_whole(table.lookup(torch.arange(0, 20_000, 7)))

    run_together(write, clear, read)
    table.clear()
    assert len(table) == 0
    table.apply_gradients(torch.tensor([1]), torch.full((1, DIM), -1.0))
    assert_equal(table.lookup(torch.tensor([1])), np.ones((1, DIM)))


LONG_CALLS: dict[str, Callable[[EmbeddingTable, torch.Tensor, torch.Tensor, Path], object]] = {
    "lookup": lambda table, ids, rows, path: table.lookup(ids),
    "lookup_pooled": lambda table, ids, rows, path: table.lookup_pooled(ids, torch.tensor([0, len(ids)])),
    "lookup_entry": lambda table, ids, rows, path: table.lookup_entry(ids),
    "apply_gradients": lambda table, ids, rows, path: table.apply_gradients(ids, rows),
    "apply_pooled_gradients": lambda table, ids, rows, path: table.apply_pooled_gradients(
        ids, torch.tensor([0, len(ids)]), rows[:1]
    ),
    "assign": lambda table, ids, rows, path: table.assign(ids, rows),
    "assign_add": lambda table, ids, rows, path: table.assign_add(ids, rows),
    "reinitialize": lambda table, ids, rows, path: table.reinitialize(ids),
    "contains": lambda table, ids, rows, path: table.contains(ids),
    "erase": lambda table, ids, rows, path: table.erase(ids + 10**9),
    "evict": lambda table, ids, rows, path: table.evict(),
    "to_numpy": lambda table, ids, rows, path: table.to_numpy(),
    "save": lambda table, ids, rows, path: table.save(path),
    "load": lambda table, ids, rows, path: EmbeddingTable.load(path),
}


def test_every_call_releases_the_interpreter(tmp_path: Path) -> None:
    # With an hour between forced switches another thread moves only when a call lets go of the interpreter by itself.
    table, ids, rows = EmbeddingTable(sgd_table_config(8)), torch.arange(150_000), torch.ones(150_000, 8)
    table.assign(ids, rows)
    table.save(tmp_path / "t")
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            select.select([], [], [], 0)  # gives the interpreter back at once; sleep(0) naps 50 us on some kernels

    interval = sys.getswitchinterval()
    ticker = threading.Thread(target=tick)
    ticker.start()
    sys.setswitchinterval(3600)
    stuck = []
    try:
        for name, call in LONG_CALLS.items():
            # Allocating a result in torch lets go for a tick or two, a call of the core for a hundred. The scheduler may
            # keep either thread off the processor during one call, hardly during most of them.
            released = 0
            for _ in range(200):
                before = ticks
                call(table, ids, rows, tmp_path / "t")
                released += ticks - before > 20
                if released == 5:
                    break
            else:
                stuck.append(name)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        ticker.join()
    assert stuck == []


@pytest.mark.slow
def test_no_update_is_lost_for_long() -> None:
    for seed in range(20):
        table = EmbeddingTable(sgd_table_config(DIM))
        ids = np.random.default_rng(seed).integers(-(2**63), 2**63, 5_000)
        run_together(*writers(table, ids, 8, 200, 2_000))
        counts = expected_counts(ids, 8, 200, 2_000)
        expected = np.array([counts.get(id_, 0) for id_ in ids.tolist()], np.float32)
        assert_equal(table.lookup(torch.from_numpy(ids))[:, 0], expected)
