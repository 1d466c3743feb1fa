"""The script of the launch campaign: counts, in rows and in a dense parameter, what it is trained with.

    launched.py BATCHES

Every occurrence of an id takes 1 from its row, every batch 1 from the dense parameter. Before batch n it waits until the file
`allowed` has a larger number, and prints where it waits. If there is a file `raise-<worker>`, it removes it and fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from monolith import EmbeddingBagCollection, Estimator, Feature, RunConfig
from monolith.features import Batch
from monolith.table import SGD, Bags, Zeros
from monolith.table.store import Store
from monolith.train import RunnerConfig

IDS, BATCH_SIZE = 200, 32


class Counting(nn.Module):
    """Learns nothing, and counts everything."""

    def __init__(self) -> None:
        super().__init__()
        feature = Feature(name="id", dim=1, optimizer=SGD(learning_rate=1.0), initializer=Zeros())
        self.embeddings = EmbeddingBagCollection([feature])
        self.batches = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> torch.Tensor:
        self.rows = self.embeddings(batch)["id"]
        return torch.zeros(len(self.rows))

    def extra_loss(self, batch: Batch, logits: object) -> torch.Tensor:
        return self.rows.sum() + self.batches.sum()

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Numbered:
    """The batches of one worker, each a function of its number."""

    def __init__(self, batches: int, *, worker: int = 0, folder: Path | None = None) -> None:
        self._batches, self._worker, self._folder, self._next = batches, worker, folder, 0

    def shard(self, index: int, count: int) -> Numbered:
        return Numbered(self._batches, worker=index, folder=self._folder)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int] | None) -> None:
        self._next = 0 if state is None else state["next"]

    def __iter__(self) -> Iterator[Batch]:
        while self._next < self._batches:
            self._wait()
            number, self._next = self._next, self._next + 1
            yield batch_of(self._worker, number)
        self._next = 0

    def _wait(self) -> None:
        if self._folder is None:
            return
        said = False
        while True:
            bomb = self._folder / f"raise-{self._worker}"
            if bomb.exists():
                bomb.unlink()
                raise RuntimeError("as the campaign wants it")
            if self._next < int((self._folder / "allowed").read_text() or 0):
                return
            if not said:
                said = True
                print("waits at", self._next, flush=True)  # noqa: T201 - what the campaign waits for
            time.sleep(0.02)


def batch_of(worker: int, number: int) -> Batch:
    ids = np.random.default_rng((worker, number)).integers(IDS, size=BATCH_SIZE)
    return {"id": torch.from_numpy(ids), "label": torch.zeros(BATCH_SIZE)}


def expected(batches: int, *, workers: int) -> torch.Tensor:
    """How often each id is in the data of all workers."""
    numbers = [batch_of(worker, number)["id"] for worker in range(workers) for number in range(batches)]
    return torch.bincount(torch.cat(numbers), minlength=IDS)  # type: ignore[arg-type]


def counted(store: Store) -> torch.Tensor:
    """How often each id was counted."""
    ids = np.arange(IDS)
    return -store.lookup([Bags(table="id", ids=ids, offsets=np.arange(len(ids) + 1))])[0].flatten()


def counted_in_checkpoint(folder: Path) -> tuple[torch.Tensor, float]:
    """What the newest checkpoint has counted, ids and batches, as a single process restores it."""
    config = RunConfig(model_dir=str(folder / "model"))
    estimator = Estimator(Counting(), config, runner=RunnerConfig(is_local=True))
    estimator.trainer.restore()
    model = estimator.model
    assert isinstance(model, Counting)
    return counted(model.embeddings.store), -model.batches.item()


def main(batches: int) -> None:
    torch.set_num_threads(1)
    config = RunConfig(clip_norm=None, save_checkpoints_steps=100, stop_on_nan=False)
    step = Estimator(Counting(), config).train(Numbered(batches, folder=Path.cwd()))
    print("done at", step, flush=True)  # noqa: T201 - for whoever reads the log


if __name__ == "__main__":
    main(int(sys.argv[1]))
