"""A run in a thread on a source that waits, with a model whose rows count how often each id was trained."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from monolith import EmbeddingBagCollection, Feature
from monolith.data import ParquetSource
from monolith.data.sources.source import Source
from monolith.features.batch import Batch
from monolith.table import SGD, Zeros
from monolith.train import RunConfig, Trainer
from monolith.train.hooks import Hook
from waiting_source import until

__all__ = ["IdCounts", "Run", "counts_of", "parquet_input", "running"]

SECONDS = 60.0


class IdCounts(nn.Module):
    """Every occurrence of an id takes 1 from its row, every batch takes 1 from `batches`, whatever was trained before."""

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


def counts_of(trainer: Trainer, ids: Iterable[int]) -> dict[int, int]:
    """Return how often each id was trained, without those that never were."""
    wanted = list(ids)
    model = trainer.model
    assert isinstance(model, IdCounts)
    with torch.no_grad():
        rows = model.embeddings({"id": torch.tensor(wanted)})["id"].reshape(-1)
    return {one: round(-value) for one, value in zip(wanted, rows.tolist(), strict=True) if value}


class Run:
    """A trainer in a thread."""

    def __init__(self, source: Source, *, hooks: Sequence[Hook] = (), **config: Any) -> None:  # noqa: ANN401
        model = IdCounts()
        settings = RunConfig(clip_norm=None, threads=1, **config)
        self.trainer = Trainer(
            model, torch.optim.SGD(model.parameters(), lr=1.0), config=settings, hooks=hooks, heads=None
        )
        self.source, self.error = source, None
        self.limits: dict[str, int] = {}
        self.thread = threading.Thread(target=self._fit, daemon=True)

    error: BaseException | None

    def _fit(self) -> None:
        try:
            self.trainer.fit(self.source, **self.limits)
        except BaseException as error:
            self.error = error

    def trained(self, steps: int) -> None:
        """Return when so many steps are made."""
        until(lambda: self.trainer.step >= steps or not self.thread.is_alive())
        assert self.error is None, self.error

    def ended(self) -> str | None:
        """Wait for the end. Returns its reason."""
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), "the run does not end"
        if self.error is not None:
            raise self.error
        return self.trainer.stop_reason


@contextmanager
def running(source: Source, **settings: Any) -> Iterator[Run]:  # noqa: ANN401
    """A run that is ended with the block."""
    run = Run(source, **settings)
    run.thread.start()
    try:
        yield run
    finally:
        run.trainer.interrupt("the test is over")
        run.thread.join(SECONDS)
        assert not run.thread.is_alive(), "the run does not end"
    if run.error is not None:
        raise run.error


def parquet_input(mode: str, *, folder: str) -> Iterable[Batch]:
    """The input of a job of the tests: the Parquet files of a folder."""
    return ParquetSource(folder, ["id", "label"], batch_size=4)
