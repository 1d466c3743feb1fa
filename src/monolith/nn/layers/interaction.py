"""Interactions between the features of an example: factorization machines, products of pairs, attention, CIN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_dims, require_positive, require_shape
from monolith.nn.kernels import dot_pairs, sum_pairs
from monolith.nn.layers.dense import Activation, Dense, make_activation
from monolith.nn.layers.mlp import MLP, MLPOptions

__all__ = ["AllInt", "AutoInt", "CDot", "CIN", "DotInteraction", "FFM", "FM"]


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

    x [B, n, k] -> [B, n (n - 1) / 2]. With `dense` [B, k], the output of DLRM's bottom MLP, as one more feature, before the
    others, and once more before the products, as the top MLP expects: -> [B, k + n (n + 1) / 2]. No parameters.

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

    - "dot":      y_lr = left_l · right_r, [B, L * R]
    - "multiply": y_lr = left_l ∘ right_r, [B, L * R, k], with attention times MLP(y_lr), one number per pair.

    Args:
        interaction_type: "multiply" or "dot".
        embed_dim: k, needed with attention only.
        attention_units: units of the attention's MLP, the last 1, or None for no attention. With "multiply" only.
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


class AllInt(nn.Module):
    """All pairs of features, compressed: y = x (xᵀ C + b), with C [n, c] and b [c]. x [B, n, k] -> [B, n, c].

    Each feature's inner products with all others are mixed down from n to c.

    Args:
        num_features: n.
        cmp_dim: c.
        use_bias: whether there is b.

    Example:
        >>> AllInt(num_features=6, cmp_dim=2)(torch.zeros(3, 6, 4)).shape
        torch.Size([3, 6, 2])
    """

    def __init__(self, num_features: int, cmp_dim: int, *, use_bias: bool = True) -> None:
        super().__init__()
        require_positive("AllInt.num_features", num_features)
        require_positive("AllInt.cmp_dim", cmp_dim)
        self.num_features = num_features
        self.compress = Dense(num_features, cmp_dim, bias=use_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, n, k] -> [B, n, c]."""
        require_shape("AllInt.x", x, "B", self.num_features, "k")
        return torch.matmul(x, self.compress(x.transpose(1, 2)))


