"""Danger: a worker on a stream is killed, and its successor, which cuts other batches, counts some records twice or never.

Every occurrence of an id takes 1 from its row. Batches are cut at random, so that no two lives of a worker cut the same.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting_life import Tell, counting
from forked import Forked, ForkedServer

from counting_model import COUNTED
from monolith.features.batch import Batch
from monolith.ps import ClientConfig, ServerStore, tables_of
from monolith.table import Bags
from waiting_source import WaitingSource

WORKERS, PARTITIONS, IDS = 2, 5, 60


class Cut(WaitingSource):
    """Gives batches of 1 to 9 users, as they might have come."""

    def __init__(self, records: int) -> None:
        super().__init__(PARTITIONS, ends=True)
        draw = random.Random(11)
        for partition in range(PARTITIONS):
            self.append(*(draw.randrange(IDS) for _ in range(records)), partition=partition)

    def _read(self, position: Any) -> Any:  # noqa: ANN401 - as its base
        for batch, behind in super()._read(position):
            self.batch_size = random.SystemRandom().randint(1, 9)
            yield users(batch), behind

    def replay(self, until: Any) -> Any:  # noqa: ANN401 - as its base
        return map(users, super().replay(until))


def users(batch: Batch) -> Batch:
    return {"user_id": batch["id"], "label": batch["label"]}


def life(
    pipe: Connection, addresses: list[str], index: int, epoch: int, records: int, postpush: bool, model_dir: Path | None
) -> None:
    config = ClientConfig(worker=f"worker-{index}-of-{WORKERS}", epoch=epoch, timeout=120.0)
    with ServerStore(addresses, tables_of(COUNTED), config=config) as store:
        trainer = counting(store, Tell(pipe), postpush=postpush, model_dir=model_dir)
        trainer.fit(Cut(records).shard(index, WORKERS))


class Campaign:
    def __init__(self, folder: Path, stack: ExitStack, records: int) -> None:
        self.folder, self.records, self.epoch = folder, records, 0
        self.servers = [ForkedServer(folder / "ps" / str(number), 0.0) for number in range(2)]
        for server in self.servers:
            stack.callback(server.close)
        self.workers: dict[int, Forked] = {}
        for index in range(WORKERS):
            self.start(index)
        stack.callback(lambda: [worker.close() for worker in self.workers.values()])

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def start(self, index: int) -> None:
        self.epoch += 1
        model_dir = self.folder if index == 0 else None
        self.workers[index] = Forked(life, self.addresses, index, self.epoch, self.records, index == 1, model_dir)

    def advance(self, index: int, steps: int) -> None:
        """Let a worker make some steps, and begin the next ones while it is killed."""
        worker = self.workers[index]
        with suppress(BrokenPipeError):
            worker.pipe.send(steps + 2)
        with suppress(EOFError):
            for _ in range(steps):
                worker.receive()

    def kill(self, victim: str) -> None:
        if victim in ("server", "all"):
            self.servers[0].kill()
        indices = {"server": [], "all": list(range(WORKERS))}.get(victim, [int(victim) if victim.isdigit() else 0])
        for index in indices:
            self.workers[index].close()
        if victim in ("server", "all"):
            self.servers[0].restart()
        for index in indices:
            self.start(index)

    def finish(self) -> None:
        for index, worker in self.workers.items():
            with suppress(BrokenPipeError):
                worker.pipe.send(10**9)
            with suppress(EOFError):
                while True:
                    worker.receive()
            assert worker.join() == 0, index


VICTIMS = ("0", "1", "server", "all")


@pytest.mark.parametrize(
    ("rounds", "seed"), [pytest.param(6, 3, id="quick"), pytest.param(80, 4, id="long", marks=pytest.mark.slow)]
)
def test_each_record_counts_once_on_every_server_whoever_is_killed(tmp_path: Path, rounds: int, seed: int) -> None:
    chance, records = random.Random(seed), 20 * rounds
    with ExitStack() as stack:
        campaign = Campaign(tmp_path, stack, records)
        for number in range(rounds):
            for index in range(WORKERS):
                campaign.advance(index, chance.randint(1, 4))
            campaign.kill(VICTIMS[number % 4] if number < 4 else chance.choice(VICTIMS))
        campaign.finish()
        ids, times = torch.tensor([one for part in Cut(records).records for one in part]).unique(return_counts=True)
        with ServerStore(campaign.addresses, tables_of(COUNTED), config=ClientConfig(timeout=60.0)) as store:
            bags = Bags(table="user_id", ids=ids.numpy(), offsets=np.arange(len(ids) + 1))
            counted = -store.lookup([bags])[0].flatten()
        assert counted.tolist() == times.tolist()
