"""The child process of one side of the end-to-end benchmark, started by `worker.py`."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from click_models import DLRM, DeepFM, DenseWork


class ClickTrainer(Protocol):
    """One side: a model, its tables with a row for every id, and the data. Reading continues where the last call stopped."""

    versions: dict[str, str]
    half: DeepFM | DLRM
    """The model without its embeddings."""

    def __init__(self, model: str, towers: str, folder: Path, threads: int) -> None: ...
    def losses(self, batches: int) -> list[float]:
        """Train on the next batches and return the loss of each."""

    def train(self, batches: int) -> None:
        """Train on the next batches, as fast as it goes."""

    def phases(self, batches: int) -> dict[str, float]:
        """Train on the next batches one part of a step at a time; seconds by part."""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def timed(work: Callable[[], object], clock: Callable[[], float]) -> dict[str, float]:
    gc.collect()
    gc.disable()
    start = clock()
    work()
    seconds = clock() - start
    gc.enable()
    return {"seconds": seconds}


def serve(config: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    module = importlib.import_module(f"peers.{config['module']}")
    trainer: type[ClickTrainer] = getattr(module, config["trainer"])
    side = trainer(config["model"], config["towers"], Path(config["folder"]), config["threads"])
    dense = DenseWork(side.half)
    Phases.clock = clock = CLOCKS[config["clock"]]
    answer({"ready": True, "versions": side.versions})
    for line in sys.stdin:
        request = json.loads(line)
        count = request["batches"]
        match request["command"]:
            case "losses":
                answer({"losses": side.losses(count)})
            case "train":
                answer(timed(lambda count=count: side.train(count), clock))
            case "dense":
                answer(timed(lambda count=count: [dense.step() for _ in range(count)], clock))
            case "phases":
                answer({"phases": side.phases(count)})


class Phases:
    """A stopwatch for the parts of a step."""

    clock: ClassVar[Callable[[], float]] = time.perf_counter

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = Phases.clock()

    def end(self, part: str) -> None:
        """Add the time since the last call to `part`."""
        now = Phases.clock()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
