"""Taking the bias off the rows of a lookup, so that bias and vectors are each in one piece."""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx

from monolith import _core
from monolith.nn.core_tensors import as_array, core_can_use

__all__ = ["split_bias"]


def split_bias(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, 1 + dim] -> bias [n, 1] and vectors [n, dim], both contiguous.

    Slices would be copied by whoever wants them in one piece, as most layers do, and their gradients be put together by copies.

    Example:
        >>> bias, vectors = split_bias(torch.tensor([[1.0, 2.0, 3.0]]))
        >>> bias.tolist(), vectors.tolist()
        ([[1.0]], [[2.0, 3.0]])
    """
    if not core_can_use(rows):
        bias, vectors = torch.split(rows, [1, rows.shape[1] - 1], dim=1)
        return bias.contiguous(), vectors.contiguous()
    parts: tuple[torch.Tensor, torch.Tensor] = _SplitBias.apply(rows)  # type: ignore[no-untyped-call]
    return parts


class _SplitBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n, width = rows.shape
        bias, vectors = torch.empty(n, 1), torch.empty(n, width - 1)
        _core.split_bias(as_array(rows), bias.numpy(), vectors.numpy())
        return bias, vectors

    @staticmethod
    def backward(ctx: FunctionCtx, bias: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # somebody differentiates the gradient too
            return torch.cat([bias, vectors], dim=1)
        rows = torch.empty(len(bias), 1 + vectors.shape[1])
        _core.join_bias(as_array(bias), as_array(vectors), rows.numpy())
        return rows
