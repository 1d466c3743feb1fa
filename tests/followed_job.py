"""The script of runs that tests follow: one process, ranks or servers and workers, as the launcher says. It takes seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn

from monolith.data.sources.source import Source
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.features import Feature
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head
from monolith.train import Estimator, RunConfig
from monolith.train.hooks.hook import Hook

COLUMNS = ("user_id", "item_id")
CLICK = Head(name="click", label="label")
BATCHES = int(os.environ.get("BATCHES", "200"))


class Clicks(nn.Module):
    """Two tables and a small net."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embeddings = EmbeddingBagCollection([Feature(name=name, dim=4) for name in COLUMNS])
        self.dense = nn.Linear(8, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = self.embeddings(batch)
        return self.dense(torch.cat([rows[name] for name in COLUMNS], dim=1)).squeeze(1)


class Slow(Hook):
    """Makes steps of some milliseconds, so that a run is followed and killed in its middle."""

    def after_step(self, trainer: object, result: object) -> None:
        time.sleep(float(os.environ.get("STEP_SECS", "0.1")))


def data() -> Source | Iterator[dict[str, torch.Tensor]]:
    return ClickStream(ClickStreamConfig(users=400, items=400, batches=BATCHES, batch_size=64))


def estimator(model_dir: str) -> Estimator:
    save_steps = os.environ.get("SAVE_STEPS")
    config = RunConfig(
        model_dir=model_dir,
        feed_secs=0.02,
        feed_dense_secs=0.05,
        log_flush_secs=0.2,
        seed=1,
        restore_to=os.environ.get("RESTORE_TO") or None,
        save_checkpoints_steps=int(save_steps) if save_steps else None,
        checkpoints_max_to_keep=2,
    )
    model = Clicks()
    return Estimator(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), heads=[CLICK])


if __name__ == "__main__":
    torch.set_num_threads(1)
    estimator(sys.argv[1]).train(data(), hooks=[Slow()])