class _ProjectedAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = Dense(embed_dim, embed_dim, bias=False)
        self.key = Dense(embed_dim, embed_dim, bias=False)
        self.value = Dense(embed_dim, embed_dim, bias=False)
        self.residual = Dense(embed_dim, embed_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            projection(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, scale=1.0).transpose(1, 2).flatten(2)
        return torch.relu(attended + self.residual(x))


class AutoInt(nn.Module):
    """Features attend to each other: x [B, n, k] -> [B, n, k]. Each layer is, for heads h of size k / num_heads,

    x <- relu(concat_h softmax(Q_h K_hᵀ) V_h + x W_res), with Q, K, V = x W_q, x W_k, x W_v.

    With projected=False a layer has no parameters: x <- softmax(x xᵀ) x, all the original has.

    Args:
        embed_dim: k.
        num_layers: how many times features attend.
        num_heads: a divisor of k.
        projected: whether to project.

    Example:
        >>> AutoInt(embed_dim=4, num_layers=2, num_heads=2)(torch.zeros(3, 6, 4)).shape
        torch.Size([3, 6, 4])
        >>> AutoInt(embed_dim=1, projected=False)(torch.tensor([[[0.0], [0.0]]])).tolist()
        [[[0.0], [0.0]]]
    """

    def __init__(self, embed_dim: int, num_layers: int = 1, *, num_heads: int = 1, projected: bool = True) -> None:
        super().__init__()
        require_positive("AutoInt.embed_dim", embed_dim)
        require_positive("AutoInt.num_layers", num_layers)
        require_positive("AutoInt.num_heads", num_heads)
        if embed_dim % num_heads or (num_heads > 1 and not projected):
            raise InvalidArgumentError(
                f"AutoInt.num_heads: expected a divisor of embed_dim {embed_dim}, 1 if not projected, got {num_heads}"
            )
        self.embed_dim, self.num_layers = embed_dim, num_layers
        self.attention = nn.ModuleList(
            _ProjectedAttention(embed_dim, num_heads) for _ in range(num_layers if projected else 0)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, n, k] -> [B, n, k]."""
        require_shape("AutoInt.x", x, "B", "n", self.embed_dim)
        if not self.attention:
            for _ in range(self.num_layers):
                x = F.scaled_dot_product_attention(x, x, x, scale=1.0)
        for layer in self.attention:
            x = layer(x)
        return x


class CDot(nn.Module):
    """Compressed dot products: features against p learned mixtures of all features, themselves refined by an MLP.

    With p = xᵀ W, [B, k, p], and z = MLP(flatten(p)), [B, k * p], it is y = concat(flatten(x reshape(z)), z): x [B, n, k] ->
    [B, n * p + k * p].

    Args:
        num_features: n.
        embed_dim: k.
        project_dim: p.
        compress_units: hidden units of the MLP. Its last layer, k * p, is added.
        activation: of the MLP's hidden layers.
        options: of the MLP.

    Example:
        >>> CDot(num_features=6, embed_dim=4, project_dim=2, compress_units=[8])(torch.zeros(3, 6, 4)).shape
        torch.Size([3, 20])
    """

    def __init__(
        self,
        num_features: int,
        embed_dim: int,
        project_dim: int,
        compress_units: Sequence[int],
        *,
        activation: Activation = "relu",
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__()
        require_positive("CDot.num_features", num_features)
        require_positive("CDot.embed_dim", embed_dim)
        require_positive("CDot.project_dim", project_dim)
        self.num_features, self.embed_dim, self.project_dim = num_features, embed_dim, project_dim
        width = embed_dim * project_dim
        self.project = Dense(num_features, project_dim, bias=False)
        self.compress = MLP(width, [*compress_units, width], activations=activation, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, n, k] -> [B, n * p + k * p]."""
        require_shape("CDot.x", x, "B", self.num_features, self.embed_dim)
        mixtures = self.compress(self.project(x.transpose(1, 2)).flatten(1))
        products = torch.bmm(x, mixtures.unflatten(1, (self.embed_dim, self.project_dim)))
        return torch.cat([products.flatten(1), mixtures], dim=1)


class CIN(nn.Module):
    """Compressed interaction network, the crossing part of xDeepFM: x [B, n, k] -> [B, sum(hidden_units)].

    Starting from x_0 = x, layer l makes h_l new features of all products of its n_l features with the n first ones, embedding
    dimension by dimension: x_{l+1}[h] = act(sum_ij W_l[h, i, j] x_l[i] ∘ x_0[j] + b_l[h]). The output is, of all layers, the
    sum of each new feature over its dimensions.

    Args:
        num_features: n.
        hidden_units: h_1, h_2, ...
        activation: after all layers but the last.

    Example:
        >>> CIN(num_features=6, hidden_units=[5, 3])(torch.zeros(2, 6, 4)).shape
        torch.Size([2, 8])
    """

    def __init__(self, num_features: int, hidden_units: Sequence[int], *, activation: Activation = None) -> None:
        super().__init__()
        require_positive("CIN.num_features", num_features)
        require_dims("CIN.hidden_units", hidden_units)
        self.num_features = num_features
        widths = [num_features, *hidden_units[:-1]]
        self.compress = nn.ModuleList(
            Dense(width * num_features, units) for width, units in zip(widths, hidden_units, strict=True)
        )
        inner = [make_activation(activation, units) for units in hidden_units[:-1]]
        self.activations = nn.ModuleList([*inner, nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, n, k] -> [B, sum(hidden_units)]."""
        require_shape("CIN.x", x, "B", self.num_features, "k")
        first = hidden = x.transpose(1, 2)
        sums = []
        for compress, activation in zip(self.compress, self.activations, strict=True):
            products = (hidden.unsqueeze(3) * first.unsqueeze(2)).flatten(2)
            hidden = activation(compress(products))
            sums.append(hidden.sum(1))
        return torch.cat(sums, dim=1)
