"""Sequences of behaviours: pooling, masks, attention of a candidate item, and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.features.ragged import Ragged
from monolith.nn.checks import require_choice, require_dims, require_number, require_positive, require_shape
from monolith.nn.layers.dense import Activation, Dense, WeightInitializer, make_activation
from monolith.nn.layers.mlp import MLP, MLPOptions

__all__ = [
    "AGRU",
    "AGRUCell",
    "AvgPooling",
    "CausalAttention",
    "DIEN",
    "DIN",
    "DMRU2I",
    "MaxPooling",
    "SumPooling",
    "sequence_mask",
]


class SumPooling(nn.Module):
    """y = sum_i x_i, element by element: tensors [*] of one shape -> [*]. A single tensor is returned as it is.

    Example:
        >>> SumPooling()([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])]).tolist()
        [4.0, 6.0]
    """

    def forward(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors [*] -> [*]."""
        return xs[0] if _is_single("SumPooling.xs", xs) else torch.stack(tuple(xs)).sum(0)


class AvgPooling(nn.Module):
    """y = mean_i x_i, element by element: tensors [*] of one shape -> [*]. A single tensor is returned as it is.

    Example:
        >>> AvgPooling()([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])]).tolist()
        [2.0, 3.0]
    """

    def forward(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors [*] -> [*]."""
        return xs[0] if _is_single("AvgPooling.xs", xs) else torch.stack(tuple(xs)).mean(0)


class MaxPooling(nn.Module):
    """y = max_i x_i, element by element: tensors [*] of one shape -> [*]. A single tensor is returned as it is.

    Example:
        >>> MaxPooling()([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])]).tolist()
        [3.0, 5.0]
    """

    def forward(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors [*] -> [*]."""
        return xs[0] if _is_single("MaxPooling.xs", xs) else torch.stack(tuple(xs)).amax(0)


def _is_single(where: str, xs: Sequence[torch.Tensor]) -> bool:
    if not xs:
        raise InvalidArgumentError(f"{where}: expected at least one tensor, got none")
    for index, x in enumerate(xs[1:], start=1):
        if x.shape != xs[0].shape:
            raise InvalidArgumentError(
                f"{where}[{index}]: expected the shape of the first, {list(xs[0].shape)}, got {list(x.shape)}"
            )
    return len(xs) == 1


def sequence_mask(offsets: Ragged | torch.Tensor, max_length: int) -> torch.Tensor:
    """Return which steps of padded rows exist: bool [B, max_length], the first min(length, max_length) of each row true.

    `offsets` is the `Ragged` itself or its splits, integers [B + 1].

    Example:
        >>> sequence_mask(torch.tensor([0, 1, 1, 4]), 2).tolist()
        [[True, False], [False, False], [True, True]]
    """
    require_positive("sequence_mask.max_length", max_length)
    splits = offsets.offsets if isinstance(offsets, Ragged) else offsets
    require_shape("sequence_mask.offsets", splits, "B + 1")
    return torch.arange(max_length, device=splits.device) < splits.diff().unsqueeze(1)


def step_mask(where: str, mask: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Return the `mask` [B, T] of `sequence` [B, T, ...] as bool. Numbers of 1 and above are true.

    Example:
        >>> step_mask("DIN.mask", torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2, 3)).tolist()
        [[True, False]]
    """
    if mask.shape != sequence.shape[:2]:
        raise InvalidArgumentError(
            f"{where}: expected shape {list(sequence.shape[:2])}, one per step, got {list(mask.shape)}"
        )
    return mask if mask.dtype == torch.bool else mask >= 1


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax over the last dimension among the true entries of `mask`, 0 elsewhere and in rows without any.

    Example:
        >>> masked_softmax(torch.zeros(2, 2), torch.tensor([[True, False], [False, False]])).tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    # The smallest number, not -inf: a row without steps would be NaN.
    filled = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.softmax(filled, dim=-1) * mask


DINMode = Literal["sum", "none"]


class DIN(nn.Module):
    """Deep interest network: a_t = MLP([q, k_t, q - k_t, q ∘ k_t]), y = sum_t a_t k_t. No softmax: strength of interest counts.

    queries [B, k], keys [B, T, k], mask [B, T] -> [B, k]. With mode "none" the products a_t k_t themselves, [B, T, k].

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
        mode: DINMode = "sum",
        decay: bool = False,
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__()
        require_positive("DIN.embed_dim", embed_dim)
        require_dims("DIN.hidden_units", hidden_units, last=1)
        require_choice("DIN.mode", mode, get_args(DINMode))
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


