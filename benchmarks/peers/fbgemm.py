"""FBGEMM's CPU table-batched embedding: the fastest CPU embedding of the PyTorch world, on rows 0..n-1."""

from __future__ import annotations

from dataclasses import dataclass

import fbgemm_gpu
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from workload import (
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Batch,
    FloatArray,
    IdArray,
    offsets,
    pooled_gradient,
)


@dataclass(frozen=True)
class Prepared:
    rows: torch.Tensor


class Fbgemm:
    def __init__(self, ids: IdArray, dim: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.versions = {"torch": torch.__version__, "fbgemm-gpu-cpu": fbgemm_gpu.__version__}
        self._bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(ids.size, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ADAGRAD,  # elementwise, like torch.optim.Adagrad
            learning_rate=LEARNING_RATE,
            eps=EPSILON,
            pooling_mode=PoolingMode.SUM,
        )
        (self._weights,) = self._bags.split_embedding_weights()
        self._weights.uniform_(-0.05, 0.05)
        # It has no option for the initial accumulator; the state tensor is set instead, so that the same step is taken.
        ((state, *_),) = self._bags.split_optimizer_states()
        state.fill_(INITIAL_ACCUMULATOR)
        self._offsets = torch.from_numpy(offsets())
        self._gradient = torch.from_numpy(pooled_gradient(dim))

    def prepare(self, batch: Batch) -> Prepared:
        return Prepared(rows=torch.from_numpy(batch.rows))

    def lookup(self, prepared: Prepared) -> torch.Tensor:
        with torch.no_grad():
            return self._bags(prepared.rows, self._offsets)

    def train_step(self, prepared: Prepared) -> None:
        self._bags(prepared.rows, self._offsets).backward(self._gradient)

    def read(self, batch: Batch) -> FloatArray:
        return self._weights.detach()[torch.from_numpy(batch.rows)].numpy()
