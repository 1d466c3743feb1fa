"""Cross networks (`DCN`) and co-action (`CAN`): products of the input with itself, or with weights cut from an item."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import nn

from monolith.nn.checks import require_choice, require_number, require_positive, require_shape
from monolith.nn.layers.dense import Activation, Dense, WeightNorm, make_activation

__all__ = ["CAN", "DCN"]

CrossType = Literal["vector", "matrix", "mixed"]


class _VectorCross(nn.Module):
    def __init__(self, in_features: int, weight_norm: WeightNorm | None) -> None:
        super().__init__()
        self.projection = Dense(in_features, 1, bias=False, weight_norm=weight_norm)
        self.bias = nn.Parameter(torch.zeros(in_features))

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x0 * self.projection(x) + self.bias + x
        return y


class _MatrixCross(nn.Module):
    def __init__(self, in_features: int, weight_norm: WeightNorm | None) -> None:
        super().__init__()
        self.projection = Dense(in_features, in_features, weight_norm=weight_norm)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x0 * self.projection(x) + x
        return y


class _MixedCross(nn.Module):
    def __init__(self, in_features: int, low_rank: int, num_experts: int, weight_norm: WeightNorm | None) -> None:
        super().__init__()

        def dense(width: int, units: int, activation: str | None) -> Dense:
            return Dense(width, units, activation=activation, bias=False, weight_norm=weight_norm)

        self.experts = nn.ModuleList(
            nn.Sequential(
                dense(in_features, low_rank, "tanh"),
                dense(low_rank, low_rank, "tanh"),
                dense(low_rank, in_features, None),
            )
            for _ in range(num_experts)
        )
        self.gate = Dense(in_features, num_experts, activation="softmax", bias=False)
        self.bias = nn.Parameter(torch.zeros(in_features))

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x)
        mixture = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mixture = mixture + gates[..., index : index + 1] * (expert(x) + self.bias)
        return x0 * mixture + x


class DCN(nn.Module):
    """Deep & cross network, the crossing part: x [B, d] -> [B, d]. Starting from x_0 = x, each layer l is

    - "vector" (DCN):        x_{l+1} = x_0 * (x_l w) + b + x_l, with w [d, 1]
    - "matrix" (DCN v2):     x_{l+1} = x_0 ∘ (x_l W + b) + x_l, with W [d, d]
    - "mixed"  (DCN v2 mix): x_{l+1} = x_0 ∘ sum_e g_e (tanh(tanh(x_l V_e) C_e) U_eᵀ + b) + x_l, with V_e, U_e [d, low_rank],
      C_e [low_rank, low_rank] and g = softmax(x_l G) over the experts.

    Args:
        in_features: d.
        num_layers: number of crosses. The result has products of up to num_layers + 1 inputs.
        dcn_type: "vector", "matrix" or "mixed".
        num_experts: of "mixed".
        low_rank: of "mixed".
        weight_norm: of the crosses' weights, see `Dense`.
        dropout: share of units set to zero after each layer in training.

    Example:
        >>> dcn = DCN(3, num_layers=2, dcn_type="mixed", num_experts=4, low_rank=2)
        >>> dcn(torch.ones(5, 3)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int = 1,
        *,
        dcn_type: CrossType = "matrix",
        num_experts: int = 1,
        low_rank: int = 0,
        weight_norm: WeightNorm | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_positive("DCN.in_features", in_features)
        require_positive("DCN.num_layers", num_layers)
        require_choice("DCN.dcn_type", dcn_type, get_args(CrossType))
        require_number("DCN.dropout", dropout, "a number in [0, 1)", holds=0 <= dropout < 1)
        if dcn_type == "mixed":
            require_positive("DCN.num_experts", num_experts)
            require_positive("DCN.low_rank", low_rank)
        self.in_features = in_features

        def cross() -> nn.Module:
            if dcn_type == "mixed":
                return _MixedCross(in_features, low_rank, num_experts, weight_norm)
            return (_VectorCross if dcn_type == "vector" else _MatrixCross)(in_features, weight_norm)

        self.crosses = nn.ModuleList(cross() for _ in range(num_layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, d] -> [B, d]."""
        require_shape("DCN.x", x, "*", self.in_features)
        crossed = x
        for cross in self.crosses:
            crossed = self.dropout(cross(x, crossed))
        return crossed


class CAN(nn.Module):
    """user <- act(user W_l + b_l) for each layer l, with W_l [u, u] and b_l [u] cut from the example's own item embedding.

    user [B, *, u], item [B, (u² + u) * num_layers] -> [B, *, u]. With is_seq the dimension before the last is a sequence, whose
    results are summed: [B, *, T, u] -> [B, *, u]. The item vector holds, layer after layer, W row by row, then b.

    Args:
        user_dim: u.
        num_layers: layers cut from the item embedding.
        activation: after each layer.
        is_seq: whether user is a sequence.

    Example:
        >>> can = CAN(user_dim=4, num_layers=2)
        >>> can.item_dim
        40
        >>> can(torch.zeros(3, 5, 4), torch.zeros(3, can.item_dim)).shape
        torch.Size([3, 5, 4])
    """

    def __init__(
        self, user_dim: int, num_layers: int = 2, *, activation: Activation = "relu", is_seq: bool = False
    ) -> None:
        super().__init__()
        require_positive("CAN.user_dim", user_dim)
        require_positive("CAN.num_layers", num_layers)
        self.user_dim, self.num_layers, self.is_seq = user_dim, num_layers, is_seq
        self.activations = nn.ModuleList(make_activation(activation, user_dim) for _ in range(num_layers))

    @property
    def item_dim(self) -> int:
        """Size the item embedding must have: (u² + u) * num_layers."""
        return (self.user_dim**2 + self.user_dim) * self.num_layers

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """[B, *, u], [B, (u² + u) * num_layers] -> [B, *, u], or [B, *, T, u] -> [B, *, u] if is_seq."""
        require_shape("CAN.user", user, "*", *(("B", "T") if self.is_seq else ("B",)), self.user_dim)
        require_shape("CAN.item", item, "B", self.item_dim)
        size = self.user_dim
        hidden = user.flatten(1, -2) if user.ndim > 2 else user.unsqueeze(1)
        for cut, activation in zip(item.chunk(self.num_layers, dim=1), self.activations, strict=True):
            weight = cut[:, : size * size].reshape(-1, size, size)
            hidden = activation(torch.bmm(hidden, weight) + cut[:, size * size :].unsqueeze(1))
        hidden = hidden.reshape(user.shape)
        return hidden.sum(-2) if self.is_seq else hidden
