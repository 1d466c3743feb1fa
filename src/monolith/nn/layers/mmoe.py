"""Multi-gate mixture of experts: tasks share experts, each with a gate of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_number, require_positive, require_shape
from monolith.nn.layers.activations import Activation
from monolith.nn.layers.mlp import MLP, MLPOptions

__all__ = ["GateType", "MMoE"]

GateType = Literal["softmax", "topk", "noise_topk"]


class MMoE(nn.Module):
    """y_t = sum_e g_te expert_e(x), with gates g_t = softmax(u W_t) over the experts, one gate per task.

    x [B, in_features], u [B, gate_features] -> a tuple of num_tasks tensors [B, d], d the experts' common last size. W starts at
    zero: at first each task takes the mean of all experts. Gate types:

    - "softmax":    all experts;
    - "topk":       only gates at least as large as the k-th largest, divided by their sum;
    - "noise_topk": the same on softmax(u W_t + ε softplus(u N_t)) with ε ~ N(0, 1) in training, without noise otherwise.

    With the last two, `auxiliary_loss` keeps experts equally busy: balance_weight * sum_t var_e(I_te) / mean_e(I_te)², where the
    importance I_te is the sum of g_te over the last batch of training. Add `monolith.nn.auxiliary_loss(model)` to the loss.

    Args:
        in_features: size of x.
        num_tasks: number of outputs.
        expert_output_dims: units of the layers of each expert, a list of lists; or one list for all, with num_experts.
        gate_features: size of u; None if x gates itself.
        num_experts: how many experts, if expert_output_dims does not say.
        expert_activations: of the experts, as in `MLP`.
        gate_type: "softmax", "topk" or "noise_topk".
        top_k: experts per example and task.
        balance_weight: factor of the auxiliary loss.
        options: of the experts, see `MLP`.

    Example:
        >>> mmoe = MMoE(8, num_tasks=2, expert_output_dims=[16, 4], num_experts=3)
        >>> click, buy = mmoe(torch.zeros(5, 8))
        >>> click.shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        in_features: int,
        num_tasks: int,
        expert_output_dims: Sequence[int] | Sequence[Sequence[int]],
        *,
        gate_features: int | None = None,
        num_experts: int | None = None,
        expert_activations: Activation | Sequence[Activation] = None,
        gate_type: GateType = "softmax",
        top_k: int = 1,
        balance_weight: float = 1.0,
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__()
        require_positive("MMoE.in_features", in_features)
        require_positive("MMoE.num_tasks", num_tasks)
        require_choice("MMoE.gate_type", gate_type, get_args(GateType))
        experts = _expert_dims(expert_output_dims, num_experts)
        if gate_type != "softmax":
            require_number(
                "MMoE.top_k",
                top_k,
                f"an int from 1 to the number of experts, {len(experts)}",
                holds=1 <= top_k <= len(experts),
            )
        self.gate_features = in_features if gate_features is None else gate_features
        require_positive("MMoE.gate_features", self.gate_features)
        self.num_tasks, self.gate_type, self.top_k, self.balance_weight = num_tasks, gate_type, top_k, balance_weight
        self.experts = nn.ModuleList(
            MLP(in_features, dims, activations=expert_activations, **options) for dims in experts
        )
        gates = (self.gate_features, num_tasks * len(experts))
        self.gate_weight = nn.Parameter(torch.zeros(gates))
        self.noise_weight = nn.Parameter(torch.zeros(gates)) if gate_type == "noise_topk" else None
        self._importance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, u: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """[B, in_features], [B, gate_features] -> num_tasks tensors [B, d]; without u, x gates itself."""
        gates = self.gates(x if u is None else u)
        if self.gate_type != "softmax" and self.training:
            self._importance = gates.sum(0)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        return torch.bmm(gates.to(experts.dtype), experts).unbind(1)

    def gates(self, u: torch.Tensor) -> torch.Tensor:
        """The share of each expert in each task, [B, gate_features] -> [B, num_tasks, num_experts]."""
        require_shape("MMoE.u", u, "B", self.gate_features)
        # Full precision: rounding in bfloat16 would choose other experts.
        with torch.autocast(u.device.type, enabled=False):
            u = u.to(self.gate_weight.dtype)
            logits = u @ self.gate_weight
            if self.noise_weight is not None and self.training:
                logits = logits + torch.randn_like(logits) * F.softplus(u @ self.noise_weight)
        gates = torch.softmax(logits.reshape(-1, self.num_tasks, len(self.experts)), dim=2)
        if self.gate_type == "softmax":
            return gates
        smallest = gates.topk(self.top_k, dim=2).values[..., -1:]
        kept = gates.masked_fill(gates < smallest, 0.0)
        return kept / kept.sum(2, keepdim=True)

    def auxiliary_loss(self) -> torch.Tensor:
        """How unevenly the experts were used in the last batch of training, a scalar; 0 with softmax gates."""
        if self._importance is None:
            return self.gate_weight.new_zeros(())
        importance = self._importance
        spread = importance.var(1, correction=0) / importance.mean(1).square()
        return self.balance_weight * spread.sum()

    def __getstate__(self) -> dict[str, Any]:
        # The last batch's importance belongs to its autograd graph, which can be neither copied nor pickled.
        return {**self.__dict__, "_importance": None}


def _expert_dims(dims: Sequence[int] | Sequence[Sequence[int]], num_experts: int | None) -> Sequence[Sequence[int]]:
    where = "MMoE.expert_output_dims"
    own = [expert for expert in dims if not isinstance(expert, int)]
    if not own:
        if num_experts is None:
            raise InvalidArgumentError(f"MMoE.num_experts: needed when {where} is one list for all experts, got None")
        require_positive("MMoE.num_experts", num_experts)
        return [[size for size in dims if isinstance(size, int)]] * num_experts
    if len(own) != len(dims) or (num_experts is not None and num_experts != len(own)):
        raise InvalidArgumentError(
            f"{where}: expected a list of ints for each of {num_experts or len(dims)} experts, got {dims!r}"
        )
    if len({expert[-1] if expert else None for expert in own}) != 1:
        raise InvalidArgumentError(f"{where}: expected the same last size for all experts, got {dims!r}")
    return own
