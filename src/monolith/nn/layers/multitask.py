"""Layers of multi-task models: experts that tasks share, routes between sub-networks, relaxed choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_dims, require_number, require_positive, require_shape
from monolith.nn.layers.dense import Activation, Dense
from monolith.nn.layers.mlp import MLP, MLPOptions

__all__ = [
    "CGC",
    "MMoE",
    "SNR",
    "continuous_topk",
    "fid_counter",
    "gumbel_keys",
    "sample_subset",
]

GateType = Literal["softmax", "topk", "noise_topk"]


class MMoE(nn.Module):
    """y_t = sum_e g_te expert_e(x), with gates g_t = softmax(u W_t) over the experts, one gate per task.

    x [B, in_features], u [B, gate_features] -> a tuple of num_tasks tensors [B, d], d the experts' common last size. W starts at
    zero: at first each task takes the mean of all experts. Gate types:

    - "softmax":    all experts
    - "topk":       only gates at least as large as the k-th largest, divided by their sum
    - "noise_topk": the same on softmax(u W_t + ε softplus(u N_t)) with ε ~ N(0, 1) in training, without noise otherwise.

    With the last two, `auxiliary_loss` keeps experts equally busy: balance_weight * sum_t var_e(I_te) / mean_e(I_te)², where the
    importance I_te is the sum of g_te over the last batch of training. Add `monolith.nn.auxiliary_loss(model)` to the loss.

    Args:
        in_features: size of x.
        num_tasks: number of outputs.
        expert_output_dims: units of the layers of each expert, a list of lists, or one list for all, with num_experts.
        gate_features: size of u, or None if x gates itself.
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
        """[B, in_features], [B, gate_features] -> num_tasks tensors [B, d]. Without u, x gates itself."""
        gates = self.gates(x if u is None else u)
        if self.gate_type != "softmax" and self.training:
            self._importance = gates.sum(0)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        return torch.bmm(gates.to(experts.dtype), experts).unbind(1)

    def gates(self, u: torch.Tensor) -> torch.Tensor:
        """Return the share of each expert in each task, [B, gate_features] -> [B, num_tasks, num_experts]."""
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
        """Return how unevenly the experts were used in the last batch of training, a scalar, 0 with softmax gates."""
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


