"""Danger: a server that dies while it sends or receives buckets or dense parameters loses updates, doubles them, or leaves
some buckets without an owner.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch

from forked_processes import ForkedServerProcess
from monolith.ps import ClientConfig, DenseOptimizer, ParameterServer, ServerConfig, ServerParameters, ServerStore
from monolith.table import SGD, Bags, Gradient, Zeros
from monolith.table.config import Segment, TableConfig
from monolith.testing.parameter_servers import ServerProcess
from moving_buckets import rebalance_until_done

TABLE = TableConfig(name="counts", segments=(Segment(dim=4, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),))
IDS = np.arange(3000) * 2**33 + 5
DENSE = {f"d{number}": torch.zeros(64) for number in range(6)}
PATIENT = ClientConfig(timeout=120)


class Worker(threading.Thread):
    """Adds 1 to random ids and takes 1 from all dense parameters until told to stop, and keeps count of what it pushed, which is
    all that can have arrived."""

    def __init__(self, addresses: list[str], seed: int) -> None:
        super().__init__()
        self.counted, self.steps = np.zeros(len(IDS)), 0
        self.error: BaseException | None = None
        self.ending = threading.Event()
        self._addresses, self._random = addresses, np.random.default_rng(seed)

    def run(self) -> None:
        try:
            with ServerStore(self._addresses, [TABLE], config=PATIENT) as store:
                origin = ServerParameters(store, DENSE, DenseOptimizer.of(torch.optim.SGD, lr=1.0))
                while not self.ending.is_set():
                    places = self._random.integers(0, len(IDS), size=200)
                    bags = Bags(table="counts", ids=IDS[places], offsets=np.arange(201))
                    assert bool((-store.lookup([bags])[0][:, 0].numpy() >= self.counted[places]).all())
                    store.apply([Gradient(bags=bags, values=torch.ones(200, 4))])
                    np.add.at(self.counted, places, 1)
                    origin.apply({name: torch.ones(64) for name in DENSE})
                    self.steps += 1
        except BaseException as error:
            self.error = error


class Group:
    """Three servers with folders, which lose nothing that was acknowledged; `killable` ones are processes of their own."""

    def __init__(self, folder: Path, killable: Collection[int]) -> None:
        self._folder, self.killable = folder, killable
        self.servers = [self._start(number) for number in range(3)]
        self.addresses = [server.address for server in self.servers]

    def kill_and_restart(self, number: int) -> None:
        server = self.servers[number]
        assert isinstance(server, ServerProcess)
        server.kill()
        server.close()
        self.servers[number] = self._start(number, int(server.address.rpartition(":")[2]))

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def _start(self, number: int, port: int = 0) -> ServerProcess | ParameterServer:
        folder = self._folder / str(number)
        if number not in self.killable:
            return ParameterServer(ServerConfig(folder=folder, log_flush_secs=0, move_piece_bytes=2048))
        options = ["--folder", str(folder), "--log-flush-secs", "0", "--move-piece", "2KiB", "--port", str(port)]
        return ForkedServerProcess(options)


@pytest.mark.parametrize(
    ("kills", "killable"), [(2, (2,)), pytest.param(40, (0, 1, 2), marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_killing_givers_and_takers_loses_no_update_and_doubles_none(
    tmp_path: Path, kills: int, killable: tuple[int, ...]
) -> None:
    rng, group = random.Random(kills), Group(tmp_path, killable)
    addresses = group.addresses
    workers = [Worker(addresses[:2], seed) for seed in range(2)]
    try:
        with ServerStore(addresses[:2], [TABLE], config=PATIENT) as store:
            for worker in workers:
                worker.start()
            for turn in range(kills):
                outcome: list[BaseException] = []
                leaving = addresses[turn // 2 % 3] if turn % 2 else None
                wanted = [address for address in addresses if address != leaving]
                moving = threading.Thread(target=rebalance_until_done, args=(store, wanted, outcome))
                moving.start()
                moving.join(rng.uniform(0.02, 0.5))
                # Whoever left in an odd turn, a giver, is the taker of the even one after it.
                group.kill_and_restart(rng.choice(killable))
                moving.join(180)
                assert outcome == []
                assert not moving.is_alive()
                assert set(store.ownership.addresses) == set(wanted)
            for worker in workers:
                worker.ending.set()
            for worker in workers:
                worker.join(120)
                assert worker.error is None
            (rows,) = store.lookup([Bags(table="counts", ids=IDS, offsets=np.arange(len(IDS) + 1))])
            dense = ServerParameters(store, DENSE, DenseOptimizer.of(torch.optim.SGD, lr=1.0)).read()
        expected = -sum(worker.counted for worker in workers)
        assert rows[:, 0].numpy().tolist() == expected.tolist()
        assert all(value.eq(-sum(worker.steps for worker in workers)).all() for value in dense.values())
    finally:
        for worker in workers:
            worker.ending.set()
        group.close()
