"""The script of the tests that kill ranks whose rows are on servers. The model counts and learns, as that of `ranked` does.

    partial.py FOLDER STEPS

A checkpoint is written every STEPS steps. The data of each rank has ids of its own in the table that learns, so that the order
in which servers apply the gradients of two ranks does not change a bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from jobs.ranked import Counting, Numbered, Progress
from monolith import Estimator, RunConfig
from monolith.features import Batch
from monolith.train import RunnerConfig

RANKS = 2


class Apart(Numbered):
    """The batches of one shard, with items that no other shard has."""

    def shard(self, index: int, count: int) -> Apart:
        assert count == RANKS
        return Apart(self._folder, shard=index, pause=self._pause)

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield {**batch, "item": batch["item"] + 1000 * self._shard}  # type: ignore[dict-item, operator]


def main(folder: Path, every: int) -> None:
    runner = RunnerConfig.from_env()
    config = RunConfig(model_dir=str(folder / "model"), save_checkpoints_steps=every, stop_on_nan=False, seed=7)
    data = Apart(folder, pause=float(os.environ.get("RANKED_PAUSE_SECS", "0")))
    Estimator(Counting(), config, runner=runner).train(data, hooks=[Progress(folder, runner.index)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