def gumbel_keys(w: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """w + Gumbel noise: the k largest are a sample without replacement of k, weighed by exp(w). [*] -> [*].

    Example:
        >>> gumbel_keys(torch.zeros(2, 3), generator=torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3])
    """
    uniform = torch.rand(w.shape, dtype=w.dtype, device=w.device, generator=generator)
    limits = torch.finfo(w.dtype)
    return w - torch.log(-torch.log(uniform.clamp(limits.tiny, 1 - limits.eps)))


def continuous_topk(w: torch.Tensor, k: int, t: float) -> torch.Tensor:
    """Return a relaxed k-hot vector of the k largest of the last dimension: k softmaxes, each damped where an earlier one
    chose.

    [*, n] -> [*, n], entries near 0 or 1 for a low temperature t, summing to k.

    Example:
        >>> continuous_topk(torch.tensor([1.0, 3.0, 2.0]), 2, 0.1).round().tolist()
        [0.0, 1.0, 1.0]
    """
    require_number("continuous_topk.k", k, f"an int from 1 to {w.shape[-1]}", holds=1 <= k <= w.shape[-1])
    require_number("continuous_topk.t", t, "a number > 0", holds=t > 0)
    chosen = torch.zeros_like(w)
    total = torch.zeros_like(w)
    for _ in range(k):
        w = w + torch.log((1 - chosen).clamp(min=torch.finfo(w.dtype).tiny))
        chosen = torch.softmax(w / t, dim=-1)
        total = total + chosen
    return total


def sample_subset(w: torch.Tensor, k: int, t: float = 0.1, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return a relaxed random subset of k, weighed by exp(w), differentiable in w: [*, n] -> [*, n], summing to k.

    Example:
        >>> subset = sample_subset(torch.zeros(4), 2, generator=torch.Generator().manual_seed(0))
        >>> round(subset.sum().item(), 4)
        2.0
    """
    return continuous_topk(gumbel_keys(w, generator=generator), k, t)


class CGC(nn.Module):
    """Customized gate control, one level of progressive layered extraction (PLE): experts of each task and shared experts.

    With inputs x_1 ... x_T of the tasks and x_0 of all, experts E(x) = relu(x W + b), and one gate per output,
    y_t = sum_e g_te e for the experts e of task t and the shared ones, g_t = softmax(x_t G_t), and
    y_0 = sum_e g_0e e for all experts, g_0 = softmax(x_0 G_0).

    T + 1 tensors [B, in_features], the shared one last -> as many [B, units]. G starts at zero: at first each output takes
    the mean of its experts.

    Args:
        in_features: size of each input.
        num_tasks: T.
        units: of each expert.
        num_experts: experts of each task, and shared ones.

    Example:
        >>> ys = CGC(4, num_tasks=2, units=3)([torch.zeros(5, 4)] * 3)
        >>> [y.shape for y in ys]
        [torch.Size([5, 3]), torch.Size([5, 3]), torch.Size([5, 3])]
    """

    def __init__(self, in_features: int, num_tasks: int, units: int, *, num_experts: int = 2) -> None:
        super().__init__()
        require_positive("CGC.in_features", in_features)
        require_positive("CGC.num_tasks", num_tasks)
        require_positive("CGC.units", units)
        require_positive("CGC.num_experts", num_experts)
        self.in_features, self.num_tasks, self.units = in_features, num_tasks, units
        # The experts of one input are one matrix: fewer and larger products.
        self.experts = nn.ModuleList(
            Dense(in_features, num_experts * units, activation="relu") for _ in range(num_tasks + 1)
        )
        groups = [2] * num_tasks + [num_tasks + 1]
        self.gates = nn.ModuleList(Dense(in_features, group * num_experts, bias=False) for group in groups)
        for gate in self.gates:
            nn.init.zeros_(gate.get_parameter("weight"))

    def forward(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """T + 1 tensors [B, in_features] -> T + 1 tensors [B, units]."""
        require_number("CGC.xs", len(xs), f"{self.num_tasks + 1} tensors", holds=len(xs) == self.num_tasks + 1)
        for index, x in enumerate(xs):
            require_shape(f"CGC.xs[{index}]", x, "B", self.in_features)
        made = [expert(x).unflatten(1, (-1, self.units)) for expert, x in zip(self.experts, xs, strict=True)]
        groups = [torch.cat([task, made[-1]], dim=1) for task in made[:-1]] + [torch.cat(made, dim=1)]
        weights = [gate(x).softmax(1).unsqueeze(1) for gate, x in zip(self.gates, xs, strict=True)]
        return [torch.bmm(w.to(g.dtype), g).squeeze(1) for w, g in zip(weights, groups, strict=True)]


class _FidCounter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, counter: torch.Tensor, threshold: float, step: float) -> torch.Tensor:
        ctx.grad = torch.where(counter < threshold, -step, 0.0).to(counter.dtype)  # type: ignore[attr-defined]
        return (counter + step).clamp(max=threshold)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.grad, None, None  # type: ignore[attr-defined]


def fid_counter(counter: torch.Tensor, threshold: float, step: float = 1.0) -> torch.Tensor:
    """Return how often an id has been seen, kept in its own embedding: min(counter + step, threshold), [*] -> [*].

    The gradient is -step whatever the gradient from above is, and 0 once counter has reached the threshold: a segment of
    dimension 1, initially zero, trained by SGD with learning rate 1, thus counts the occurrences of each id. The result must be
    part of the loss, if only with a factor of 0, for its gradient to be asked for.

    Example:
        >>> counter = torch.tensor([0.0, 9.0, 10.0], requires_grad=True)
        >>> value = fid_counter(counter, threshold=10.0)
        >>> value.tolist()
        [1.0, 10.0, 10.0]
        >>> (0 * value.sum()).backward()
        >>> counter.grad.tolist()
        [-1.0, -1.0, 0.0]
    """
    require_number("fid_counter.step", step, "a number > 0", holds=step > 0)
    value: torch.Tensor = _FidCounter.apply(counter, threshold, step)  # type: ignore[no-untyped-call]
    return value


RouteType = Literal["trans", "aver"]


class SNR(nn.Module):
    """y_o = sum_i z_io x_i W_io ("trans") or sum_i z_io x_i ("aver"): each route from i to o has a gate that can be exactly 0.

    num_in tensors [B, in_features[i]] -> a tuple of num_out_subnet tensors [B, out_subnet_dim]. Gates are hard-concrete: in
    training s = sigmoid((ln v - ln(1 - v) + log_alpha) / beta) with v ~ U(0, 1) drawn once per route and call, otherwise
    s = sigmoid(log_alpha). Then z = clip(s (zeta - gamma) + gamma, 0, 1). `auxiliary_loss` is the expected number of open
    routes, l0_weight * sum sigmoid(log_alpha - beta ln(-gamma / zeta)). Add `monolith.nn.auxiliary_loss(model)` to the loss.

    Args:
        in_features: sizes of the inputs, all equal to out_subnet_dim with "aver".
        num_out_subnet: number of outputs.
        out_subnet_dim: size of each.
        snr_type: "trans" or "aver".
        zeta: upper end of the stretched gate, > 1.
        gamma: its lower end, < 0.
        beta: temperature of the gate.
        use_ste: let gradients pass the clip as if it were not there, so that closed routes can open again.
        l0_weight: factor of the auxiliary loss.

    Example:
        >>> snr = SNR([4, 6], num_out_subnet=3, out_subnet_dim=5).eval()
        >>> [y.shape for y in snr([torch.zeros(2, 4), torch.zeros(2, 6)])]
        [torch.Size([2, 5]), torch.Size([2, 5]), torch.Size([2, 5])]
    """

    def __init__(
        self,
        in_features: Sequence[int],
        num_out_subnet: int,
        out_subnet_dim: int,
        *,
        snr_type: RouteType = "trans",
        zeta: float = 1.1,
        gamma: float = -0.1,
        beta: float = 0.5,
        use_ste: bool = False,
        l0_weight: float = 1.0,
    ) -> None:
        super().__init__()
        require_dims("SNR.in_features", in_features)
        require_positive("SNR.num_out_subnet", num_out_subnet)
        require_positive("SNR.out_subnet_dim", out_subnet_dim)
        require_choice("SNR.snr_type", snr_type, get_args(RouteType))
        require_number("SNR.zeta", zeta, "a number > 1", holds=zeta > 1)
        require_number("SNR.gamma", gamma, "a number < 0", holds=gamma < 0)
        require_number("SNR.beta", beta, "a number > 0", holds=beta > 0)
        if snr_type == "aver" and set(in_features) != {out_subnet_dim}:
            raise InvalidArgumentError(
                f"SNR.in_features: expected only {out_subnet_dim}, out_subnet_dim, with snr_type 'aver', got {list(in_features)}"
            )
        self.in_features, self.snr_type = list(in_features), snr_type
        self.zeta, self.gamma, self.beta, self.use_ste, self.l0_weight = zeta, gamma, beta, use_ste, l0_weight
        self.log_alpha = nn.Parameter(torch.zeros(len(in_features), num_out_subnet))
        self.weights = nn.ParameterList(
            torch.stack([nn.init.xavier_uniform_(torch.empty(size, out_subnet_dim)) for _ in range(num_out_subnet)])
            for size in (in_features if snr_type == "trans" else [])
        )

    def gates(self) -> torch.Tensor:
        """Return z of every route, [num_in, num_out_subnet]. In training each call draws it again."""
        if self.training:
            noise = torch.rand_like(self.log_alpha).clamp(min=torch.finfo(self.log_alpha.dtype).tiny)
            open_share = torch.sigmoid((torch.logit(noise) + self.log_alpha) / self.beta)
        else:
            open_share = torch.sigmoid(self.log_alpha)
        stretched = open_share * (self.zeta - self.gamma) + self.gamma
        clipped = stretched.clamp(0, 1)
        return stretched + (clipped - stretched).detach() if self.use_ste else clipped

    def auxiliary_loss(self) -> torch.Tensor:
        """Return the expected number of open routes, times l0_weight, a scalar."""
        shift = self.beta * math.log(-self.gamma / self.zeta)
        return self.l0_weight * torch.sigmoid(self.log_alpha - shift).sum()

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """num_in tensors [B, in_features[i]] -> num_out_subnet tensors [B, out_subnet_dim]."""
        if len(inputs) != len(self.in_features):
            raise InvalidArgumentError(f"SNR.inputs: expected {len(self.in_features)} tensors, got {len(inputs)}")
        for index, (x, size) in enumerate(zip(inputs, self.in_features, strict=True)):
            require_shape(f"SNR.inputs[{index}]", x, "B", size)
        gates = self.gates()
        if self.snr_type == "aver":
            return torch.einsum("ibd,io->bod", torch.stack(tuple(inputs)), gates).unbind(1)
        routed = [
            torch.einsum("bd,ode->boe", x, weight * gate[:, None, None])
            for x, weight, gate in zip(inputs, self.weights, gates, strict=True)
        ]
        return torch.stack(routed).sum(0).unbind(1)
