"""Factorization machines: products of pairs of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, get_args

import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_dims, require_positive, require_shape
from monolith.nn.layers.activations import Activation
from monolith.nn.layers.mlp import MLP, MLPOptions
from monolith.nn.layers.pairs import dot_pairs, sum_pairs

__all__ = ["DotInteraction", "FFM", "FM"]

Interaction = Literal["multiply", "dot"]


class FM(nn.Module):
    """All pairs of features at the cost of one sum: y = sum_{i<j} x_i · x_j = ½ sum_k ((sum_i x_ik)² - sum_i x_ik²).

    x [B, n, k] -> [B, 1]. No parameters: the first-order term is the sum of the features' biases.

    Example:
        >>> FM()(torch.tensor([[[1.0, 0.0], [2.0, 1.0], [3.0, 1.0]]])).tolist()
        [[12.0]]
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, n, k] -> [B, 1]."""
        require_shape("FM.x", x, "B", "n", "k")
        return sum_pairs(x)


class DotInteraction(nn.Module):
    """The products of all pairs of features: y_ij = x_i · x_j for i = 1, 2, ... and each j < i.

    x [B, n, k] -> [B, n (n - 1) / 2]. With `dense` [B, k], the output of DLRM's bottom MLP, as one feature more, before the
    others, and once more before the products, as the top MLP wants it: -> [B, k + n (n + 1) / 2]. No parameters.

    Example:
        >>> x = torch.tensor([[[2.0, 1.0], [3.0, 1.0]]])
        >>> DotInteraction()(x).tolist()
        [[7.0]]
        >>> DotInteraction()(x, torch.tensor([[1.0, 0.0]])).tolist()
        [[1.0, 0.0, 2.0, 3.0, 7.0]]
    """

    def forward(self, x: torch.Tensor, dense: torch.Tensor | None = None) -> torch.Tensor:
        """[B, n, k] -> [B, n (n - 1) / 2], or with [B, k] -> [B, k + n (n + 1) / 2]."""
        require_shape("DotInteraction.x", x, "B", "n", "k")
        if dense is not None:
            require_shape("DotInteraction.dense", dense, x.shape[0], x.shape[2])
        return dot_pairs(x, dense)


class FFM(nn.Module):
    """Field-aware pairs (the original's GroupInt): every left embedding with every right one, left index first.

    left [B, L, k], right [B, R, k] ->

    - "dot":      y_lr = left_l · right_r, [B, L * R];
    - "multiply": y_lr = left_l ∘ right_r, [B, L * R, k], with attention times MLP(y_lr), one number per pair.

    Args:
        interaction_type: "multiply" or "dot".
        embed_dim: k, needed with attention only.
        attention_units: units of the attention's MLP, the last 1; None for no attention. With "multiply" only.
        activation: of the attention's hidden layers.
        options: of the attention's MLP.

    Example:
        >>> left = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
        >>> right = torch.tensor([[[1.0, 1.0]]])
        >>> FFM(interaction_type="dot")(left, right).tolist()
        [[3.0, 7.0]]
        >>> FFM()(left, right).tolist()
        [[[1.0, 2.0], [3.0, 4.0]]]
    """

    def __init__(
        self,
        *,
        interaction_type: Interaction = "multiply",
        embed_dim: int | None = None,
        attention_units: Sequence[int] | None = None,
        activation: Activation = "relu",
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__()
        require_choice("FFM.interaction_type", interaction_type, get_args(Interaction))
        self.interaction_type = interaction_type
        self.attention: MLP | None = None
        if attention_units is not None:
            if interaction_type == "dot" or embed_dim is None:
                raise InvalidArgumentError(
                    "FFM.attention_units: needs interaction_type 'multiply' and embed_dim, "
                    f"got {interaction_type!r} and {embed_dim!r}"
                )
            require_positive("FFM.embed_dim", embed_dim)
            require_dims("FFM.attention_units", attention_units, last=1)
            self.attention = MLP(embed_dim, attention_units, activations=activation, **options)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """[B, L, k], [B, R, k] -> [B, L * R] or [B, L * R, k]."""
        require_shape("FFM.left", left, "B", "L", "k")
        require_shape("FFM.right", right, "B", "R", left.shape[2])
        if self.interaction_type == "dot":
            return torch.bmm(left, right.transpose(1, 2)).flatten(1)
        pairs = (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1, 2)
        return pairs if self.attention is None else pairs * self.attention(pairs)
