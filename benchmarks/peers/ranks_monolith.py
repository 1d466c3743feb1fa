"""Ranks with ours: EmbeddingBagCollection on 64-bit ids, our layers for pairs of embeddings, Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from monolith.table.buckets import bucket_of
from monolith.train import Head, RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.distributed.ranks import RankSession
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


class Memory(Iterable[Batch]):
    """The examples of one rank, for ever. Each pass continues where the last one stopped."""

    def __init__(self, job: RankJob) -> None:
        self._batches = examples(job, "ids").for_ever()

    def __iter__(self) -> Iterator[Batch]:
        for numbers, ids, labels in self._batches:
            yield {"numbers": numbers, "label": labels, **dict(zip(IDS, ids, strict=True))}

    def shard(self, index: int, count: int) -> Memory:
        """Return these: they are the examples of this rank already."""
        return self


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
        # Peers do not clip either.
        config, heads = RunConfig(clip_norm=None), [Head(reduction="sum")]
        self._trainer = Trainer(self._model, dense_optimizer(self._model), heads=heads, config=config)
        self._source = Memory(job)
        # Peers have a row for every id from the start.
        self._insert(job, np.load(job.folder / "every_id.npy"))

    def _insert(self, job: RankJob, ids: np.ndarray) -> None:
        store = self._model.embeddings.store
        (table,) = store.configs()
        store.reinitialize(table, ids)

    def losses(self, count: int) -> list[float]:
        losses = Losses()
        self._fit(count, [losses])
        return losses.seen

    def train(self, count: int) -> None:
        self._fit(count, [])

    def _fit(self, count: int, hooks: list[Hook]) -> None:
        self._trainer.hooks = tuple(hooks)
        self._trainer.fit(self._source, steps=count)

    def close(self) -> None:
        pass


class RanksTrainer(OneProcessTrainer):
    """The same trainer as a rank of a synchronous run."""

    def _insert(self, job: RankJob, ids: np.ndarray) -> None:
        config = RunnerConfig(num_workers=job.world, index=job.rank, **job.options)
        self._session = RankSession(self._trainer, config, HostServiceDiscovery(str(job.meeting)))
        self._ranks = job.world
        store = self._session.store
        (table,) = store.configs()
        store.local.reinitialize(table, ids[np.isin(bucket_of(ids), store.buckets)])

    def losses(self, count: int) -> list[float]:
        # Of all ranks, on each of them.
        return [loss / self._ranks for loss in super().losses(count)]

    def _fit(self, count: int, hooks: list[Hook]) -> None:
        self._session.train(self._source, steps=count, hooks=hooks)

    def close(self) -> None:
        self._session.close()


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
