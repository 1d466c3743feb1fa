"""Danger: a dead server ends its workers, or had acknowledged updates that cannot be read again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from forked_processes import forked_server
from monolith.errors import DeadlineExceededError, ServerError, UnavailableError
from monolith.ps import ClientConfig, ServerStore
from monolith.table import Bags, Zeros
from monolith.table.config import Segment, TableConfig
from monolith.transport.link import Transport

TABLE = TableConfig(name="counts", segments=(Segment(dim=1, initializer=Zeros()),))
BOTH = pytest.mark.parametrize("transport", ["socket", "flight"])


@dataclass
class Worker:
    """Adds 1 to a number of its own until the server does not answer."""

    address: str
    number: int
    transport: Transport
    sent: int = 0
    acknowledged: int = 0
    error: ServerError | None = None
    started: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with ServerStore([self.address], [TABLE], config=ClientConfig(timeout=3.0, transport=self.transport)) as store:
            try:
                while True:
                    self.sent += 1
                    store.assign_add("counts", [self.number], torch.ones(1, 1))
                    self.acknowledged += 1
                    if self.acknowledged == 20:
                        self.started.set()
            except ServerError as error:
                self.error = error


@BOTH
def test_what_was_acknowledged_is_read_exactly_once_until_the_kill_and_workers_are_told(transport: Transport) -> None:
    with forked_server("--transport", transport) as server:
        workers = [Worker(server.address, number, transport) for number in range(3)]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        bags = Bags(table="counts", ids=np.arange(3), offsets=np.arange(4))
        with ServerStore([server.address], [TABLE], config=ClientConfig(transport=transport)) as reader:
            for worker in workers:
                assert worker.started.wait(60)
            for _ in range(50):
                before = [worker.acknowledged for worker in workers]
                seen = reader.lookup([bags])[0].flatten().tolist()
                after = [worker.sent for worker in workers]
                assert all(a <= s <= b for a, s, b in zip(before, seen, after, strict=True)), (before, seen, after)
            server.kill()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
    for worker in workers:
        assert isinstance(worker.error, UnavailableError | DeadlineExceededError), worker.error
        assert worker.sent == worker.acknowledged + 1


@BOTH
def test_a_paused_server_costs_its_deadline_counts_nothing_twice_and_ends_when_told_to(transport: Transport) -> None:
    brief, patience = ClientConfig(timeout=1.0, transport=transport), ClientConfig(transport=transport)
    with (
        forked_server("--transport", transport) as server,
        ServerStore([server.address], [TABLE], config=brief) as store,
    ):
        store.assign_add("counts", [1], torch.ones(1, 1))
        server.pause()
        with pytest.raises((DeadlineExceededError, UnavailableError)):
            store.assign_add("counts", [1], torch.ones(1, 1))
        server.resume()
        with ServerStore([server.address], [TABLE], config=patience) as patient:
            patient.assign_add("counts", [1], torch.ones(1, 1))
            bags = Bags(table="counts", ids=np.array([1]), offsets=np.array([0, 1]))
            # Whether the push that met the pause arrived is open; the two that were acknowledged are there, once.
            assert patient.lookup([bags])[0].item() in (2.0, 3.0)
            # Streams that nobody uses must not hold the process.
            assert server.stop() == 0
        with pytest.raises(UnavailableError):
            store.stats()
