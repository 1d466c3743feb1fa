"""The child process of one rank of one side of the benchmark of ranks, started by `worker.py`. Needs only PyTorch and numpy."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from click_models import DLRM, DeepFM, DenseWork

EXAMPLES = 262_144  # in memory, of all ranks; trained again and again


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What a rank is told: which side, which part of the data, where the others are."""

    model: str
    towers: str
    folder: Path
    batch: int
    rank: int
    world: int
    meeting: Path
    """A folder of this side alone, new for each job, in which its ranks find each other."""
    options: dict[str, Any]


class RankTrainer(Protocol):
    """One rank of one side: a model, its part of the tables and of the data. Reading continues where the last call stopped."""

    versions: dict[str, str]
    half: DeepFM | DLRM
    """The model without its embeddings."""

    def __init__(self, job: RankJob) -> None: ...
    def losses(self, batches: int) -> list[float]:
        """Train on the next batches and return the loss of each, summed over the examples of this rank."""

    def train(self, batches: int) -> None:
        """Train on the next batches, as fast as it goes."""

    def close(self) -> None: ...


class RankExchange(Protocol):
    """One rank of one transport: its ids to their owners, their rows back, their gradients to the owners."""

    versions: dict[str, str]

    def __init__(self, job: RankJob) -> None: ...
    def exchange(self, sizes: list[int], ids: np.ndarray, rows: np.ndarray, gradients: np.ndarray) -> int:
        """Arrays are in the order of ranks, `sizes` of ids and gradients for each. Returns the sum of `read` of all that came."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The examples of one rank: numbers [n, B, 13], ids or rows [n, 26, B], labels [n, B]."""

    numbers: Tensor
    ids: Tensor
    labels: Tensor

    def for_ever(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            yield from zip(self.numbers, self.ids, self.labels, strict=True)


def examples(job: RankJob, ids: str) -> Examples:
    """Every world-th batch. `ids` is "ids", or "rows" for sides that are spared the mapping."""

    def part(name: str) -> Tensor:
        stored = np.load(job.folder / f"{name}.npy", mmap_mode="r")
        return torch.from_numpy(stored.reshape(-1, job.batch, *stored.shape[1:])[job.rank :: job.world].copy())

    # [n, B, 26] to [n, 26, B]: all sides want the ids of a column together.
    return Examples(numbers=part("numbers"), ids=part(ids).transpose(1, 2).contiguous(), labels=part("labels"))


class TrainingTurns:
    def __init__(self, side: RankTrainer, job: RankJob) -> None:
        self._side = side
        self._dense = DenseWork(side.half, job.batch)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        count = request["count"]
        match request["command"]:
            case "losses":
                return {"losses": self._side.losses(count)}
            case "dense":
                return timed(lambda: [self._dense.step() for _ in range(count)])
            case _:
                return timed(lambda: self._side.train(count)) | {"memory": memory()}


class ExchangeTurns:
    """Runs of whole exchanges. The "loss" is a sum of what came, to compare the transports."""

    def __init__(self, side: RankExchange, job: RankJob) -> None:
        self._side = side
        count, dim = job.options["ids"], job.options["dim"]
        rng = np.random.default_rng(job.rank)
        self._sizes = [count // job.world] * job.world
        self._ids = rng.integers(0, 2**48, count)
        self._rows = rng.standard_normal((count, dim), dtype=np.float32)
        self._gradients = rng.standard_normal((count, dim), dtype=np.float32)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["command"] == "losses":
            return {"losses": [float(self._exchange() % 2**64)]}
        latencies: list[float] = []

        def run() -> None:
            for _ in range(request["count"]):
                start = time.perf_counter()
                self._exchange()
                latencies.append(time.perf_counter() - start)

        return timed(run) | {"latencies": latencies}

    def _exchange(self) -> int:
        return self._side.exchange(self._sizes, self._ids, self._rows, self._gradients)


def read(came: np.ndarray) -> int:
    """Read every cache line, as a table would: a transport must not gain by leaving the data where it is."""
    return int(came.reshape(-1).view(np.int64)[::8].sum())


def timed(work: Callable[[], object]) -> dict[str, float]:
    gc.collect()
    gc.disable()
    start, worked = time.perf_counter(), time.process_time()
    work()
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    gc.enable()
    return {"seconds": seconds, "cpu_seconds": worked}


def memory() -> int:
    """Resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS")))


def serve(config: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    torch.set_num_threads(config["threads"])
    kind = getattr(importlib.import_module(f"peers.{config['module']}"), config["side"])
    job = RankJob(
        model=config["model"],
        towers=config["towers"],
        folder=Path(config["folder"]),
        batch=config["batch"],
        rank=config["rank"],
        world=config["world"],
        meeting=Path(config["meeting"]),
        options=config["options"],
    )
    side = kind(job)
    turns = ExchangeTurns(side, job) if config["exchange"] else TrainingTurns(side, job)
    answer({"ready": True, "versions": side.versions})
    for line in sys.stdin:
        answer(turns.ask(json.loads(line)))
    side.close()
