"""The models of the end-to-end benchmark without their embeddings, and its sizes. All sides share them, including the weights.

The products of pairs of embeddings are a module that each side supplies: torch's operators, as in the papers, or a layer.

Needs only PyTorch, because it is imported in the environment of every peer. So it is not `monolith.models`, whose models bring
their embeddings.
"""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

BATCH, DIM, FIELDS = 2048, 16, 26
GROUP = 32 * BATCH  # rows of a Parquet row group
NUMBERS = [f"I{i}" for i in range(1, 14)]
IDS = [f"C{c}" for c in range(1, FIELDS + 1)]
ROWS = [f"R{c}" for c in range(1, FIELDS + 1)]  # the same ids as row numbers, for peers that are spared the mapping

DATA_FILE = "examples.parquet"
IDS_FILE = "ids.npy"  # every id, in row order

LEARNING_RATE = 0.01
INITIAL_ACCUMULATOR = 0.1
INITIAL_WEIGHT = 0.01  # of all embeddings: the sides must start alike to be compared

MODELS = ("deepfm", "dlrm")
TOWERS = {
    # Of the papers: Guo et al. 2017 for DeepFM; Naumov et al. 2019, as its repository trains Criteo Kaggle, for DLRM.
    "published": {"deepfm": (400, 400, 400), "dlrm": ((512, 256, 64), (512, 256))},
    "small": {"deepfm": (64, 32), "dlrm": ((64, 32), (64, 32))},
}


def tower(width: int, *dims: int) -> nn.Sequential:
    """Linear layers with relu between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((width, *dims)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class TorchFM(nn.Module):
    """[B, n, k] -> [B, 1]: the sum of the products of all pairs."""

    def forward(self, vectors: Tensor) -> Tensor:
        return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)


class TorchDots(nn.Module):
    """[B, n, k] and the dense vectors, [B, k] -> [B, k + n (n + 1) / 2]: those, and the products of all pairs."""

    below: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(n + 1, n + 1, offset=-1)
        self.register_buffer("below", rows * (n + 1) + columns)

    def forward(self, vectors: Tensor, dense: Tensor) -> Tensor:
        every = torch.cat([dense.unsqueeze(1), vectors], dim=1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1).index_select(1, self.below)
        return torch.cat([dense, products], dim=1)


class DeepFM(nn.Module):
    """First-order weights + all pairs of embeddings + an MLP of everything."""

    has_first_order = True

    def __init__(self, towers: str, pairs: nn.Module | None = None) -> None:
        super().__init__()
        self.pairs = pairs or TorchFM()
        self.linear = nn.Linear(len(NUMBERS), 1)
        self.deep = tower(len(NUMBERS) + FIELDS * DIM, *TOWERS[towers]["deepfm"], 1)

    def forward(self, numbers: Tensor, vectors: Tensor, first_order: Tensor) -> Tensor:
        """[B, 13], [B, 26, DIM], [B, 26, 1] -> [B]."""
        pairs = self.pairs(vectors).squeeze(1)
        deep = self.deep(torch.cat([numbers, vectors.flatten(1)], dim=1)).squeeze(1)
        return self.linear(numbers).squeeze(1) + first_order.sum(dim=(1, 2)) + pairs + deep


class DLRM(nn.Module):
    """An MLP of the numbers, its dot products with all embeddings and theirs with each other, an MLP of both."""

    has_first_order = False

    def __init__(self, towers: str, pairs: nn.Module | None = None) -> None:
        super().__init__()
        self.pairs = pairs or TorchDots(FIELDS)
        bottom, top = TOWERS[towers]["dlrm"]
        self.bottom = tower(len(NUMBERS), *bottom, DIM)
        self.top = tower(DIM + FIELDS * (FIELDS + 1) // 2, *top, 1)

    def forward(self, numbers: Tensor, vectors: Tensor, first_order: None = None) -> Tensor:
        """[B, 13], [B, 26, DIM] -> [B]."""
        return self.top(self.pairs(vectors, self.bottom(numbers).relu())).squeeze(1)


def dense_half(model: str, towers: str, pairs: nn.Module | None = None) -> DeepFM | DLRM:
    """The model without embeddings, with the same weights in every process."""
    torch.manual_seed(0)
    return (DeepFM if model == "deepfm" else DLRM)(towers, pairs)


def dense_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(
        module.parameters(), lr=LEARNING_RATE, initial_accumulator_value=INITIAL_ACCUMULATOR, fused=True
    )


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    # A sum: with a mean the first steps of an id would be too small to show in the losses that are compared.
    return binary_cross_entropy_with_logits(logits, labels, reduction="sum")


class DenseWork:
    """The dense part of a step alone, with given embeddings."""

    def __init__(self, half: DeepFM | DLRM, batch: int = BATCH) -> None:
        self._half = copy.deepcopy(half)
        self._optimizer = dense_optimizer(self._half)
        self._numbers, self._labels = torch.randn(batch, len(NUMBERS)), torch.ones(batch)
        self._vectors = torch.randn(batch, FIELDS, DIM).mul_(0.01).requires_grad_()
        first_order = torch.zeros(batch, FIELDS, 1).requires_grad_()
        self._first_order = first_order if self._half.has_first_order else None

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._vectors.grad = None
        loss_of(self._half(self._numbers, self._vectors, self._first_order), self._labels).backward()
        self._optimizer.step()
