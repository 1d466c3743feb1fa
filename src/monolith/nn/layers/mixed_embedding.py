"""Searching a feature's embedding size by drawing one of several while training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_number, require_positive, require_shape
from monolith.nn.layers.dense import Dense

__all__ = ["MixedEmbedding"]


class MixedEmbedding(nn.Module):
    """One of several embedding sizes: y = sum_c w_c x_c W_c, x [B, sum(sizes)] -> [B, out_features].

    x is cut into one part x_c per size. w is one-hot: in training drawn from p = softmax(logits), once per call, otherwise the
    likeliest; its gradient is that of p (straight-through). For the first pretraining_steps calls in training p is uniform, so
    that every size is trained before sizes compete; for the first warmup_steps calls size 0, no embedding, is never chosen.

    Args:
        sizes: different sizes to choose from; 0 may be one of them.
        out_features: size of y, whatever the choice.
        pretraining_steps: calls before logits matter.
        warmup_steps: calls before size 0 can be chosen.

    Example:
        >>> mixed = MixedEmbedding([0, 2, 8], out_features=8, warmup_steps=1000)
        >>> mixed(torch.zeros(3, 10)).shape
        torch.Size([3, 8])
        >>> mixed.size() in (2, 8)
        True
    """

    calls: torch.Tensor
    empty: torch.Tensor

    def __init__(
        self, sizes: Sequence[int], out_features: int, *, pretraining_steps: int = 0, warmup_steps: int = 0
    ) -> None:
        super().__init__()
        if not sizes or len(set(sizes)) != len(sizes) or min(sizes) < 0 or max(sizes) == 0:
            raise InvalidArgumentError(
                f"MixedEmbedding.sizes: expected different sizes >= 0, one of them > 0, got {list(sizes)}"
            )
        require_positive("MixedEmbedding.out_features", out_features)
        for name, steps in (("pretraining_steps", pretraining_steps), ("warmup_steps", warmup_steps)):
            require_number(f"MixedEmbedding.{name}", steps, "an int >= 0", holds=steps >= 0)
        self.sizes, self.out_features = list(sizes), out_features
        self.pretraining_steps, self.warmup_steps = pretraining_steps, warmup_steps
        self.logits = nn.Parameter(torch.zeros(len(sizes)))
        self.projections = nn.ModuleList(Dense(size, out_features, bias=False) for size in sizes if size)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.tensor([size == 0 for size in sizes]), persistent=False)

    def probabilities(self) -> torch.Tensor:
        """How likely each size is to be drawn at this point of training, [len(sizes)]."""
        logits = torch.where(self.calls < self.pretraining_steps, 0.0, self.logits)
        suppressed = self.empty & (self.calls < self.warmup_steps)
        return torch.softmax(logits.masked_fill(suppressed, torch.finfo(logits.dtype).min), dim=0)

    def size(self) -> int:
        """The likeliest size."""
        return self.sizes[int(self.probabilities().argmax())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, sum(sizes)] -> [B, out_features]."""
        require_shape("MixedEmbedding.x", x, "B", sum(self.sizes))
        probabilities = self.probabilities()
        chosen = probabilities.multinomial(1)[0] if self.training else probabilities.argmax()
        weights = F.one_hot(chosen, len(self.sizes)) + (probabilities - probabilities.detach())
        filled = [
            (weight, part)
            for weight, part in zip(weights, torch.split(x, self.sizes, dim=1), strict=True)
            if part.shape[1]
        ]
        projected = [
            weight * projection(part) for (weight, part), projection in zip(filled, self.projections, strict=True)
        ]
        y = torch.stack(projected).sum(0)
        if self.training:
            self.calls.add_(1)
        return y
