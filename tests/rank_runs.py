"""Ranks as threads that train the small model of the tests, and what one process makes of the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from monolith.data.sources.source import Source, SourcePosition
from monolith.data.transforms.rows import concat_rows
from monolith.features.batch import Batch
from monolith.nn import dense_state_dict
from monolith.ranks.mesh import Mesh
from monolith.table import EmbeddingTable
from monolith.testing.rank_threads import run_ranks
from monolith.train import RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.distributed.ranks import RankSession
from monolith.train.hooks import Hook
from training import ClickModel, batch_of


class MeanModel(ClickModel):
    """The model of `training` with losses that are means over the batch."""

    heads = tuple(head.model_copy(update={"reduction": "mean"}) for head in ClickModel.heads)


class Batches(Source):
    """Batches 0 to `count` - 1 of the stream of `training`, of which shard i of n has every n-th."""

    def __init__(self, count: int, batch: Callable[[int], Batch] = batch_of) -> None:
        self.count, self._batch = count, batch
        super().__init__()

    def _start(self) -> SourcePosition:
        return {"next": 0}

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        for number in range(int(position["next"]), self.count):
            if number % self._shard_count == self._shard_index:
                yield self._batch(number), {"next": number + 1}


@dataclass
class Trained:
    """What a rank has at its end."""

    step: int
    trainer: Trainer
    losses: list[float]
    tables: dict[str, EmbeddingTable]

    @property
    def dense(self) -> dict[str, Tensor]:
        return dense_state_dict(self.trainer.model)


class Losses(Hook):
    """Collects the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.losses.append(result.mean_loss)


@dataclass(kw_only=True)
class RankRun:
    """How ranks train. `model` and `source` are called once in each rank."""

    model: Callable[[], nn.Module] = ClickModel
    source: Callable[[], Any] = field(default=lambda: Batches(10))
    optimizer: Callable[..., torch.optim.Optimizer] = lambda parameters: torch.optim.Adam(parameters, lr=0.01)
    run: dict[str, Any] = field(default_factory=dict)
    runner: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    hooks: Callable[[int], list[Hook]] = lambda rank: []

    def trainer(self, *, chief: bool = True) -> Trainer:
        model = self.model()
        parameters = list(model.parameters())
        config = RunConfig(**{**self.run, **({} if chief else {"model_dir": None})})
        return Trainer(model, self.optimizer(parameters) if parameters else None, config=config)

    def on(self, mesh: Mesh, trainer: Trainer) -> Trained:
        """Be one rank."""
        losses = Losses()
        config = RunnerConfig(num_workers=mesh.size, index=mesh.rank, **self.runner)
        with RankSession(trainer, config, mesh=mesh) as session:
            step = session.train(self.source(), hooks=[losses, *self.hooks(mesh.rank)], **self.train)
            return Trained(step, trainer, losses.losses, dict(session.store.local.tables))

    def ranks(self, size: int) -> list[Trained]:
        """Train on `size` threads."""
        # One after the other: threads share torch's random numbers.
        trainers = [self.trainer(chief=not rank) for rank in range(size)]
        return run_ranks(size, lambda mesh: self.on(mesh, trainers[mesh.rank]))


def global_batches(count: int, ranks: int, batch: Callable[[int], Batch] = batch_of) -> list[Batch]:
    """The batches that one process must train on to do what `ranks` do on `Batches(count)`."""
    return [
        concat_rows([batch(n) for n in range(first, min(first + ranks, count))]) for first in range(0, count, ranks)
    ]


def rows_of(trained: list[Trained]) -> dict[str, dict[str, Tensor]]:
    """All rows of all ranks, by table and in the order of their ids, with their optimizer state."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in trained[0].tables:
        parts = [one.tables[name].entries() for one in trained]
        ids = torch.cat([part.ids for part in parts])
        assert len(ids) == len(ids.unique()), "a row has one owner"
        order = ids.argsort()
        columns = {"ids": ids, "values": torch.cat([part.values for part in parts])}
        columns |= {slot: torch.cat([part.slots[slot] for part in parts]) for slot in parts[0].slots}
        columns["times"] = torch.cat([part.times for part in parts])
        found[name] = {key: column[order] for key, column in columns.items()}
    return found


def rows_of_model(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The same of a model in one process."""
    found = {}
    for name, table in model.embeddings.store.tables.items():  # type: ignore[union-attr, attr-defined]
        entries = table.entries()
        order = entries.ids.argsort()
        columns = {"ids": entries.ids, "values": entries.values, **entries.slots, "times": entries.times}
        found[name] = {key: column[order] for key, column in columns.items()}
    return found
