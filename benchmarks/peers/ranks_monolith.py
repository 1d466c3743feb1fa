"""Ranks with ours: EmbeddingBagCollection on 64-bit ids, our layers for pairs of embeddings, Trainer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor, nn

import monolith
from click_models import DLRM, IDS, DeepFM, dense_half, dense_optimizer
from monolith.cluster import HostServiceDiscovery
from monolith.features import Batch
from monolith.nn import FM, DotInteraction, EmbeddingBagCollection
from monolith.ranks.formation import form_mesh
from monolith.ranks.mesh import Kind
from monolith.ranks.peers import MeshConfig
from monolith.ranks.rendezvous import DiscoveryRendezvous
from monolith.train import Head, RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook
from peers.click_monolith import features
from rank_worker import RankJob, examples, read


class RankModel(nn.Module):
    def __init__(self, dense: DeepFM | DLRM) -> None:
        super().__init__()
        self.dense = dense
        self.embeddings = EmbeddingBagCollection(features(first_order=self.dense.has_first_order))

    def forward(self, batch: Batch) -> Tensor:
        found = self.embeddings(batch)
        logits: Tensor = self.dense(batch["numbers"], found["ids"], found.get("ids.bias"))
        return logits


def batches(job: RankJob) -> Iterator[Batch]:
    for numbers, ids, labels in examples(job, "ids").for_ever():
        yield {"numbers": numbers, "label": labels, **dict(zip(IDS, ids, strict=True))}


class Losses(Hook):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.seen.append(float(result.loss))


class OneProcessTrainer:
    def __init__(self, job: RankJob) -> None:
        monolith.set_num_threads(1)
        self.versions = {"monolith-torch": version("monolith-torch"), "torch": torch.__version__}
        self.half = dense_half(job.model, job.towers, FM() if job.model == "deepfm" else DotInteraction())
        self._model = RankModel(self.half)
        self._optimizer = dense_optimizer(self._model)
        # Peers do not clip either.
        self._config, self._heads = RunConfig(clip_norm=None), [Head(reduction="sum")]
        self._trainer = Trainer(self._model, self._optimizer, heads=self._heads, config=self._config)
        # Peers have a row for every id from the start.
        store = self._model.embeddings.store
        (table,) = store.configs()
        store.reinitialize(table, np.load(job.folder / "every_id.npy"))
        self._batches = batches(job)

    def losses(self, count: int) -> list[float]:
        losses = Losses()
        config, heads = self._config, self._heads
        trainer = Trainer(self._model, self._optimizer, heads=heads, config=config, hooks=[losses])
        trainer.fit(itertools.islice(self._batches, count))
        return losses.seen

    def train(self, count: int) -> None:
        self._trainer.fit(itertools.islice(self._batches, count))

    def close(self) -> None:
        pass


class MeshExchange:
    """Three exchanges of a mesh: ids, rows and gradients. Sizes come with the arrays."""

    def __init__(self, job: RankJob) -> None:
        self.versions = {"monolith-torch": version("monolith-torch")}
        config = MeshConfig(within_host=job.options["within_host"])
        rendezvous = DiscoveryRendezvous(HostServiceDiscovery(str(job.meeting)))
        self._mesh = form_mesh(job.rank, job.world, rendezvous, config=config)

    def exchange(self, sizes: list[int], ids: np.ndarray, rows: np.ndarray, gradients: np.ndarray) -> int:
        first = np.cumsum(sizes)[:-1]
        asked, read = self._exchange(Kind.IDS, np.split(ids, first))
        _, rows_read = self._exchange(Kind.ROWS, np.split(rows, np.cumsum(asked)[:-1]))
        _, gradients_read = self._exchange(Kind.GRADIENTS, np.split(gradients, first))
        return read + rows_read + gradients_read

    def _exchange(self, kind: Kind, parts: list[np.ndarray]) -> tuple[list[int], int]:
        """Returns how many came from each rank. They must be read before the next exchange begins."""
        came = self._mesh.exchange(kind, [[part] for part in parts])
        return [len(part) for (part,) in came], sum(read(part) for (part,) in came)

    def close(self) -> None:
        self._mesh.close()
