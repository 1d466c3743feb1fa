"""Danger: a worker is killed, with or without its servers, and its successor trains a batch twice or skips one.

Every occurrence of an id takes 1 from its row, every batch 1 from a dense parameter: what is there at the end says how often each
batch was counted on each server. The global step must say the same.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from counting_life import miscounted, work
from forked import Forked, ForkedServer

from counting_model import COUNTED
from monolith.ps import ClientConfig, ServerStore, tables_of
from monolith.ps.client.coordination_client import HostLink
from monolith.ps.protocol.calls import Call


class Campaign:
    """Two servers that lose nothing acknowledged, and two workers, the first of which saves checkpoints."""

    def __init__(self, folder: Path, stack: ExitStack, batches: int) -> None:
        self.batches, self.folder, self.epoch = batches, folder, 0
        self.servers = [ForkedServer(folder / "ps" / str(number), 0.0) for number in range(2)]
        for server in self.servers:
            stack.callback(server.close)
        self.workers: dict[str, Forked] = {}
        for name in ("chief", "helper"):
            self.start(name)
        stack.callback(lambda: [worker.close() for worker in self.workers.values()])

    def start(self, name: str) -> None:
        self.epoch += 1
        model_dir = self.folder if name == "chief" else None
        addresses = [server.address for server in self.servers]
        self.workers[name] = Forked(work, addresses, name, self.epoch, self.batches, name == "helper", model_dir)

    def advance(self, name: str, steps: int) -> None:
        """Let a worker make some steps, and go on with the next while it is killed."""
        self.workers[name].pipe.send(steps + 2)
        for _ in range(steps):
            self.workers[name].receive()

    def kill(self, victim: str) -> None:
        if victim == "server":
            self.servers[0].kill()
            self.servers[0].restart()
            return
        names = ["chief", "helper"] if victim == "all" else [victim]
        for name in names:
            self.workers[name].close()
        if victim == "all":
            for server in self.servers:
                server.kill()
            for server in self.servers:
                server.restart()
        for name in names:
            self.start(name)

    def finish(self) -> None:
        for name, worker in self.workers.items():
            worker.pipe.send(10**9)
            with suppress(EOFError):
                while True:
                    worker.receive()
            assert worker.join() == 0, name


VICTIMS = ("chief", "helper", "server", "all")


@pytest.mark.parametrize(
    ("rounds", "seed"), [pytest.param(4, 3, id="quick"), pytest.param(80, 4, id="long", marks=pytest.mark.slow)]
)
def test_each_batch_of_each_worker_counts_once_on_every_server_whoever_is_killed(
    tmp_path: Path, rounds: int, seed: int
) -> None:
    chance, batches = random.Random(seed), 10 * rounds
    with ExitStack() as stack:
        campaign = Campaign(tmp_path, stack, batches)
        for number in range(rounds):
            for name in ("chief", "helper"):
                campaign.advance(name, chance.randint(1, 6))
            campaign.kill(VICTIMS[number % 4] if number < 4 else chance.choice(VICTIMS))
        campaign.finish()
        addresses = [server.address for server in campaign.servers]
        with ServerStore(addresses, tables_of(COUNTED), config=ClientConfig(timeout=60.0)) as store:
            assert miscounted(store, batches, workers=2) == (0, 0, 0.0)
        with closing(HostLink(addresses, config=ClientConfig())) as servers:
            assert json.loads(servers.call(Call.GLOBAL_STEP).text)["step"] == 2 * batches
