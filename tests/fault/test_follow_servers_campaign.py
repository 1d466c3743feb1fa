"""Danger: parameter servers are killed and stopped, buckets move between them and connections are reset while a replica follows;
the replica then serves rows of a server that no longer owns them, or misses changes, and nothing corrects it.

After every fault its rows must be those of the servers, bit for bit, and these what was pushed.
`MONOLITH_CAMPAIGN_FAULTS=200 pytest -m slow tests/fault/test_follow_servers_campaign.py` is a longer form."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from test_follow_bad_network import BadNetwork

from followed_tables import Copies, until, writer_at
from forked_processes import ForkedServerProcess
from monolith.follow import Follower, Writer
from monolith.ps import ClientConfig, ServerStore
from monolith.table import SGD, Bags, Gradient, Zeros
from monolith.table.config import Segment, TableConfig
from moving_buckets import rebalance_until_done

TABLE = TableConfig(name="item", segments=(Segment(dim=4, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),))
IDS = np.arange(3000) * 2**33 + 5
PATIENT = ClientConfig(timeout=240)
SLOW_FAULTS = int(os.environ.get("MONOLITH_CAMPAIGN_FAULTS", "60"))
_log = logging.getLogger(__name__)


class Servers:
    """Three servers that lose nothing that was acknowledged. Each has a network between it and those that follow it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self.processes = [self._start(number) for number in range(3)]
        self.addresses = [process.address for process in self.processes]
        self.networks = {address: BadNetwork(address, seed + number) for number, address in enumerate(self.addresses)}

    def _start(self, number: int, port: int = 0) -> ForkedServerProcess:
        folder, options = self._folder / str(number), ["--log-flush-secs", "0", "--move-piece", "2KiB"]
        return ForkedServerProcess(["--folder", str(folder), "--port", str(port), "--feed-secs", "0.02", *options])

    def kill(self, number: int) -> None:
        process = self.processes[number]
        process.kill()
        process.close()
        self.processes[number] = self._start(number, int(process.address.rpartition(":")[2]))

    def stop(self, number: int, seconds: float) -> None:
        process = self.processes[number]
        process.pause()
        time.sleep(seconds)
        process.resume()

    def writer(self, address: str) -> Writer:
        return writer_at(self.networks[address].address, address)

    def be_calm(self, calm: bool) -> None:
        for network in self.networks.values():
            (network.calm.set if calm else network.calm.clear)()

    @property
    def resets(self) -> int:
        return sum(network.resets for network in self.networks.values())

    def close(self) -> None:
        for network in self.networks.values():
            network.close()
        for process in self.processes:
            process.close()


class Worker(threading.Thread):
    """Adds 1 to random ids and erases others, and keeps count of what they must be."""

    def __init__(self, store: ServerStore, seed: int) -> None:
        super().__init__()
        self.counted: dict[int, int] = {}
        self.pushes = 0
        self.error: BaseException | None = None
        self._ending, self._pushing = threading.Event(), threading.Lock()
        self._store, self._draw = store, np.random.default_rng(seed)

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                with self._pushing:
                    self._push()
                time.sleep(0.002)  # so that others get the lock
        except BaseException as error:
            self.error = error

    def _push(self) -> None:
        ids = IDS[np.unique(self._draw.integers(0, len(IDS), size=200))]
        bags = Bags(table="item", ids=ids, offsets=np.arange(len(ids) + 1))
        self._store.apply([Gradient(bags=bags, values=torch.ones(len(ids), 4))])
        for one in ids.tolist():
            self.counted[one] = self.counted.get(one, 0) + 1
        if self.pushes % 5 == 0:
            gone = IDS[self._draw.integers(0, len(IDS), size=5)]
            self._store.erase("item", gone)
            for one in gone.tolist():
                self.counted.pop(one, None)
        self.pushes += 1

    @contextmanager
    def at_rest(self) -> Iterator[dict[int, tuple[float, ...]]]:
        """Hold pushes during the block. Provides the rows that the servers must have."""
        with self._pushing:
            assert self.error is None
            yield {one: (-float(count),) * 4 for one, count in self.counted.items()}

    def end(self) -> None:
        self._ending.set()
        self.join(300)


def campaign(folder: Path, faults: int, seed: int) -> None:
    draw, history = random.Random(seed), Counter[str]()
    recoveries: list[float] = []
    with ExitStack() as stack:
        servers = Servers(folder, seed)
        stack.callback(servers.close)
        first = servers.addresses[:2]
        store = stack.enter_context(ServerStore(first, [TABLE], config=PATIENT))
        mover = stack.enter_context(ServerStore(first, [TABLE], config=PATIENT))
        worker, copies = Worker(store, seed), Copies()
        worker.start()
        stack.callback(worker.end)
        servers.be_calm(True)
        writers = [servers.writer(address) for address in first]
        follower = Follower(writers, copies, wait=0.05, find_writer=servers.writer)
        stack.callback(follower.close)
        assert follower.wait_until_read(240)
        for _ in range(faults):
            failed: list[BaseException] = []
            moving: threading.Thread | None = None
            if draw.random() < 0.5:
                wanted = draw.sample(servers.addresses, draw.choice((2, 3)))
                moving = threading.Thread(target=rebalance_until_done, args=(mover, wanted, failed))
                moving.start()
                history["moved"] += 1
                time.sleep(draw.uniform(0.0, 0.3))
            servers.be_calm(draw.random() < 0.5)
            number, fault = draw.randrange(3), draw.choice(("killed", "stopped", "none"))
            if fault == "killed":
                servers.kill(number)
            elif fault == "stopped":
                servers.stop(number, draw.choice((0.1, 0.5, 4.0)))  # longer than a request of a follower may take
            history[fault] += 1
            pushes = worker.pushes
            until(lambda pushes=pushes: worker.pushes > pushes + 3 or worker.error is not None, "pushes")  # type: ignore[misc]
            servers.be_calm(True)
            if moving is not None:
                moving.join(300)
                assert not moving.is_alive()
            assert failed == []
            began = time.monotonic()
            with worker.at_rest() as expected:
                until(lambda expected=expected: copies.rows() == expected, f"equal rows after {dict(history)}")  # type: ignore[misc]
            recoveries.append(time.monotonic() - began)
        progress = follower.progress.values()
        _log.info("%s, %d resets, %d pushes", dict(history), servers.resets, worker.pushes)
        read, rewound = sum(one.resyncs for one in progress), sum(one.rewinds for one in progress)
        _log.info("all rows were read %d times, and changes taken back %d times", read, rewound)
        _log.info("equal after %.2f s, %.2f s at most", sorted(recoveries)[len(recoveries) // 2], max(recoveries))


def test_a_replica_equals_its_servers_after_each_of_some_faults(tmp_path: Path) -> None:
    campaign(tmp_path, 6, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(max(1, SLOW_FAULTS // 20)))
def test_a_replica_equals_its_servers_after_each_of_many_faults(tmp_path: Path, seed: int) -> None:
    campaign(tmp_path, 20, seed=100 + seed)
