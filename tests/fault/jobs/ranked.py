"""The script of the campaigns against ranks: counts what it is trained with, exactly, and trains a small model as well.

    ranked.py FOLDER

Batches are numbered, each a function of its shard and its number. The data ends at the number in the file `FOLDER/last`, and
while there is none it has no end. Every step is a line in `FOLDER/steps-<rank>`: the step, the time, the process. If there is a
file `FOLDER/raise-<rank>`, that rank fails before the step that the file says, each time. If there is a file
`FOLDER/late-<rank>`, a process of that rank waits until it is gone before it begins.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from monolith import EmbeddingBagCollection, Estimator, Feature, RunConfig
from monolith.features import Batch
from monolith.table import SGD, Adagrad, Bags, Zeros
from monolith.table.store import Store
from monolith.train import RunnerConfig, StepResult, Trainer
from monolith.train.hooks import Hook

IDS, BATCH_SIZE, SHARDS = 200, 16, 4


class Counting(nn.Module):
    """`id` counts how often it was trained, `batches` counts the batches of all shards. `item` and `mlp` learn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embeddings = EmbeddingBagCollection(
            [
                Feature(name="id", dim=1, optimizer=SGD(learning_rate=1.0), initializer=Zeros()),
                Feature(name="item", dim=4, optimizer=Adagrad(learning_rate=0.1)),
            ]
        )
        self.mlp = nn.Linear(4, 1)
        self.batches = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = self.embeddings(batch)
        self.rows = rows["id"]
        return self.mlp(rows["item"]).squeeze(1)  # type: ignore[no-any-return]

    def extra_loss(self, batch: Batch, logits: object) -> torch.Tensor:
        return self.rows.sum() + self.batches.sum()

    def configure_optimizer(self) -> torch.optim.Optimizer:
        counted = [self.batches]
        return torch.optim.SGD([{"params": self.mlp.parameters(), "lr": 0.1}, {"params": counted, "lr": 1.0}], lr=0.1)


class Numbered:
    """The batches of one shard."""

    def __init__(self, folder: Path, *, shard: int = 0, pause: float = 0.0) -> None:
        self._folder, self._shard, self._pause, self._next = folder, shard, pause, 0

    def shard(self, index: int, count: int) -> Numbered:
        return Numbered(self._folder, shard=index, pause=self._pause)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int] | None) -> None:
        self._next = 0 if state is None else state["next"]

    def __iter__(self) -> Iterator[Batch]:
        while self._next < (last := last_of(self._folder)):
            time.sleep(self._pause if last == float("inf") else 0.0)
            number, self._next = self._next, self._next + 1
            yield batch_of(self._shard, number)
        self._next = 0


def last_of(folder: Path) -> float:
    """The number at which the data ends."""
    try:
        return int((folder / "last").read_text())
    except FileNotFoundError:
        return float("inf")


def batch_of(shard: int, number: int) -> Batch:
    chance = np.random.default_rng((shard, number))
    return {
        "id": torch.from_numpy(chance.integers(IDS, size=BATCH_SIZE)),
        "item": torch.from_numpy(chance.integers(50, size=BATCH_SIZE)),
        "label": torch.from_numpy(chance.integers(2, size=BATCH_SIZE)).float(),
    }


def expected(batches: int) -> torch.Tensor:
    """How often each id is in the first batches of all shards."""
    numbers = [batch_of(shard, number)["id"] for shard in range(SHARDS) for number in range(batches)]
    return torch.bincount(torch.cat(numbers), minlength=IDS)  # type: ignore[arg-type]


def counted(store: Store) -> torch.Tensor:
    """How often each id was trained. The loss of a head is a sum over examples, so each of them counts 1."""
    ids = np.arange(IDS)
    return -store.lookup([Bags(table="id", ids=ids, offsets=np.arange(len(ids) + 1))])[0].flatten()


class Progress(Hook):
    """Writes a line for each step, and fails where it is told to."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._steps = folder / f"steps-{rank}"
        self._bomb = folder / f"raise-{rank}"

    def before_step(self, trainer: Trainer) -> None:
        if self._bomb.exists() and trainer.step + 1 == int(self._bomb.read_text()):
            raise ValueError("as the campaign wants it")

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        with self._steps.open("a") as lines:
            lines.write(json.dumps([trainer.step, time.time(), os.getpid()]) + "\n")


def main(folder: Path, runner: RunnerConfig | None = None) -> Counting:
    runner = RunnerConfig.from_env() if runner is None else runner
    runner = runner.model_copy(update={"micro_batches": SHARDS})
    while (folder / f"late-{runner.index}").exists():
        time.sleep(0.02)
    model = Counting()
    config = RunConfig(
        model_dir=str(folder / "model"),
        clip_norm=1e9,
        save_checkpoints_steps=200,
        log_flush_secs=0.3,
        stop_on_nan=False,
        seed=7,
    )
    pause = float(os.environ.get("RANKED_PAUSE_SECS", "0"))
    estimator = Estimator(model, config, runner=runner)
    step = estimator.train(Numbered(folder, pause=pause), hooks=[Progress(folder, runner.index)])
    print("done at", step, flush=True)  # noqa: T201 - for whoever reads the log
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
