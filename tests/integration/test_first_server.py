"""Danger: a run that hangs, fails or counts wrong because its first server was drained, or restarted at another address."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster_threads import sleep, started
from counting_model import COUNTED, Counts
from monolith import RunConfig, Trainer
from monolith.cluster import HostServiceDiscovery
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore, tables_of
from monolith.table import Bags
from monolith.train import RunnerConfig
from monolith.train.distributed.run import distributed_train
from monolith.train.hooks import Hook
from monolith.train.trainer import StepResult

WORKERS, BATCHES, BATCH_SIZE = 2, 20, 8


class Pause(Hook):
    """Stands still after some of its steps, until it is let go."""

    def __init__(self, *after: int) -> None:
        self._after, self._made = after, 0
        self.reached, self._go = threading.Semaphore(0), threading.Semaphore(0)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._made += 1
        if self._made in self._after:
            self.reached.release()
            assert self._go.acquire(timeout=60)

    def wait(self) -> None:
        assert self.reached.acquire(timeout=60)

    def go_on(self) -> None:
        self._go.release()


class Run:
    """Servers of this process, and two workers that train over them and stand still after 3 and 6 steps."""

    def __init__(self, folder: Path, stack: ExitStack, num_ps: int) -> None:
        self.folder, self._stack = folder, stack
        self.discovery = HostServiceDiscovery(folder / "discovery")
        self.servers = [self.server(index) for index in range(num_ps)]
        self.failovers: list[str] = []
        self.pauses = [Pause(3, 6) for _ in range(WORKERS)]
        self.workers = [self._worker(index, num_ps) for index in range(WORKERS)]

    def server(self, index: int) -> ParameterServer:
        config = ServerConfig(folder=self.folder / "ps" / str(index), log_flush_secs=0.0)
        server = self._stack.enter_context(ParameterServer(config))
        self.discovery.register("ps", index, server.address)
        return server

    def _worker(self, index: int, num_ps: int) -> Future[int]:
        model = Counts(None)
        config = RunConfig(model_dir=str(self.folder) if index == 0 else None, clip_norm=None)
        trainer = Trainer(model, torch.optim.SGD([model.batches], lr=1.0), config=config)
        trainer.on_save_metric = lambda name, value, tags: self.failovers.append(name) if name == "failover" else None
        runner = RunnerConfig(
            index=index, num_ps=num_ps, num_workers=WORKERS, model_dir=str(self.folder), supervised=True
        )
        hooks = [self.pauses[index]]
        return started(lambda: distributed_train(trainer, clicks(), runner, self.discovery, hooks=hooks, sleep=sleep))

    def wait(self) -> None:
        for pause in self.pauses:
            pause.wait()

    def go_on(self) -> None:
        for pause in self.pauses:
            pause.go_on()

    def finish(self) -> tuple[int, list[str]]:
        """The global step at the end, and what the workers had to try again."""
        steps = [worker.result(60) for worker in self.workers]
        return steps[0], self.failovers


def clicks() -> ClickStream:
    return ClickStream(ClickStreamConfig(users=50, batches=BATCHES, batch_size=BATCH_SIZE))


def counted(addresses: list[str]) -> float:
    """How many batches the rows have had."""
    ids = torch.cat([batch["user_id"] for batch in clicks()]).unique().numpy()
    with ServerStore(addresses, tables_of(COUNTED), config=ClientConfig(timeout=20.0)) as store:
        rows = store.lookup([Bags(table="user_id", ids=ids, offsets=np.arange(len(ids) + 1))])[0]
    return -rows.sum().item() / BATCH_SIZE


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_first_server_is_drained_and_stopped_in_the_middle_of_a_run(tmp_path: Path, stack: ExitStack) -> None:
    run = Run(tmp_path, stack, num_ps=2)
    first, second = run.servers
    run.wait()
    with ServerStore([first.address, second.address], config=ClientConfig(timeout=20.0)) as operator:
        operator.rebalance([second.address])
    run.go_on()
    run.wait()  # every worker has made another step
    first.close()
    run.go_on()
    assert run.finish() == (BATCHES, [])
    assert counted([second.address]) == BATCHES


def test_the_first_server_comes_back_at_another_address_in_the_middle_of_a_run(
    tmp_path: Path, stack: ExitStack
) -> None:
    run = Run(tmp_path, stack, num_ps=2)
    first, second = run.servers
    run.wait()
    first.close()
    run.go_on()
    again = run.server(0)
    assert again.address != first.address
    run.wait()
    run.go_on()
    assert run.finish() == (BATCHES, [])
    assert counted([again.address, second.address]) == BATCHES
