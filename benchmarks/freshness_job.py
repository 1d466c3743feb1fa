"""The run that `freshness.py` measures: one process, or the script of `monolith launch`. It trains when the benchmark asks it to.

Every step trains 26 columns of 256 ids and sets the rows of eight probe ids: the regression head `value` has the number of the
step as its label, and one step of SGD with a rate of one half makes the row equal to its label. So an answer of a server says
which step it has.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from click_models import TorchFM, tower
from monolith import EmbeddingBagCollection, Estimator, Feature, Head, RunConfig, set_num_threads
from monolith.features import Batch
from monolith.serve import export_model
from monolith.table import SGD, Zeros
from monolith.train import RunnerConfig, StepResult, Trainer
from monolith.train.hooks import Hook

COLUMNS = [f"C{number}" for number in range(1, 27)]
DIM, ROWS, BATCHES = 16, 256, 64
IDS = 20_000  # of each column
PROBES = 8
PROBE_IDS = np.arange(PROBES) * 1_000_003
HEADS = [Head(name="click", label="label"), Head(name="value", label="target", kind="regression", mask="is_probe")]


class ProbedModel(nn.Module):
    """26 embeddings -> FM + MLP, and the row of the probe as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        probe = Feature(name="probe", dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=0.5))
        self.embeddings = EmbeddingBagCollection([*(Feature(name=n, dim=DIM, stack="all") for n in COLUMNS), probe])
        self.pairs = TorchFM()
        self.deep = tower(len(COLUMNS) * DIM, 128, 64, 1)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        found = self.embeddings(batch)
        return {"click": self.dense(found["all"]), "value": found["probe"]}

    def dense(self, vectors: Tensor) -> Tensor:
        """[B, 26, 16] -> [B, 1]."""
        logits: Tensor = self.pairs(vectors) + self.deep(vectors.flatten(1))
        return logits


class Examples:
    """Batches without an end: the same ids again and again, and the number of the step as the label of the probes."""

    def __init__(self, rank: int = 0, *, zipf: bool = False) -> None:
        self._zipf = zipf
        generator = np.random.default_rng(rank)

        def drawn() -> Tensor:
            ids = generator.zipf(1.05, ROWS) % IDS if zipf else generator.integers(0, IDS, ROWS)
            return torch.from_numpy(ids)

        self._ids = [{name: drawn() for name in COLUMNS} for _ in range(BATCHES)]
        # Other ranks set other rows: the gradients of all ranks are added.
        probes = np.resize(PROBE_IDS + rank, ROWS)
        label = torch.from_numpy(generator.integers(0, 2, ROWS).astype(np.float32))
        self._same = {"probe": torch.from_numpy(probes), "label": label, "is_probe": torch.arange(ROWS) < PROBES}
        self.last: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        step = 0
        while True:
            step += 1
            self.last = {**self._ids[step % BATCHES], **self._same, "target": torch.full((ROWS,), float(step))}
            yield self.last

    def shard(self, index: int, count: int) -> Examples:
        """Return the examples of a rank."""
        return Examples(index, zipf=self._zipf)


