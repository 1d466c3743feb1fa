"""Gates that weigh features (`SENet`) or learn how many embedding dimensions each needs (`IRazor`, `MixedEmbedding`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_number, require_positive, require_shape
from monolith.nn.layers.dense import Dense
from monolith.nn.layers.mlp import MLP, MLPOptions

__all__ = ["IRazor", "MixedEmbedding", "SENet"]


class SENet(nn.Module):
    """Squeeze and excitation over features: y_i = w_i x_i, with w = MLP(s) and s_i the mean of x_i. x [B, n, k] -> [B, n, k].

    The MLP has cmp_dim relu units, then n sigmoid ones. Without cmp_dim, w = s.

    Args:
        num_features: n.
        cmp_dim: hidden units, or None for no MLP.
        options: of the MLP.

    Example:
        >>> SENet(num_features=2)(torch.tensor([[[1.0, 3.0], [0.0, 0.0]]])).tolist()
        [[[2.0, 6.0], [0.0, 0.0]]]
        >>> SENet(num_features=2, cmp_dim=4)(torch.zeros(5, 2, 8)).shape
        torch.Size([5, 2, 8])
    """

    def __init__(self, num_features: int, cmp_dim: int | None = None, **options: Unpack[MLPOptions]) -> None:
        super().__init__()
        require_positive("SENet.num_features", num_features)
        self.num_features = num_features
        self.excitation: nn.Module = nn.Identity()
        if cmp_dim is not None:
            require_positive("SENet.cmp_dim", cmp_dim)
            self.excitation = MLP(num_features, [cmp_dim, num_features], activations=["relu", "sigmoid"], **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, n, k] -> [B, n, k]."""
        require_shape("SENet.x", x, "B", self.num_features, "k")
        weights: torch.Tensor = self.excitation(x.mean(2))
        return x * weights.unsqueeze(2)


class IRazor(nn.Module):
    """A soft choice of each feature's embedding size (i-Razor): y = x ∘ mask, x [B, n, k] -> [B, n, k].

    `nas_space` (0 = s_0 < s_1 < ... < s_m = k) cuts the dimensions into groups, group i being s_{i-1} .. s_i. For each feature
    p = softmax(logits / temperature) over the groups 0 .. m. Dimensions of group i are multiplied by p_i, and p_0 is the weight
    of having no dimension at all. A low temperature makes p nearly one-hot.

    Args:
        num_features: n.
        nas_space: the cuts, from 0 to k.
        temperature: of the softmax.
        feature_weight: cost of one dimension of each feature, [n]. The auxiliary loss is sum_f feature_weight_f * sum_d
            mask_fd, and 0 if None. Add `monolith.nn.auxiliary_loss(model)` to the loss.

    Example:
        >>> razor = IRazor(num_features=3, nas_space=[0, 2, 4], feature_weight=[1.0, 1.0, 1.0])
        >>> razor(torch.ones(1, 3, 4))[0, 0].detach()
        tensor([0.3333, 0.3333, 0.3333, 0.3333])
        >>> round(razor.auxiliary_loss().item(), 4)
        4.0
    """

    feature_weight: torch.Tensor | None
    group: torch.Tensor

    def __init__(
        self,
        num_features: int,
        nas_space: Sequence[int],
        *,
        temperature: float = 0.05,
        feature_weight: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        require_positive("IRazor.num_features", num_features)
        require_number("IRazor.temperature", temperature, "a number > 0", holds=temperature > 0)
        cuts = list(nas_space)
        if len(cuts) < 2 or cuts[0] != 0 or sorted(set(cuts)) != cuts:
            raise InvalidArgumentError(
                f"IRazor.nas_space: expected ascending sizes from 0 to the embedding's, as [0, 4, 8], got {cuts}"
            )
        if feature_weight is not None and len(feature_weight) != num_features:
            raise InvalidArgumentError(
                f"IRazor.feature_weight: expected one number for each of {num_features} features, got {len(feature_weight)}"
            )
        self.num_features, self.embed_dim, self.temperature = num_features, cuts[-1], temperature
        self.logits = nn.Parameter(torch.zeros(num_features, len(cuts)))
        self.register_buffer(
            "group", torch.bucketize(torch.arange(cuts[-1]), torch.tensor(cuts), right=True), persistent=False
        )
        weight = None if feature_weight is None else torch.tensor(feature_weight, dtype=torch.get_default_dtype())
        self.register_buffer("feature_weight", weight, persistent=False)

    def mask(self) -> torch.Tensor:
        """Return what each dimension of each feature is multiplied by, [n, k]."""
        return torch.softmax(self.logits / self.temperature, dim=1).index_select(1, self.group)

    def auxiliary_loss(self) -> torch.Tensor:
        """Return the cost of the dimensions in use, a scalar."""
        if self.feature_weight is None:
            return self.logits.new_zeros(())
        return self.feature_weight @ self.mask().sum(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, n, k] -> [B, n, k]."""
        require_shape("IRazor.x", x, "B", self.num_features, self.embed_dim)
        return x * self.mask()


class MixedEmbedding(nn.Module):
    """One of several embedding sizes: y = sum_c w_c x_c W_c, x [B, sum(sizes)] -> [B, out_features].

    x is cut into one part x_c per size. w is one-hot: in training drawn from p = softmax(logits), once per call, otherwise the
    likeliest. Its gradient is that of p (straight-through). For the first pretraining_steps calls in training p is uniform, so
    that every size is trained before sizes compete. For the first warmup_steps calls size 0, no embedding, is never chosen.

    Args:
        sizes: different sizes to choose from, 0 included.
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
        """Return how likely each size is to be drawn at this point of training, [len(sizes)]."""
        logits = torch.where(self.calls < self.pretraining_steps, 0.0, self.logits)
        suppressed = self.empty & (self.calls < self.warmup_steps)
        return torch.softmax(logits.masked_fill(suppressed, torch.finfo(logits.dtype).min), dim=0)

    def size(self) -> int:
        """Return the likeliest size."""
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
