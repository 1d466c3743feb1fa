"""Ranks with TorchRec over gloo: DistributedModelParallel over 26 tables of mapped rows, fused Adagrad."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel, ShardingEnv, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.streamable import Pipelineable

from click_models import (
    DIM,
    FIELDS,
    INITIAL_ACCUMULATOR,
    INITIAL_WEIGHT,
    LEARNING_RATE,
    dense_half,
    dense_optimizer,
    loss_of,
)
from peers.ranks_torch import join
from rank_worker import RankJob, examples

CPU = torch.device("cpu")
COLUMNS = [f"R{column}" for column in range(1, FIELDS + 1)]
EPSILON = 1e-10


@dataclass
class JaggedBatch(Pipelineable):
    """A batch in main memory, where TorchRec's pipeline finds it."""

    numbers: Tensor
    jagged: torchrec.KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedBatch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass


class JaggedModel(nn.Module):
    def __init__(self, job: RankJob) -> None:
        super().__init__()
        self.dense = dense_half(job.model, job.towers)
        self._world, self._first = job.world, int(self.dense.has_first_order)
        # Its kernels want widths in fours, so a first-order weight brings three unused numbers with it.
        self.width = DIM + 4 * self._first
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t_{column}",
                num_embeddings=int(rows),
                embedding_dim=self.width,
                feature_names=[column],
                init_fn=partial(nn.init.constant_, val=INITIAL_WEIGHT),
            )
            for column, rows in zip(COLUMNS, np.load(job.folder / "cardinalities.npy"), strict=True)
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))

    def forward(self, batch: JaggedBatch) -> tuple[Tensor, Tensor]:
        found = self.bags(batch.jagged)
        vectors, first_order = found.values().view(-1, FIELDS, self.width), None
        if self._first:
            first_order, _, vectors = vectors.split([1, 3, DIM], dim=2)
        loss = loss_of(self.dense(batch.numbers, vectors, first_order), batch.labels)
        # The gradients are averaged over the ranks, and the sum is wanted.
        return loss * self._world, loss.detach()


class TableWiseTrainer:
    def __init__(self, job: RankJob) -> None:
        self.versions = {"torchrec": torchrec.__version__, "torch": torch.__version__}
        join(job)
        model = JaggedModel(job)
        self.half = model.dense
        optimizer = {"lr": LEARNING_RATE, "eps": EPSILON}
        _apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), optimizer)
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            model.bags,
            self._sharding(job.world),
            sharder,
            world_size=job.world,
            local_size=job.world,
            device_type="cpu",
        )
        self._model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan({"bags": plan}),
            sharders=[sharder],
        )
        for parameters in self._model.fused_optimizer.state_dict()["state"].values():
            for state in parameters.values():
                for shard in state.local_shards():
                    shard.tensor.fill_(INITIAL_ACCUMULATOR)
        self._dense = dense_optimizer(self.half)
        self._batches = self._read(job)

    def _sharding(self, world: int) -> dict[str, object]:
        """Neighbouring columns on one rank, so that the vectors come in the order of columns."""
        return {f"t_{column}": table_wise(rank=place * world // FIELDS) for place, column in enumerate(COLUMNS)}

    def _read(self, job: RankJob) -> Iterator[JaggedBatch]:
        lengths = torch.ones(FIELDS * job.batch, dtype=torch.int64)
        for numbers, rows, labels in examples(job, "rows").for_ever():
            jagged = torchrec.KeyedJaggedTensor(keys=COLUMNS, values=rows.reshape(-1), lengths=lengths)
            yield JaggedBatch(numbers, jagged, labels)

    def losses(self, batches: int) -> list[float]:
        return [float(self._step()) for _ in range(batches)]

    def train(self, batches: int) -> None:
        for _ in range(batches):
            self._step()

    def _step(self) -> Tensor:
        self._dense.zero_grad()
        loss, result = self._model(next(self._batches))
        loss.backward()
        self._dense.step()
        found: Tensor = result
        return found

    def close(self) -> None:
        dist.destroy_process_group()


class RowWiseTrainer(TableWiseTrainer):
    def _sharding(self, world: int) -> dict[str, object]:
        return {f"t_{column}": row_wise() for column in COLUMNS}


class PipelinedTrainer(TableWiseTrainer):
    """Table by table, with the ids of the next batch exchanged ahead by TorchRec's own pipeline."""

    def __init__(self, job: RankJob) -> None:
        super().__init__(job)
        self._pipeline = TrainPipelineSparseDist(self._model, self._dense, CPU)

    def _step(self) -> Tensor:
        found: Tensor = self._pipeline.progress(self._batches)
        return found
