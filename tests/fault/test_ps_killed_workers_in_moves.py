"""Danger: a worker dies while buckets and dense parameters move, and its successor repeats a batch in buckets that have had it,
or leaves it out in those that have not."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from counting_life import miscounted, work
from forked import Forked

from counting_model import COUNTED
from monolith.errors import ServerError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore, tables_of

_log = logging.getLogger(__name__)
NAMES = ("w0", "w1")


class Workers:
    """Two named workers, each a process, and their successors."""

    def __init__(self, addresses: list[str], batches: int) -> None:
        self._addresses, self._batches, self._epoch = addresses, batches, 0
        self.living: dict[str, Forked] = {}
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        self._epoch += 1
        # One of the two pushes its rows a step late, in the background.
        self.living[name] = Forked(work, self._addresses, name, self._epoch, self._batches, name == "w1", None)

    def advance(self, name: str, steps: int) -> None:
        """Let a worker make some steps, and go on with the next two."""
        self.living[name].pipe.send(steps + 2)
        for _ in range(steps):
            self.living[name].receive()

    def replace(self, name: str) -> None:
        self.living[name].close()
        self.start(name)

    def finish(self) -> None:
        for name, worker in self.living.items():
            worker.pipe.send(10**9)
            with suppress(EOFError):
                while True:
                    worker.receive()
            assert worker.join() == 0, name

    def close(self) -> None:
        for worker in self.living.values():
            worker.close()


@contextmanager
def moving(addresses: list[str]) -> Iterator[list[int]]:
    """Buckets and dense parameters move between the servers, one of which has none at a time; how often they have."""
    moves, stopping, failures = [0], threading.Event(), list[BaseException]()

    def move() -> None:
        with ServerStore(addresses[:2], tables_of(COUNTED), config=ClientConfig(timeout=60.0)) as store:
            while not stopping.is_set():
                leaving = addresses[(moves[0] + 1) % 3]
                try:
                    store.rebalance([address for address in addresses if address != leaving])
                except ServerError as error:
                    failures.append(error)
                    return
                moves[0] += 1

    thread = threading.Thread(target=move)
    thread.start()
    try:
        yield moves
    finally:
        stopping.set()
        thread.join(120)
    assert failures == []


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_a_worker_killed_while_buckets_move_loses_and_doubles_nothing(kills: int) -> None:
    chance, batches = random.Random(kills), 10 * kills
    with ExitStack() as stack:
        config = ServerConfig(move_piece_bytes=4096)
        addresses = [stack.enter_context(ParameterServer(config)).address for _ in range(3)]
        workers = Workers(addresses[:2], batches)
        stack.callback(workers.close)
        moves = stack.enter_context(moving(addresses))
        for _ in range(kills):
            name = chance.choice(NAMES)
            for each in NAMES:
                workers.advance(each, chance.randint(1, 4))
            # Any moment of a push to several servers is as good as any other.
            time.sleep(chance.uniform(0.0, 0.05))
            workers.replace(name)
        workers.finish()
        with ServerStore(addresses, tables_of(COUNTED), config=ClientConfig(timeout=60.0)) as store:
            lost, doubled, dense = miscounted(store, batches, len(NAMES))
        _log.info("%d kills, %d moves: %d lost, %d doubled, dense off by %g", kills, moves[0], lost, doubled, dense)
        assert (lost, doubled, dense) == (0, 0, 0.0)
