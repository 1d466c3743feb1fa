"""The dense part of the DeepFM of all sides that use PyTorch, with the same weights for the same seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DIM = 16
ROW_RATE, DENSE_RATE = 0.05, 0.001


class DeepFMTop(nn.Module):
    """First-order weights, the products of all pairs of embeddings, and an MLP."""

    def __init__(self, columns: int, numbers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(numbers, 1) if numbers else None
        width = columns * DIM + numbers
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, vectors: Tensor, first_order: Tensor, numbers: Tensor) -> Tensor:
        """[B, columns, DIM], [B, columns], [B, numbers] -> [B]."""
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        deep = self.mlp(torch.cat([vectors.flatten(1), numbers], dim=1)).squeeze(1)
        logits: Tensor = first_order.sum(1) + pairs + deep
        if self.linear is not None:
            logits = logits + self.linear(numbers).squeeze(1)
        return logits
