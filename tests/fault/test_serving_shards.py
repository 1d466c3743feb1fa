"""Danger: requests fail, hang or get wrong rows while shards are killed, stopped, or come back with another export.

The oracle is the export loaded in this process: every answer has its rows, bit for bit, or is a typed error.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError, UnavailableError
from monolith.serve import load
from monolith.serve.shards.lookup_scope import lookup_scope
from monolith.serve.shards.shard_replica import ShardClientConfig
from monolith.serve.shards.shard_store import ShardStore, open_shard_stores
from monolith.table import Bags, Store
from serving_shards import ShardProcess, export_rows

PATIENCE = 60.0


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_rows(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def oracle(export: Path) -> Store:
    (store,) = load(export).stores.values()
    return store


class Requests:
    """Looks up random ids in threads until it is stopped, and compares every answer with the oracle."""

    def __init__(self, store: ShardStore, oracle: Store, *, threads: int = 2) -> None:
        self._store, self._oracle = store, oracle
        self._stop = threading.Event()
        self.answered, self.wrong = 0, 0
        self.errors: list[Exception] = []
        self._counting = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(threads)]

    def _run(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        while not self._stop.is_set():
            ids = chance.integers(0, 4000, 64)
            bags = [Bags(table=name, ids=ids, offsets=np.arange(0, 65, 2)) for name in ("user", "item")]
            try:
                found = self._store.lookup(bags)
            except Exception as error:
                self.errors.append(error)
                continue
            same = all(torch.equal(a, b) for a, b in zip(found, self._oracle.lookup(bags), strict=True))
            with self._counting:
                self.answered += 1
                self.wrong += not same

    def more(self, count: int) -> None:
        """Wait until `count` more requests were answered."""
        target = self.answered + count
        wait_until(lambda: self.answered >= target or bool(self.errors))

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, "it never happened"
        threading.Event().wait(0.02)


def client(**options: object) -> ShardClientConfig:
    return ShardClientConfig(**{"pool_on_shards": False, "timeout": 20.0, "attempts": 4, **options})


@contextlib.contextmanager
def shards_of(export: Path, *numbers: int) -> Iterator[list[ShardProcess]]:
    """Run a process for each of these numbers of two shards."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ShardProcess(export, number, 2)) for number in numbers]


def test_a_replica_is_killed_while_requests_run(export: Path, oracle: Store) -> None:
    with shards_of(export, 0, 0, 1, 1) as processes, contextlib.ExitStack() as later:
        addresses = ",".join(process.address for process in processes)
        with open_shard_stores(addresses, config=client()) as opened:
            group = opened.group
            wait_until(lambda: sum(one.healthy for one in group.status()) == 4)
            with Requests(opened["embeddings"], oracle) as requests:
                requests.more(50)
                for victim in (0, 3):
                    processes[victim].kill()
                    requests.more(200)
                later.enter_context(ShardProcess(export, 0, 2, port=processes[0].port))
                wait_until(lambda: sum(one.healthy for one in group.status()) == 3)
                # Only the one that came back has the first shard now.
                processes[1].kill()
                requests.more(200)
            assert requests.errors == []
            assert requests.wrong == 0
            assert requests.answered >= 600


def test_the_only_replica_is_killed_and_comes_back(export: Path, oracle: Store) -> None:
    ids = Bags(table="user", ids=np.arange(500), offsets=np.arange(501))
    # The test would not end if an error waited for the deadline.
    patient = client(timeout=600.0)
    with (
        shards_of(export, 0, 1) as (zero, one),
        open_shard_stores(f"{zero.address};{one.address}", config=patient) as opened,
    ):
        store = opened["embeddings"]
        assert torch.equal(store.lookup([ids])[0], oracle.lookup([ids])[0])
        one.kill()
        for _ in range(2):
            with pytest.raises(UnavailableError, match=rf"buckets 2048\.\.4095.*{one.address}"):
                store.lookup([ids])
        with ShardProcess(export, 1, 2, port=one.port):
            wait_until(lambda: all(status.healthy for status in opened.group.status()))
            assert torch.equal(store.lookup([ids])[0], oracle.lookup([ids])[0])


def test_a_stopped_replica_does_not_hold_requests(export: Path, oracle: Store) -> None:
    with shards_of(export, 0, 0, 1) as processes:
        addresses = ",".join(process.address for process in processes)
        with open_shard_stores(addresses, config=client(timeout=3.0)) as opened:
            wait_until(lambda: sum(one.healthy for one in opened.group.status()) == 3)
            with Requests(opened["embeddings"], oracle) as requests:
                requests.more(50)
                processes[0].signal(signal.SIGSTOP)
                requests.more(200)
                processes[0].signal(signal.SIGCONT)
                wait_until(lambda: sum(one.healthy for one in opened.group.status()) == 3)
                requests.more(50)
            assert requests.errors == []
            assert requests.wrong == 0


def test_a_stopped_shard_is_reported_within_the_deadline_of_a_request(export: Path) -> None:
    ids = Bags(table="user", ids=np.arange(500), offsets=np.arange(501))
    with (
        shards_of(export, 0, 1) as (zero, one),
        open_shard_stores(f"{zero.address};{one.address}", config=client(timeout=600.0)) as opened,
    ):
        one.signal(signal.SIGSTOP)
        with lookup_scope(timeout=0.3), pytest.raises(UnavailableError, match=one.address):
            opened["embeddings"].lookup([ids])
        one.signal(signal.SIGCONT)
        assert opened["embeddings"].lookup([ids])[0].shape == (500, 4)


def test_processes_of_another_export_are_refused(export: Path, tmp_path: Path) -> None:
    other = export_rows(tmp_path, seed=6)
    with (
        ShardProcess(export, 0, 2) as one,
        ShardProcess(other, 1, 2) as two,
        pytest.raises(ConfigError, match="expected export"),
    ):
        open_shard_stores(f"{one.address};{two.address}", config=client())
