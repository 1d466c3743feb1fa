"""Measure a parameter server on loopback: its step compared with the local table, its latency, its CPU, and other transports.

python benchmarks/parameter_server.py            everything that is installed
python benchmarks/parameter_server.py --quick    a short run that checks that everything works; its numbers are not for quoting

One worker and one server, each a process. A step is a lookup and an Adagrad push of the same ids, with one id per bag and with
four (as in the benchmark of the table; the server pools those). There is no model in between. The sides alternate in
every round, on the same batches, and a ratio is the median of the ratios of the rounds. "prefetch" looks up the next batch while
this one is pushed, and pushes in the background (`ordered=False`, late push). The local table and the server have the same
number of threads. The exchange with peers is one lookup and one push
of distinct ids without pooling. With grpcio and Ray actors both sides use our frames and our dispatcher, so only the
transport differs from "ours". "store" is a whole `ServerStore`, which also deduplicates, splits, pools and sums.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import machine
from monolith import EmbeddingTable, Segment, TableConfig, set_num_threads
from monolith.ps import ClientConfig, ServerStore
from monolith.table import Adagrad, Bags, Gradient, LocalStore, Zeros
from monolith.table.store import Store
from monolith.testing.parameter_servers import ServerProcess, server_process
from peers.ps_exchange import PEERS, Exchange, Sockets

DIM = 16
TABLE = TableConfig(name="t", segments=(Segment(dim=DIM, initializer=Zeros(), optimizer=Adagrad(learning_rate=0.1)),))
DISTINCT = 8192
BAGS = (1, 4)


def batches(rng: np.random.Generator, count: int, ids: int, rows: int, bag: int = 1) -> list[Bags]:
    """Zipf(1.05) over `rows` ids, `bag` ids to a bag."""
    drawn = [(rng.zipf(1.05, size=ids) % rows).astype(np.int64) for _ in range(count)]
    return [Bags(table="t", ids=_spread(ranks), offsets=np.arange(0, ids + 1, bag)) for ranks in drawn]


def _spread(ranks: np.ndarray) -> np.ndarray:
    return (ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def fill(store: Store, rows: int) -> None:
    for start in range(0, rows, 50_000):
        ids = _spread(np.arange(start, min(start + 50_000, rows)))
        store.assign("t", ids, torch.zeros(len(ids), DIM))


def new(turn: list[Bags]) -> list[Bags]:
    """Copy the batches, so that the objects are new, as they are from a source."""
    return [replace(bags) for bags in turn]


def plain_steps(store: Store, turn: list[Bags], gradient: torch.Tensor) -> None:
    for bags in new(turn):
        store.lookup([bags])
        store.apply([Gradient(bags=bags, values=gradient)])


def ahead_steps(store: ServerStore, late: ThreadPoolExecutor, turn: list[Bags], gradient: torch.Tensor) -> None:
    turn = new(turn)
    store.prefetch([turn[0]])
    pushed: Future[None] | None = None
    for place, bags in enumerate(turn):
        store.lookup([bags])
        if place + 1 < len(turn):
            store.prefetch([turn[place + 1]])
        before, pushed = pushed, late.submit(store.apply, [Gradient(bags=bags, values=gradient)])
        if before is not None:
            before.result()
    if pushed is not None:
        pushed.result()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def training(options: argparse.Namespace, threads: int, bag: int) -> dict[str, float]:
    set_num_threads(threads)
    with server_process("--threads", str(threads)) as server:
        return _training(options, server, bag)


def _training(options: argparse.Namespace, server: ServerProcess, bag: int) -> dict[str, float]:
    turn = batches(np.random.default_rng(1), options.batches, options.ids, options.rows, bag)
    gradient = torch.randn(options.ids // bag, DIM)
    local = LocalStore([EmbeddingTable(TABLE)])
    times: dict[str, list[float]] = {"local": [], "remote": [], "prefetch": []}
    local_cpu = server_cpu = 0.0
    unordered = ClientConfig(ordered=False)
    with ServerStore([server.address], [TABLE], config=unordered) as remote, ThreadPoolExecutor(1) as late:
        for store in (local, remote):
            fill(store, options.rows)
            plain_steps(store, turn, gradient)
        for _ in range(options.rounds):
            before = time.process_time()
            times["local"].append(seconds(lambda: plain_steps(local, turn, gradient)))
            local_cpu += time.process_time() - before
            before = cpu_seconds(server.pid)
            times["remote"].append(seconds(lambda: plain_steps(remote, turn, gradient)))
            server_cpu += cpu_seconds(server.pid) - before
            times["prefetch"].append(seconds(lambda: ahead_steps(remote, late, turn, gradient)))
    ids = options.ids * len(turn)
    result = {f"{name}_ids_per_second": ids / statistics.median(taken) for name, taken in times.items()}
    for name in ("remote", "prefetch"):
        ratios = [base / mine for base, mine in zip(times["local"], times[name], strict=True)]
        result[f"{name}_of_local"] = statistics.median(ratios)
    result["server_cpu_of_local"] = server_cpu / local_cpu
    return result


def latency(options: argparse.Namespace, server: ServerProcess) -> dict[str, float]:
    turn = batches(np.random.default_rng(2), 50, DISTINCT, options.rows)
    with ServerStore([server.address], [TABLE]) as store:
        taken = []
        for place in range(options.lookups):
            bags = Bags(table="t", ids=turn[place % len(turn)].ids, offsets=np.arange(DISTINCT + 1))
            taken.append(seconds(lambda bags=bags: store.lookup([bags])))  # type: ignore[misc]
    p50, p99 = np.percentile(taken, [50, 99])
    return {"p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99, "p99_of_p50": p99 / p50}


class WholeStore:
    """A `ServerStore` with the interface of the peers."""

    def __init__(self, config: TableConfig) -> None:
        self._server = ServerProcess()
        self._store = ServerStore([self._server.address], [config])
        self._splits = np.arange(DISTINCT + 1)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._store.lookup([self._bags(ids)])[0].numpy()
        return rows

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        self._store.apply([Gradient(bags=self._bags(ids), values=torch.from_numpy(gradients))])

    def close(self) -> None:
        self._store.close()
        self._server.close()

    def _bags(self, ids: np.ndarray) -> Bags:
        return Bags(table="t", ids=ids, offsets=self._splits)


def exchange(options: argparse.Namespace) -> dict[str, float | str]:
    result: dict[str, float | str] = {}
    rng = np.random.default_rng(3)
    turns = [_spread(rng.permutation(options.rows)[:DISTINCT].astype(np.int64)) for _ in range(options.exchanges)]
    gradients = rng.standard_normal((DISTINCT, DIM), dtype=np.float32)
    with ExitStack() as stack:
        sides: dict[str, Exchange] = {}
        ours = {"ours": Sockets, "store": WholeStore}
        for name, start in {**ours, **{peer: PEERS[peer] for peer in options.peers}}.items():
            try:
                sides[name] = start(TABLE)
                stack.callback(sides[name].close)
            except Exception as problem:  # a peer's trouble must not cost the other numbers
                result[name] = f"skipped: {problem}"
        _require_equal(sides, turns[0], gradients)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                times[name].append(seconds(lambda side=side: _exchanges(side, turns, gradients)))  # type: ignore[misc]
    for mine in ours:
        result[f"{mine}_per_second"] = options.exchanges / statistics.median(times[mine])
        for name in sides.keys() - ours.keys():
            ratios = [theirs / own for theirs, own in zip(times[name], times[mine], strict=True)]
            result[f"{mine}_times_{name}"] = statistics.median(ratios)
    return result


def _require_equal(sides: dict[str, Exchange], ids: np.ndarray, gradients: np.ndarray) -> None:
    """Measured are only those that compute the same."""
    answers = []
    for side in sides.values():
        for _ in range(2):
            side.push(ids, gradients)
        answers.append(side.lookup(ids))
    assert all(np.allclose(answer, answers[0], rtol=1e-4) for answer in answers)


def _exchanges(side: Exchange, turns: list[np.ndarray], gradients: np.ndarray) -> None:
    for ids in turns:
        side.lookup(ids)
        side.push(ids, gradients)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ids", type=int, default=16_384, help="ids of a step")
    parser.add_argument("--rows", type=int, help="rows of the table")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="of the local table, and of the server")
    parser.add_argument("--batches", type=int, default=20, help="steps of a turn")
    parser.add_argument("--lookups", type=int)
    parser.add_argument("--exchanges", type=int, help="exchanges of a turn")
    parser.add_argument("--peers", type=lambda text: [p for p in text.split(",") if p], default=list(PEERS))
    options = parser.parse_args()
    small = {"rows": 100_000, "rounds": 2, "lookups": 100, "exchanges": 4}
    full = {"rows": 1_000_000, "rounds": 9, "lookups": 2000, "exchanges": 10}
    for name, value in (small if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    options = arguments()
    result: dict[str, object] = {"machine": machine.describe()}
    for bag, threads in itertools.product(BAGS, options.threads):
        result[f"step, bags of {bag}, {threads} threads"] = training(options, threads, bag)
    with server_process() as server:
        result["lookup"] = latency(options, server)
    result["exchange"] = exchange(options)
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
