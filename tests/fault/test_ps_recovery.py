"""Danger: a killed server forgets what it has acknowledged, counts a repeated push twice, or writes concurrently with its
successor.

Workers take 1 from rows that begin at 0, so a row says how often it was updated; the oracle, outside of the servers, counts what
was sent and what was acknowledged.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import ForkedServer

from forked_processes import ForkedServerProcess
from monolith.errors import DeadlineExceededError, MonolithError, UnavailableError
from monolith.ps import ClientConfig, ServerStore
from monolith.ps.client.saving import RemoteLog
from monolith.ps.client.server_group import ServerGroup
from monolith.table import SGD, Bags, Gradient, Segment, TableConfig, Zeros

_log = logging.getLogger(__name__)

TABLE = TableConfig(name="counts", segments=(Segment(dim=1, optimizer=SGD(learning_rate=1.0), initializer=Zeros()),))
IDS = np.arange(64)


@contextmanager
def servers(folder: Path, count: int, flush: float) -> Iterator[list[ForkedServer]]:
    with ExitStack() as stack:
        made = []
        for number in range(count):
            made.append(ForkedServer(folder / str(number), flush))
            stack.callback(made[-1].close)
        yield made


@dataclass
class Worker:
    """Takes 1 from every id of its own, batch after batch, until told to stop; a server that is away is waited for."""

    addresses: list[str]
    number: int
    sent: int = 0
    acknowledged: int = 0
    error: MonolithError | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    progress: threading.Condition = field(default_factory=threading.Condition)

    @property
    def ids(self) -> np.ndarray:
        return IDS + 1000 * self.number

    def run(self) -> None:
        config = ClientConfig(worker=f"worker-{self.number}", timeout=120.0)
        bags = Bags(table="counts", ids=self.ids, offsets=np.arange(len(IDS) + 1))
        try:
            with ServerStore(self.addresses, [TABLE], config=config) as store:
                while not self.stop.is_set():
                    self.sent += 1
                    store.apply([Gradient(bags=bags, values=torch.ones(len(IDS), 1))])
                    with self.progress:
                        self.acknowledged += 1
                        self.progress.notify_all()
        except MonolithError as error:
            self.error = error

    def wait_for(self, more: int) -> None:
        """Until so many more batches are acknowledged."""
        with self.progress:
            goal = self.acknowledged + more
            assert self.progress.wait_for(lambda: self.acknowledged >= goal or self.error, timeout=120), "no progress"
        assert self.error is None, self.error


@contextmanager
def working(addresses: list[str], count: int) -> Iterator[list[Worker]]:
    workers = [Worker(addresses, number) for number in range(count)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop.set()
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive()


def counted(addresses: list[str], ids: np.ndarray) -> np.ndarray:
    with ServerStore(addresses, [TABLE], config=ClientConfig(timeout=60.0)) as store:
        rows = store.lookup([Bags(table="counts", ids=ids, offsets=np.arange(len(ids) + 1))])[0]
    return -rows.flatten().numpy()


def count(store: ServerStore, id_: int) -> float:
    return -float(store.lookup([Bags(table="counts", ids=np.array([id_]), offsets=np.array([0, 1]))])[0].item())


@contextmanager
def started(folder: Path) -> Iterator[ForkedServer]:
    server = ForkedServer(folder, 0.0)
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("kills", [pytest.param(8, id="quick"), pytest.param(120, id="long", marks=pytest.mark.slow)])
def test_every_acknowledged_push_is_there_once_however_often_servers_are_killed(tmp_path: Path, kills: int) -> None:
    chance, away = random.Random(7), []
    with servers(tmp_path, 2, 0.0) as processes:
        addresses = [process.address for process in processes]
        with working(addresses, 2) as workers:
            for _ in range(kills):
                chance.choice(workers).wait_for(chance.randint(1, 30))
                victim = chance.choice(processes)
                victim.kill()
                began = time.monotonic()
                victim.restart()
                away.append(time.monotonic() - began)
            for worker in workers:
                worker.wait_for(5)
        for worker in workers:
            assert worker.error is None
            assert worker.acknowledged == worker.sent
            assert counted(addresses, worker.ids).tolist() == [worker.sent] * len(IDS)
    pushes, longest = sum(worker.acknowledged for worker in workers), max(away)
    _log.info("%d kills, %d pushes, all counted once; a server was back after %.2f s at most", kills, pushes, longest)


def test_with_an_interval_a_kill_costs_what_came_after_the_last_commit_and_other_servers_nothing(
    tmp_path: Path,
) -> None:
    with servers(tmp_path, 2, 3600.0) as processes:
        addresses = [process.address for process in processes]
        with working(addresses, 1) as (worker,):
            worker.wait_for(5)
            before = worker.acknowledged
            with ServerGroup([addresses[0]]) as first:
                RemoteLog(first.links[0]).flush()
            worker.wait_for(20)
            processes[0].kill()
            at_kill = worker.acknowledged
            processes[0].restart()
            worker.wait_for(5)
        assert worker.error is None
        found = counted(addresses, worker.ids)
        losses = sorted(set((worker.sent - found).tolist()))
        assert losses[0] == 0, "the other server has all of them"
        assert 20 <= losses[-1] <= at_kill - before + 1
        assert len(losses) == 2


def test_a_server_that_was_paused_and_replaced_acknowledges_nothing_when_it_wakes_up(tmp_path: Path) -> None:
    with ExitStack() as stack:
        options = ("--folder", str(tmp_path), "--log-flush-secs", "0", "--grace", "0.5")
        stale = ForkedServerProcess(options)
        stack.callback(stale.close)
        sent = acknowledged = 0
        failed: list[MonolithError] = []
        config = ClientConfig(worker="w0", timeout=5.0)

        def push() -> None:
            nonlocal sent, acknowledged
            with ServerStore([stale.address], [TABLE], config=config) as store:
                try:
                    while True:
                        sent += 1
                        store.assign_add("counts", [1], -torch.ones(1, 1))
                        acknowledged += 1
                        going.set()
                except MonolithError as error:
                    failed.append(error)

        going = threading.Event()
        pushing = threading.Thread(target=push)
        pushing.start()
        assert going.wait(60)
        stale.pause()
        heir = ForkedServerProcess((*options, "--take-over"))
        stack.callback(heir.close)
        stale.resume()
        pushing.join(timeout=60)
        assert isinstance(failed[0], UnavailableError | DeadlineExceededError)
        assert sent == acknowledged + 1
        # It ends by itself, and nothing that it does at its end reaches the folder.
        assert stale._process.wait(timeout=60) == 0
        with ServerStore([heir.address], config=ClientConfig(worker="w1")) as store:
            assert count(store, 1) in (acknowledged, sent)
            store.assign_add("counts", [2], -torch.ones(1, 1))
            last = count(store, 1)
        # Nor does what it may have written while it was replaced ever come back.
        heir.kill()
        with ServerStore([stack.enter_context(started(tmp_path)).address]) as store:
            assert (count(store, 1), count(store, 2)) == (last, 1)
