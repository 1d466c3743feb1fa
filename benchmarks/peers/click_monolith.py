"""End to end with ours: ParquetSource, EmbeddingBagCollection on 64-bit ids, our layers for pairs of embeddings, Trainer."""

from __future__ import annotations

import itertools
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

import monolith
from click_models import (
    BATCH,
    DATA_FILE,
    DIM,
    DLRM,
    IDS,
    IDS_FILE,
    INITIAL_ACCUMULATOR,
    INITIAL_WEIGHT,
    LEARNING_RATE,
    NUMBERS,
    DeepFM,
    dense_half,
    dense_optimizer,
)
from click_worker import Phases
from monolith.data import Column, ParquetSource
from monolith.features import Batch, Feature
from monolith.nn import FM, DotInteraction, EmbeddingBagCollection
from monolith.nn.heads import total_loss
from monolith.table import Adagrad, Constant
from monolith.train import Head, RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook


def features(*, first_order: bool) -> list[Feature]:
    """One feature a column, in one table, as one tensor; each id with a first-order weight beside its vector."""
    adagrad = Adagrad(learning_rate=LEARNING_RATE, initial_accumulator_value=INITIAL_ACCUMULATOR)
    start = Constant(value=INITIAL_WEIGHT)
    bias = monolith.Segment(dim=1, initializer=start, optimizer=adagrad) if first_order else False
    return [
        Feature(name=name, slot=slot, dim=DIM, initializer=start, optimizer=adagrad, bias=bias, stack="ids")
        for slot, name in enumerate(IDS, 1)
    ]


class ClickModel(nn.Module):
    def __init__(self, dense: DeepFM | DLRM) -> None:
        super().__init__()
        self.dense = dense
        self.embeddings = EmbeddingBagCollection(features(first_order=self.dense.has_first_order))

    def forward(self, batch: Batch) -> Tensor:
        return self.logits(batch, self.embeddings(batch))

    def logits(self, batch: Batch, found: Batch) -> Tensor:
        return self.dense(torch.stack([batch[name] for name in NUMBERS], dim=1), found["ids"], found.get("ids.bias"))


class Losses(Hook):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.seen.append(float(result.loss))


class MonolithTrainer:
    def __init__(self, model: str, towers: str, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        pa.set_cpu_count(threads)
        monolith.set_num_threads(threads)
        self.versions = {"monolith-torch": version("monolith-torch"), "torch": torch.__version__}
        numbers = [Column(name=name, dtype="float32", shape=()) for name in (*NUMBERS, "label")]
        columns = [*numbers, *(Column(name=name, shape=()) for name in IDS)]
        self._source = ParquetSource(str(folder / DATA_FILE), columns, batch_size=BATCH)
        self.half = dense_half(model, towers, self._pairs(model))
        self._model = ClickModel(self.half)
        self._dense = dense_optimizer(self._model)
        # Peers do not clip either.
        self._config, self._heads = RunConfig(clip_norm=None), [Head(reduction="sum")]
        self._trainer = Trainer(self._model, self._dense, heads=self._heads, config=self._config)
        # Peers have a row for every id from the start.
        store = self._model.embeddings.store
        (table,) = store.configs()
        store.reinitialize(table, np.load(folder / IDS_FILE))

    def _pairs(self, model: str) -> nn.Module | None:
        return FM() if model == "deepfm" else DotInteraction()

    def losses(self, batches: int) -> list[float]:
        losses = Losses()
        self._train(Trainer(self._model, self._dense, heads=self._heads, config=self._config, hooks=[losses]), batches)
        return losses.seen

    def train(self, batches: int) -> None:
        self._train(self._trainer, batches)

    def _train(self, trainer: Trainer, batches: int) -> None:
        end = trainer.step + batches
        while trainer.step < end:
            trainer.fit(self._source, max_steps=end)

    def phases(self, batches: int) -> dict[str, float]:
        phases = Phases()
        for batch in itertools.islice(itertools.chain(self._source, self._source), batches):
            phases.end("read")
            self._model.zero_grad()
            found = self._model.embeddings(batch)
            phases.end("lookup")
            total_loss({"output": self._model.logits(batch, found)}, batch, self._heads).backward()
            phases.end("forward and backward")
            self._dense.step()
            phases.end("dense step")
            self._model.embeddings.step()
            phases.end("sparse step")
        return phases.seconds


class TorchPairsTrainer(MonolithTrainer):
    """The same with torch's operators for pairs of embeddings, as all peers have them."""

    def _pairs(self, model: str) -> None:
        return None
