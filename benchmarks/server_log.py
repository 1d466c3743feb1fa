"""Measure the cost of the log of a parameter server, and what a kill of the server loses without it.

python benchmarks/server_log.py            the numbers in docs/guide-parameter-servers.md
python benchmarks/server_log.py --quick    a short run that checks that everything works; its numbers are not for quoting

There is one worker and one server for each setting of `--log-flush-secs`, each a process. "off" writes the log with checkpoints
only. A step is a lookup and an Adagrad push of the same ids. Between the two the worker computes for `--compute-ms`, as a model
would; "late" pushes while the next step computes (`enable_embedding_postpush`). The settings alternate in every round, on the
same batches. A ratio is the median of the ratios of the rounds to "off": 1.1 is 10 % slower. Then every server is killed
(SIGKILL) under load `--kills` times and restarted, and the acknowledged pushes that it has lost are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

import machine
from monolith import Segment, TableConfig
from monolith.errors import MonolithError
from monolith.ps import ClientConfig, ServerStore
from monolith.table import SGD, Bags, Gradient, Zeros
from monolith.testing.parameter_servers import ServerProcess, server_process
from parameter_server import DIM, TABLE, batches, fill, new, seconds

SETTINGS = ("off", "1", "0.1", "0")
COUNTS = TableConfig(name="counts", segments=(Segment(dim=1, optimizer=SGD(learning_rate=1.0), initializer=Zeros()),))


def server_options(folder: Path, setting: str) -> list[str]:
    return ["--folder", str(folder / setting), "--log-flush-secs", setting]


def steps(store: ServerStore, turn: list[Bags], gradient: torch.Tensor, compute: float) -> None:
    for bags in new(turn):
        store.lookup([bags])
        time.sleep(compute)
        store.apply([Gradient(bags=bags, values=gradient)])


def late_steps(
    store: ServerStore, late: ThreadPoolExecutor, turn: list[Bags], gradient: torch.Tensor, compute: float
) -> None:
    pushed: Future[None] | None = None
    for bags in new(turn):
        store.lookup([bags])
        time.sleep(compute)
        if pushed is not None:
            pushed.result()
        pushed = late.submit(store.apply, [Gradient(bags=bags, values=gradient)])
    if pushed is not None:
        pushed.result()


def cost(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    turn = batches(np.random.default_rng(1), options.batches, options.ids, options.rows)
    gradient = torch.randn(options.ids, DIM)
    compute = options.compute_ms / 1000
    times: dict[str, dict[str, list[float]]] = {how: {name: [] for name in SETTINGS} for how in ("plain", "late")}
    with ExitStack() as stack:
        stores = {}
        late = stack.enter_context(ThreadPoolExecutor(1))
        for setting in SETTINGS:
            server = stack.enter_context(server_process(*server_options(folder, setting)))
            config = ClientConfig(ordered=False)
            stores[setting] = stack.enter_context(ServerStore([server.address], [TABLE], config=config))
            fill(stores[setting], options.rows)
            steps(stores[setting], turn, gradient, 0.0)
        for _ in range(options.rounds):
            for setting, store in stores.items():
                times["plain"][setting].append(
                    seconds(lambda store=store: steps(store, turn, gradient, compute))  # type: ignore[misc]
                )
                times["late"][setting].append(
                    seconds(lambda store=store: late_steps(store, late, turn, gradient, compute))  # type: ignore[misc]
                )
    result: dict[str, dict[str, float]] = {}
    for how, taken in times.items():
        for setting in SETTINGS:
            ratios = [mine / off for mine, off in zip(taken[setting], taken["off"], strict=True)]
            result.setdefault(setting, {})[f"{how}_time_of_off"] = statistics.median(ratios)
            result[setting][f"{how}_ms_per_step"] = 1e3 * statistics.median(taken[setting]) / len(turn)
    return result


def loss(options: argparse.Namespace, folder: Path, setting: str) -> dict[str, float]:
    """Pushes that were acknowledged and are not there after a kill under load, median and worst."""
    lost, made = [], []
    ids = np.arange(64)
    bags = Bags(table="counts", ids=ids, offsets=np.arange(len(ids) + 1))
    gradient = Gradient(bags=bags, values=torch.ones(len(ids), 1))
    for kill in range(options.kills):
        server = ServerProcess(server_options(folder / f"kill-{kill}", setting))
        acknowledged = 0
        try:
            with ServerStore([server.address], [COUNTS], config=ClientConfig(timeout=1.0)) as store:
                end = time.monotonic() + options.load_secs
                while time.monotonic() < end:
                    store.apply([gradient])
                    acknowledged += 1
            server.kill()
            server.restart()
            with ServerStore([server.address]) as found:
                try:
                    found.declare([COUNTS])
                    there = -float(found.lookup([bags])[0].max())
                except MonolithError:
                    there = 0.0
            lost.append(acknowledged - there)
            made.append(acknowledged)
        finally:
            server.close()
    return {"lost_median": statistics.median(lost), "lost_worst": max(lost), "acknowledged": statistics.median(made)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ids", type=int, default=16_384, help="ids of a step")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table")
    parser.add_argument("--batches", type=int, default=20, help="steps of a turn")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="between lookup and push")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--load-secs", type=float, default=2.5, help="seconds of load before a kill")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rounds, options.batches, options.kills = 20_000, 2, 5, 1
    return options


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, object] = {"machine": machine.describe(), "cost": cost(options, Path(folder))}
        result["kill"] = {setting: loss(options, Path(folder, "kills"), setting) for setting in SETTINGS}
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
