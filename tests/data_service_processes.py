"""A data service in processes of their own: dispatcher, data workers and trainers that can be killed and started again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from forked_processes import CONTEXT
from monolith.dataservice import (
    DataClientConfig,
    DataDispatcher,
    DataServiceSource,
    DatasetConfig,
    DataWorker,
    DataWorkerConfig,
    DispatcherConfig,
)
from monolith.durable import write_durably

CLIENT = DataClientConfig(timeout=60, worker_timeout=2)


class Role:
    """A process that is started, killed, started again."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 - for `target`
        self._target, self._arguments = target, arguments
        self.process: ForkServerProcess = self._started()

    def kill_and_restart(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        self.process = self._started()

    def pause(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def _started(self) -> ForkServerProcess:
        process = CONTEXT.Process(target=self._target, args=self._arguments, daemon=True)
        process.start()
        return process


def run_dispatcher(folder: Path, port: Synchronized[int]) -> None:
    """Serve, at the port of the life before."""
    with DataDispatcher(DispatcherConfig(folder=folder, port=port.value, lease_secs=1.0)) as dispatcher:
        port.value = dispatcher.port
        dispatcher.wait()


def run_worker(dispatcher: str) -> None:
    """Serve, at a new port."""
    with DataWorker(DataWorkerConfig(dispatcher=dispatcher, client=CLIENT)) as worker:
        worker.wait()


def run_trainer(
    dispatcher: str, dataset: DatasetConfig, trainer: int, trainers: int, kept: Path, steps: Synchronized[int]
) -> None:
    """Train: remember the rows, and write them to `kept` with the state of the source, every few batches and at the end."""
    source = DataServiceSource(dispatcher, dataset, config=CLIENT).shard(trainer, trainers)
    rows: list[int] = []
    if kept.exists():
        saved = json.loads(kept.read_text())
        if saved["ended"]:
            return
        rows = saved["rows"]
        source.load_state_dict(saved["state"])
    for count, batch in enumerate(source, start=1):
        rows += batch["x"].tolist()
        with steps.get_lock():
            steps.value += 1
        if count % 7 == 0:
            _keep(kept, rows, source.state_dict(), ended=False)
    _keep(kept, rows, {}, ended=True)


def _keep(path: Path, rows: list[int], state: dict[str, int | str], *, ended: bool) -> None:
    write_durably(path, json.dumps({"rows": rows, "state": state, "ended": ended}).encode())


def wait_until(true: Callable[[], bool], *, seconds: float = 120.0) -> None:
    """Return when `true` is; fail after a time that no machine needs."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
