"""Sub-network routing: learned, sparse connections between the sub-networks of a multi-task model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_choice, require_dims, require_number, require_positive, require_shape

__all__ = ["SNR"]

RouteType = Literal["trans", "aver"]


class SNR(nn.Module):
    """y_o = sum_i z_io x_i W_io ("trans") or sum_i z_io x_i ("aver"): each route from i to o has a gate that can be exactly 0.

    num_in tensors [B, in_features[i]] -> a tuple of num_out_subnet tensors [B, out_subnet_dim]. Gates are hard-concrete: in
    training s = sigmoid((ln v - ln(1 - v) + log_alpha) / beta) with v ~ U(0, 1) drawn once per route and call, otherwise
    s = sigmoid(log_alpha); then z = clip(s (zeta - gamma) + gamma, 0, 1). `auxiliary_loss` is the expected number of open routes,
    l0_weight * sum sigmoid(log_alpha - beta ln(-gamma / zeta)). Add `monolith.nn.auxiliary_loss(model)` to the loss.

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
        """z of every route, [num_in, num_out_subnet]; drawn anew by each call in training."""
        if self.training:
            noise = torch.rand_like(self.log_alpha).clamp(min=torch.finfo(self.log_alpha.dtype).tiny)
            open_share = torch.sigmoid((torch.logit(noise) + self.log_alpha) / self.beta)
        else:
            open_share = torch.sigmoid(self.log_alpha)
        stretched = open_share * (self.zeta - self.gamma) + self.gamma
        clipped = stretched.clamp(0, 1)
        return stretched + (clipped - stretched).detach() if self.use_ste else clipped

    def auxiliary_loss(self) -> torch.Tensor:
        """The expected number of open routes, times l0_weight, a scalar."""
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