class Commands(Hook):
    """Makes steps when the benchmark asks for them, and says when each was applied."""

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._lines: IO[str] = connection.makefile("rw")
        self._left, self._rate, self._begun, self._used = 0, None, 0.0, 0.0
        self._times: list[float] = []
        self._random = random.Random(0)

    def before_step(self, trainer: Trainer) -> None:
        """Wait for a command, or until it is time for the next step."""
        while not self._left:
            self._obey(trainer, self._lines.readline())
            if trainer.stop_reason is not None:
                return
        if self._rate is not None:
            # At random moments: steps and publications at the same interval would keep the distance they happen to begin with.
            due = self._begun + (len(self._times) + self._random.random()) / self._rate
            time.sleep(max(0.0, due - time.monotonic()))

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Note the time. All updates of the step are applied."""
        self._times.append(time.monotonic())
        self._left -= 1
        if not self._left:
            seconds = time.monotonic() - self._begun
            used = time.process_time() - self._used
            self._say({"last": trainer.step, "times": self._times, "seconds": seconds, "processor": used})

    def _obey(self, trainer: Trainer, line: str) -> None:
        command: dict[str, Any] = json.loads(line) if line else {"stop": True}
        if "stop" in command:
            trainer.request_stop("the benchmark has ended")
        elif "rows_per_second" in command:
            self._say({"rows": change_rows(trainer, command["rows_per_second"], command["seconds"])})
        else:
            self._left, self._rate, self._times = command["steps"], command["rate"], []
            self._begun, self._used = time.monotonic(), time.process_time()

    def _say(self, answer: dict[str, Any]) -> None:
        self._lines.write(json.dumps(answer) + "\n")
        self._lines.flush()


def change_rows(trainer: Trainer, per_second: int, seconds: float) -> int:
    """Assign rows of all columns at a steady rate, without training. Returns how many."""
    tables = {name: shards[0] for name, shards in trainer.tables().items() if name in COLUMNS}
    batch = 2_000
    values = torch.randn(batch, DIM)
    begun, done = time.monotonic(), 0
    while (now := time.monotonic()) < begun + seconds:
        for number, table in enumerate(tables.values()):
            first = (done // batch + number) * batch % IDS
            table.assign(np.arange(first, first + batch), values)
            done += batch
            if done > (now - begun) * per_second:
                break
        time.sleep(max(0.0, begun + done / per_second - time.monotonic()))
    return done


class Exports(Hook):
    """Exports the model every `seconds`, as somebody does who has nothing better."""

    def __init__(self, folder: Path, examples: Examples, seconds: float) -> None:
        self._folder, self._examples, self._seconds = folder, examples, seconds
        self._last = float("-inf")

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Export if it is time."""
        if time.monotonic() >= self._last + self._seconds:
            self._last = time.monotonic()
            export_model(trainer.model, self._examples.last, self._folder, heads=HEADS, step=trainer.step)


class SharedStore(Hook):
    """Writes the rows of each step to Redis, with one pipeline."""

    def __init__(self, port: int, examples: Examples) -> None:
        from peers.freshness_redis import connected

        self._redis, self._examples = connected(port), examples

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Write them."""
        from peers.freshness_redis import keys

        pipeline = self._redis.pipeline(transaction=False)
        for name, shards in trainer.tables().items():
            ids = np.unique(self._examples.last[name].numpy())
            rows = shards[0].lookup_entry(ids).values.numpy()
            pipeline.mset(dict(zip(keys(name, ids), (row.tobytes() for row in rows), strict=True)))
        pipeline.execute()


def main() -> None:
    """Train until the benchmark says that it has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--commands", required=True, help="socket of the benchmark")
    parser.add_argument("--feed-secs", type=float, required=True)
    parser.add_argument("--zipf", action="store_true", help="draw ids from Zipf(1.05), not uniformly")
    parser.add_argument("--exports", type=Path)
    parser.add_argument("--export-secs", type=float, default=1.0)
    parser.add_argument("--redis-port", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_num_threads(1)
    model, examples = ProbedModel(), Examples(zipf=options.zipf)
    config = RunConfig(
        model_dir=options.model_dir, feed_secs=options.feed_secs, clip_norm=None, save_checkpoints_secs=0, threads=1
    )
    hooks: list[Hook] = []
    if RunnerConfig.from_env().index == 0:
        hooks.append(Commands(options.commands))
    if options.exports is not None:
        hooks.append(Exports(options.exports, examples, options.export_secs))
    if options.redis_port is not None:
        hooks.append(SharedStore(options.redis_port, examples))
    estimator = Estimator(model, config, optimizer=torch.optim.Adagrad(model.parameters(), lr=0.01), heads=HEADS)
    estimator.train(examples, hooks=hooks)


if __name__ == "__main__":
    sys.exit(main())