AttentionType = Literal["GRU", "AGRU", "AUGRU"]


class AGRUCell(nn.Module):
    """One step of a gated recurrent unit with an attention score a.

    r, u = sigmoid([x, h] W_g + b_g), c = act([x, r ∘ h] W_c + b_c), then with att_type

    - "GRU":   h' = (1 - u) ∘ h + u ∘ c (no attention)
    - "AGRU":  h' = (1 - a) h + a c
    - "AUGRU": u' = (1 - a) u, h' = u' ∘ h + (1 - u') ∘ c.

    x [B, in_features], h [B, units], attention [B, 1] -> h' [B, units]. Biases start at 1.

    Args:
        in_features: size of x.
        units: size of h.
        att_type: "AGRU", "AUGRU" or "GRU".
        activation: of the candidate c.
        initializer: fills the weights in place.

    Example:
        >>> cell = AGRUCell(3, 2)
        >>> h = torch.tensor([[1.0, -1.0]])
        >>> cell(torch.zeros(1, 3), h, torch.zeros(1, 1)).tolist()
        [[1.0, -1.0]]
    """

    def __init__(
        self,
        in_features: int,
        units: int,
        *,
        att_type: AttentionType = "AGRU",
        activation: Activation = "tanh",
        initializer: WeightInitializer = nn.init.kaiming_normal_,
    ) -> None:
        super().__init__()
        require_positive("AGRUCell.in_features", in_features)
        require_positive("AGRUCell.units", units)
        require_choice("AGRUCell.att_type", att_type, get_args(AttentionType))
        self.in_features, self.units, self.att_type = in_features, units, att_type
        self.gates = Dense(in_features + units, 2 * units, activation="sigmoid", initializer=initializer)
        self.candidate = Dense(in_features + units, units, initializer=initializer)
        self.activation = make_activation(activation, units)
        for dense in (self.gates, self.candidate):
            nn.init.ones_(dense.get_parameter("bias"))

    def forward(self, x: torch.Tensor, h: torch.Tensor, attention: torch.Tensor | None = None) -> torch.Tensor:
        """[B, in_features], [B, units], [B, 1] -> [B, units]. "GRU" needs no `attention`."""
        require_shape("AGRUCell.x", x, "B", self.in_features)
        require_shape("AGRUCell.h", h, "B", self.units)
        gates: torch.Tensor = self.gates(torch.cat([x, h], dim=1))
        reset, update = gates.chunk(2, dim=1)
        candidate: torch.Tensor = self.activation(self.candidate(torch.cat([x, reset * h], dim=1)))
        if self.att_type == "GRU":
            return (1 - update) * h + update * candidate
        if attention is None:
            raise InvalidArgumentError(f"AGRUCell.attention: needed with att_type {self.att_type!r}, got None")
        require_shape("AGRUCell.attention", attention, "B", 1)
        if self.att_type == "AGRU":
            return (1 - attention) * h + attention * candidate
        update = (1 - attention) * update
        return update * h + (1 - update) * candidate


