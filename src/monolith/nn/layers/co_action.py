"""Co-action network: the item's embedding is the weights of a small MLP that the user's embedding goes through."""

from __future__ import annotations

import torch
from torch import nn

from monolith.nn.checks import require_positive, require_shape
from monolith.nn.layers.activations import Activation, make_activation

__all__ = ["CAN"]


class CAN(nn.Module):
    """user <- act(user W_l + b_l) for each layer l, with W_l [u, u] and b_l [u] cut from the example's own item embedding.

    user [B, *, u], item [B, (u² + u) * num_layers] -> [B, *, u]; with is_seq the dimension before the last is a sequence, whose
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
