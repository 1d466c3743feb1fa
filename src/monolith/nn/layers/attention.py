"""Attention of a candidate item over the user's behaviours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, get_args

import torch
from torch import nn

from monolith.nn.checks import require_choice, require_dims, require_number, require_positive, require_shape
from monolith.nn.layers.activations import Activation
from monolith.nn.layers.dense import Dense
from monolith.nn.layers.masking import masked_softmax, step_mask
from monolith.nn.layers.mlp import MLP, MLPOptions

__all__ = ["DIN", "DMRU2I"]

Pooling = Literal["sum", "none"]


class DIN(nn.Module):
    """Deep interest network: a_t = MLP([q, k_t, q - k_t, q ∘ k_t]), y = sum_t a_t k_t. No softmax: strength of interest counts.

    queries [B, k], keys [B, T, k], mask [B, T] -> [B, k]; with mode "none" the products a_t k_t themselves, [B, T, k].

    Args:
        embed_dim: k.
        hidden_units: units of the MLP, the last 1.
        activation: of its hidden layers.
        mode: "sum" or "none".
        decay: divide a_t by sqrt(k).
        options: of the MLP.

    Example:
        >>> din = DIN(embed_dim=4, hidden_units=[8, 1])
        >>> mask = torch.tensor([[True, True, False], [False, False, False]])
        >>> y = din(torch.ones(2, 4), torch.ones(2, 3, 4), mask)
        >>> y.shape, y[1].tolist()
        (torch.Size([2, 4]), [0.0, 0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_units: Sequence[int],
        *,
        activation: Activation = "relu",
        mode: Pooling = "sum",
        decay: bool = False,
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__()
        require_positive("DIN.embed_dim", embed_dim)
        require_dims("DIN.hidden_units", hidden_units, last=1)
        require_choice("DIN.mode", mode, get_args(Pooling))
        self.embed_dim, self.mode, self.decay = embed_dim, mode, decay
        self.attention = MLP(4 * embed_dim, hidden_units, activations=activation, **options)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """[B, k], [B, T, k], [B, T] -> [B, k], or [B, T, k] with mode "none"."""
        require_shape("DIN.queries", queries, "B", self.embed_dim)
        require_shape("DIN.keys", keys, "B", "T", self.embed_dim)
        query = queries.unsqueeze(1).expand_as(keys)
        scores = self.attention(torch.cat([query, keys, query - keys, query * keys], dim=2))
        if self.decay:
            scores = scores / self.embed_dim**0.5
        if mask is not None:
            scores = scores.masked_fill(~step_mask("DIN.mask", mask, keys).unsqueeze(2), 0.0)
        weighted: torch.Tensor = scores * keys
        return weighted.sum(1) if self.mode == "sum" else weighted


class DMRU2I(nn.Module):
    """Deep match to rank, user to item: the behaviours, weighed by position and content, matched with the item.

    a = softmax_t((p_t + seq_t W + b) z), y = dense(sum_t a_t seq_t) ∘ item, with learned positions p [max_length, c] and z [c].
    item [B, i], sequence [B, T, s], mask [B, T] -> [B, i], T at most max_length. A row without steps has the sum 0.

    Args:
        item_dim: i.
        seq_dim: s.
        max_length: the most steps a sequence may have.
        cmp_dim: c.
        activation: of the dense layer.

    Example:
        >>> dmr = DMRU2I(item_dim=4, seq_dim=6, max_length=10, cmp_dim=3)
        >>> dmr(torch.ones(2, 4), torch.ones(2, 5, 6)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self, item_dim: int, seq_dim: int, max_length: int, cmp_dim: int, *, activation: Activation = "prelu"
    ) -> None:
        super().__init__()
        require_positive("DMRU2I.item_dim", item_dim)
        require_positive("DMRU2I.seq_dim", seq_dim)
        require_positive("DMRU2I.max_length", max_length)
        require_positive("DMRU2I.cmp_dim", cmp_dim)
        self.item_dim, self.seq_dim, self.max_length = item_dim, seq_dim, max_length
        self.position = nn.Parameter(nn.init.xavier_uniform_(torch.empty(max_length, cmp_dim)))
        self.content = Dense(seq_dim, cmp_dim)
        self.score = nn.Parameter(torch.ones(cmp_dim))
        self.match = Dense(seq_dim, item_dim, activation=activation)

    def forward(self, item: torch.Tensor, sequence: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """[B, i], [B, T, s], [B, T] -> [B, i]."""
        require_shape("DMRU2I.item", item, "B", self.item_dim)
        require_shape("DMRU2I.sequence", sequence, "B", "T", self.seq_dim)
        steps = sequence.shape[1]
        most = self.max_length
        require_number("DMRU2I.sequence", steps, f"at most max_length={most} steps", holds=steps <= most)
        valid = None if mask is None else step_mask("DMRU2I.mask", mask, sequence)
        scores = (self.position[:steps] + self.content(sequence)) @ self.score
        weights = masked_softmax(scores, valid)
        summary = torch.bmm(weights.unsqueeze(1), sequence).squeeze(1)
        matched: torch.Tensor = self.match(summary) * item
        return matched
