"""Recurrent layers over the user's behaviours: attention inside the recurrence (AGRU, AUGRU) and the DIEN built of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_positive, require_shape
from monolith.nn.layers.activations import Activation, make_activation
from monolith.nn.layers.dense import Dense, Initializer
from monolith.nn.layers.masking import masked_softmax, step_mask

__all__ = ["AGRU", "AGRUCell", "AttentionType", "DIEN"]

AttentionType = Literal["GRU", "AGRU", "AUGRU"]


class AGRUCell(nn.Module):
    """One step of a gated recurrent unit that listens to an attention score a.

    r, u = sigmoid([x, h] W_g + b_g), c = act([x, r ∘ h] W_c + b_c), then with att_type

    - "GRU":   h' = (1 - u) ∘ h + u ∘ c (no attention);
    - "AGRU":  h' = (1 - a) h + a c;
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
        initializer: Initializer = nn.init.kaiming_normal_,
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
        """[B, in_features], [B, units], [B, 1] -> [B, units]; `attention` may be left out with "GRU"."""
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
        initializer: Initializer = nn.init.kaiming_uniform_,
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


def _states(
    step: Callable[[int, torch.Tensor], torch.Tensor], state: torch.Tensor, steps: int, valid: torch.Tensor | None
) -> torch.Tensor:
    """The state after each step, [B, T, units]; one that is not valid keeps the state."""
    states = []
    for t in range(steps):
        moved = step(t, state)
        state = moved if valid is None else torch.where(valid[:, t : t + 1], moved, state)
        states.append(state)
    return torch.stack(states, dim=1)
