"""Run as a script, a worker of a job: adds 1 to numbers of its own on the servers, so many times, and tells what it then reads.

    counting_worker.py ROUNDS

Half way it waits until there is a file `go`, so that a test can do harm meanwhile.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

from monolith.cluster import get_discovery
from monolith.ps import ServerStore
from monolith.table import Bags, Zeros
from monolith.table.config import Segment, TableConfig
from monolith.train.distributed.config import RunnerConfig

TABLE = TableConfig(name="counts", segments=(Segment(dim=1, initializer=Zeros()),))


def main(rounds: int) -> None:
    runner = RunnerConfig.from_env()
    discovery = get_discovery(runner)
    assert discovery is not None
    while len(servers := discovery.query("ps")) < runner.num_ps:
        time.sleep(0.05)
    store = ServerStore(
        list(servers.values()),
        [TABLE],
        config=runner.client.model_copy(update={"worker": f"worker-{runner.index}", "timeout": 120.0}),
        find=lambda: list(discovery.query("ps").values()),
    )
    ids = np.arange(100) + 1000 * runner.index
    for number in range(rounds):
        store.assign_add("counts", ids, torch.ones(100, 1))
        print("round", number)  # noqa: T201 - what the test waits for
        while number == rounds // 2 and not Path("go").exists():
            time.sleep(0.05)
    rows = store.lookup([Bags(table="counts", ids=ids, offsets=np.arange(101))])[0]
    print("counted", rows.min().item(), rows.max().item())  # noqa: T201 - what the test looks at
    store.close()
    discovery.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