class AGRU(nn.Module):
    """`AGRUCell` along a sequence from a state of zeros: the state after every step.

    x [B, T, in_features], attention [B, T], mask [B, T] -> [B, T, units]. A step that the mask leaves out keeps the state, so
    the last one is always the final state of the row.

    Args:
        cell: the step.

    Example:
        >>> agru = AGRU(AGRUCell(3, 2))
        >>> states = agru(torch.ones(4, 5, 3), torch.ones(4, 5))
        >>> states.shape, states[:, -1].shape
        (torch.Size([4, 5, 2]), torch.Size([4, 2]))
    """

    def __init__(self, cell: AGRUCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(
        self, x: torch.Tensor, attention: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, T, in_features], [B, T], [B, T] -> [B, T, units]."""
        require_shape("AGRU.x", x, "B", "T", self.cell.in_features)
        require_positive("AGRU.x: steps", x.shape[1])
        valid = None if mask is None else step_mask("AGRU.mask", mask, x)

        def step(t: int, state: torch.Tensor) -> torch.Tensor:
            moved: torch.Tensor = self.cell(x[:, t], state, None if attention is None else attention[:, t : t + 1])
            return moved

        return _states(step, x.new_zeros(x.shape[0], self.cell.units), x.shape[1], valid)


class DIEN(nn.Module):
    """Deep interest evolution network: the user's interest as it moves towards the item.

    s = GRU(keys), a = softmax_t(s_t · (W q)), y = the final state of the attentive recurrence over s with a.
    queries [B, q], keys [B, T, k], mask [B, T] -> [B, num_units]. Steps the mask leaves out are skipped, wherever they are.

    Args:
        query_dim: q.
        key_dim: k.
        num_units: size of both recurrent states.
        att_type: "AGRU", "AUGRU" or "GRU", see `AGRUCell`.
        activation: of the attentive recurrence's candidate.
        initializer: fills the weights of W and of the attentive recurrence.

    Example:
        >>> dien = DIEN(query_dim=4, key_dim=6, num_units=5, att_type="AUGRU")
        >>> dien(torch.ones(2, 4), torch.ones(2, 3, 6)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        num_units: int,
        *,
        att_type: AttentionType = "AGRU",
        activation: Activation = "relu",
        initializer: WeightInitializer = nn.init.kaiming_uniform_,
    ) -> None:
        super().__init__()
        require_positive("DIEN.query_dim", query_dim)
        require_positive("DIEN.key_dim", key_dim)
        require_positive("DIEN.num_units", num_units)
        self.query_dim, self.key_dim = query_dim, key_dim
        self.interest = nn.GRUCell(key_dim, num_units)
        self.query = Dense(query_dim, num_units, bias=False, initializer=initializer)
        cell = AGRUCell(num_units, num_units, att_type=att_type, activation=activation, initializer=initializer)
        self.evolution = AGRU(cell)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """[B, q], [B, T, k], [B, T] -> [B, num_units]."""
        require_shape("DIEN.queries", queries, "B", self.query_dim)
        require_shape("DIEN.keys", keys, "B", "T", self.key_dim)
        require_positive("DIEN.keys: steps", keys.shape[1])
        valid = None if mask is None else step_mask("DIEN.mask", mask, keys)

        def step(t: int, state: torch.Tensor) -> torch.Tensor:
            moved: torch.Tensor = self.interest(keys[:, t], state)
            return moved

        interests = _states(step, keys.new_zeros(keys.shape[0], self.interest.hidden_size), keys.shape[1], valid)
        scores = torch.bmm(interests, self.query(queries).unsqueeze(2)).squeeze(2)
        states: torch.Tensor = self.evolution(interests, masked_softmax(scores, valid), valid)
        return states[:, -1]


class CausalAttention(nn.Module):
    """One block of a transformer along a sequence, in which a step sees itself and the steps before it.

    h = x + concat_h softmax(Q_h K_hᵀ / sqrt(k / num_heads) + M) V_h W_o with [Q, K, V] = norm(x) W + b and M = -inf above the
    diagonal, y = h + relu(norm(h) W_1 + b_1) W_2 + b_2. x [B, T, k] -> [B, T, k]. Later steps change no earlier one, so a
    sequence that is padded at its end needs no mask.

    Args:
        embed_dim: k.
        num_heads: a divisor of k.

    Example:
        >>> CausalAttention(4, num_heads=2)(torch.zeros(3, 5, 4)).shape
        torch.Size([3, 5, 4])
    """

    def __init__(self, embed_dim: int, *, num_heads: int = 1) -> None:
        super().__init__()
        require_positive("CausalAttention.embed_dim", embed_dim)
        require_positive("CausalAttention.num_heads", num_heads)
        fits = embed_dim % num_heads == 0
        require_number("CausalAttention.num_heads", num_heads, f"a divisor of embed_dim {embed_dim}", holds=fits)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)])
        self.project = Dense(embed_dim, 3 * embed_dim)
        self.combine = Dense(embed_dim, embed_dim, bias=False)
        self.mlp = nn.Sequential(Dense(embed_dim, embed_dim, activation="relu"), Dense(embed_dim, embed_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, k] -> [B, T, k]."""
        require_shape("CausalAttention.x", x, "B", "T", self.embed_dim)
        heads = self.project(self.norms[0](x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.combine(attended.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.mlp(self.norms[1](x))
        return y


def _states(
    step: Callable[[int, torch.Tensor], torch.Tensor], state: torch.Tensor, steps: int, valid: torch.Tensor | None
) -> torch.Tensor:
    """Return the state after each step, [B, T, units]. A step that is not valid keeps the state."""
    states = []
    for t in range(steps):
        moved = step(t, state)
        state = moved if valid is None else torch.where(valid[:, t : t + 1], moved, state)
        states.append(state)
    return torch.stack(states, dim=1)
