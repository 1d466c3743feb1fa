"""One life of a worker that counts: it trains what is left of its data, as many steps at a time as it is allowed.

Every occurrence of an id takes 1 from its row, every batch 1 from a dense parameter: what is there at the end says how often each
batch was counted in each row and parameter.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import nn

from counting_model import COUNTED, Counts
from monolith import RunConfig, Trainer
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.ps import CachedParameters, ClientConfig, ServerOptimizer, ServerStore, tables_of
from monolith.table import Bags
from monolith.train.hooks import Hook
from monolith.train.trainer import StepResult

__all__ = ["clicks", "counting", "miscounted", "work"]


class Tell(Hook):
    """Says which step was made, and makes no more than it was allowed to."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.allowed = pipe, 0

    def before_step(self, trainer: Trainer) -> None:
        while self.allowed == 0:
            self.allowed = self.pipe.recv()
        self.allowed -= 1

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.pipe.send(result.step)


def clicks(batches: int) -> ClickStream:
    return ClickStream(ClickStreamConfig(users=200, batches=batches, batch_size=32))


def counting(store: ServerStore, *hooks: Hook, postpush: bool = False, model_dir: Path | None = None) -> Trainer:
    model = Counts(store)
    cached = CachedParameters(
        nn.ParameterDict({"batches": model.batches}), store, torch.optim.SGD([model.batches], lr=1.0)
    )
    config = RunConfig(
        enable_embedding_postpush=postpush,
        clip_norm=None,
        model_dir=None if model_dir is None else str(model_dir),
        save_checkpoints_steps=10,
    )
    return Trainer(model, ServerOptimizer(cached), config=config, hooks=hooks)


def work(
    pipe: Connection, addresses: list[str], name: str, epoch: int, batches: int, postpush: bool, model_dir: Path | None
) -> None:
    """A life of a worker: it trains what is left of its data."""
    config = ClientConfig(worker=name, epoch=epoch, timeout=120.0)
    with ServerStore(addresses, tables_of(COUNTED), config=config) as store:
        counting(store, Tell(pipe), postpush=postpush, model_dir=model_dir).fit(clicks(batches))


def miscounted(store: ServerStore, batches: int, workers: int) -> tuple[int, int, float]:
    """Updates of rows that are missing, that are there more than once, and how far the dense count is off.

    `workers` have each trained the same `batches`.
    """
    ids, times = torch.cat([batch["user_id"] for batch in clicks(batches)]).unique(return_counts=True)
    bags = Bags(table="user_id", ids=ids.numpy(), offsets=np.arange(len(ids) + 1))
    off = -store.lookup([bags])[0].flatten() - workers * times
    counted = counting(store).model.batches
    return int(-off.clamp(max=0).sum()), int(off.clamp(min=0).sum()), -counted.item() - workers * batches
