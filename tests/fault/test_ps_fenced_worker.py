"""Danger: a worker that was paused and replaced wakes up and writes concurrently with its successor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import torch

from monolith.ps import ClientConfig, ParameterServer, ServerStore
from monolith.table import Bags, Zeros
from monolith.table.config import Segment, TableConfig

TABLE = TableConfig(name="counts", segments=(Segment(dim=1, initializer=Zeros()),))

WORKER = """
import sys, torch
from monolith.errors import StalePushError
from monolith.ps import ClientConfig, ServerStore
store = ServerStore([sys.argv[1]], config=ClientConfig(worker="worker-0", epoch=1))
try:
    while True:
        store.assign_add("counts", [1], torch.ones(1, 1))
        print("acknowledged", flush=True)
except StalePushError as error:
    print(error, flush=True)
    sys.exit(3)
"""


def count(store: ServerStore, id_: int) -> float:
    value: float = store.lookup([Bags(table="counts", ids=np.array([id_]), offsets=np.array([0, 1]))])[0].item()
    return value


def test_a_worker_that_wakes_up_after_its_successor_joined_changes_nothing() -> None:
    with ParameterServer() as server, ServerStore([server.address], [TABLE]) as observer:
        worker = subprocess.Popen([sys.executable, "-c", WORKER, server.address], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        try:
            for _ in range(20):
                assert worker.stdout.readline() == "acknowledged\n"
            worker.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
            with ServerStore([server.address], config=ClientConfig(worker="worker-0", epoch=2)) as successor:
                # Joining has waited for what was under way: from here on the old worker's number stands still.
                at_takeover = count(observer, 1)
                assert at_takeover >= 20
                successor.assign_add("counts", [2], torch.ones(1, 1))
                worker.send_signal(signal.SIGCONT)
                said = worker.communicate(timeout=60)[0]
                successor.assign_add("counts", [2], torch.ones(1, 1))
        finally:
            worker.kill()
            worker.wait()
        assert worker.returncode == 3
        assert "epoch: 1 of worker 'worker-0' is over, 2 has joined since" in said
        assert count(observer, 1) == at_takeover
        assert count(observer, 2) == 2
