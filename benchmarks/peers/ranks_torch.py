"""Ranks in plain PyTorch over gloo: DistributedDataParallel over sparse gradients, and all_to_all for the exchange."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from click_models import DIM, INITIAL_ACCUMULATOR, INITIAL_WEIGHT, LEARNING_RATE, dense_half, dense_optimizer, loss_of
from rank_worker import RankJob, examples, read


def join(job: RankJob) -> None:
    # gloo asks the host's name for the address otherwise, which need not be an address of this machine.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.meeting / 'store'}",
        rank=job.rank,
        world_size=job.world,
        timeout=timedelta(seconds=600),
    )
    dist.barrier()


class BagsModel(nn.Module):
    """One bag for each column, as DLRM's own repository has it."""

    def __init__(self, job: RankJob) -> None:
        super().__init__()
        self.dense = dense_half(job.model, job.towers)
        self._first = int(self.dense.has_first_order)  # the first number of a row: one table is faster than two
        self.bags = nn.ModuleList(self._bag(rows) for rows in self._sizes(np.load(job.folder / "cardinalities.npy")))

    def _sizes(self, cardinalities: np.ndarray) -> list[int]:
        return [int(rows) for rows in cardinalities]

    def _bag(self, rows: int) -> nn.Module:
        width = self._first + DIM
        return nn.EmbeddingBag(rows, width, mode="sum", sparse=True, _weight=torch.full((rows, width), INITIAL_WEIGHT))

    def _lookup(self, rows: Tensor) -> Tensor:
        """[26, B] -> [B, 26, width]."""
        found = [bag(column.unsqueeze(1)) for bag, column in zip(self.bags, rows, strict=True)]
        return torch.stack(found, dim=1)

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        vectors, first_order = self._lookup(rows), None
        if self._first:
            first_order, vectors = vectors.split([1, DIM], dim=2)
        logits: Tensor = self.dense(numbers, vectors, first_order)
        return logits


class OneTableModel(BagsModel):
    """One `nn.Embedding` for all columns: fewer and larger operations."""

    begins: Tensor

    def _sizes(self, cardinalities: np.ndarray) -> list[int]:
        begins = np.concatenate([[0], np.cumsum(cardinalities)[:-1]])
        self.register_buffer("begins", torch.from_numpy(begins).unsqueeze(1), persistent=False)
        return [int(cardinalities.sum())]

    def _bag(self, rows: int) -> nn.Module:
        width = self._first + DIM
        return nn.Embedding(rows, width, sparse=True, _weight=torch.full((rows, width), INITIAL_WEIGHT))

    def _lookup(self, rows: Tensor) -> Tensor:
        (table,) = self.bags
        found: Tensor = table((rows + self.begins).t())
        return found


class DdpTrainer:
    model = BagsModel

    def __init__(self, job: RankJob) -> None:
        self.versions = {"torch": torch.__version__}
        join(job)
        self._world = job.world
        # Buffers are the same on all ranks from the start, and gradients need not be copied out of the buckets.
        model = self.model(job)
        self.half = model.dense
        self._model = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        self._dense = dense_optimizer(model.dense)
        self._sparse = torch.optim.Adagrad(
            model.bags.parameters(), lr=LEARNING_RATE, initial_accumulator_value=INITIAL_ACCUMULATOR
        )
        self._batches = examples(job, "rows").for_ever()

    def losses(self, batches: int) -> list[float]:
        return [float(self._step(*batch)) for batch in itertools.islice(self._batches, batches)]

    def train(self, batches: int) -> None:
        for batch in itertools.islice(self._batches, batches):
            self._step(*batch)

    def _step(self, numbers: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        self._dense.zero_grad()
        self._sparse.zero_grad()
        loss = loss_of(self._model(numbers, rows), labels)
        # The gradients are averaged over the ranks, and the sum is wanted.
        (loss * self._world).backward()
        self._dense.step()
        self._sparse.step()
        return loss.detach()

    def close(self) -> None:
        dist.destroy_process_group()


class DdpOneTableTrainer(DdpTrainer):
    model = OneTableModel


class GlooExchange:
    """Four all_to_all_single: how many ids come, which nobody knows before, then ids, rows and gradients."""

    def __init__(self, job: RankJob) -> None:
        self.versions = {"torch": torch.__version__}
        join(job)
        self._ranks = job.world

    def exchange(self, sizes: list[int], ids: np.ndarray, rows: np.ndarray, gradients: np.ndarray) -> int:
        asked = self._asked(sizes)
        found = read(self._all_to_all(ids, sizes, asked))
        found += read(self._all_to_all(rows, asked, sizes))
        return found + read(self._all_to_all(gradients, sizes, asked))

    def _asked(self, sizes: list[int]) -> list[int]:
        came = torch.empty(self._ranks, dtype=torch.int64)
        dist.all_to_all_single(came, torch.tensor(sizes))
        return came.tolist()

    def _all_to_all(self, sent: np.ndarray, sizes: list[int], expected: list[int]) -> np.ndarray:
        given = torch.from_numpy(sent)
        came = torch.empty(sum(expected), *given.shape[1:], dtype=given.dtype)
        dist.all_to_all_single(came, given, expected, sizes)
        return came.numpy()

    def close(self) -> None:
        dist.destroy_process_group()


class GlooExchangeOfKnownSizes(GlooExchange):
    """The same when sizes are known, which is the case where nothing is deduplicated: three all_to_all."""

    def _asked(self, sizes: list[int]) -> list[int]:
        return sizes
