"""Products of all pairs of vectors of an example: by the core where it can, in a third of torch's time, else by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from monolith import _core

__all__ = ["dot_pairs", "sum_pairs"]


def dot_pairs(x: torch.Tensor) -> torch.Tensor:
    """[B, n, k] -> [B, n (n - 1) / 2]: x_i · x_j for i = 1, 2, ... and each j < i.

    Example:
        >>> dot_pairs(torch.tensor([[[1.0, 0.0], [2.0, 1.0], [3.0, 1.0]]])).tolist()
        [[2.0, 3.0, 7.0]]
    """
    if not _by_core(x):
        return torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, _places(x))
    products: torch.Tensor = _DotPairs.apply(x)  # type: ignore[no-untyped-call]
    return products


def sum_pairs(x: torch.Tensor) -> torch.Tensor:
    """[B, n, k] -> [B, 1]: the sum of `dot_pairs`, without making them.

    Example:
        >>> sum_pairs(torch.tensor([[[1.0, 0.0], [2.0, 1.0], [3.0, 1.0]]])).tolist()
        [[12.0]]
    """
    if not _by_core(x):
        return 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1, keepdim=True)
    total: torch.Tensor = _SumPairs.apply(x)  # type: ignore[no-untyped-call]
    return total


class _DotPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        n = x.shape[1]
        return _filled(_core.dot_pairs, x.new_empty(len(x), n * (n - 1) // 2), x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        if not torch.is_grad_enabled():
            return _filled(_core.dot_pairs_gradient, torch.empty(x.shape), x, grad)
        # Whoever differentiates the gradient too gets one that is made of torch's operators.
        n = x.shape[1]
        below = grad.new_zeros(len(x), n * n).index_copy(1, _places(x), grad).view(-1, n, n)
        return torch.bmm(below + below.transpose(1, 2), x)


class _SumPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _filled(_core.sum_pairs, x.new_empty(len(x), 1), x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        if not torch.is_grad_enabled():
            return _filled(_core.sum_pairs_gradient, torch.empty(x.shape), x, grad)
        return grad.unsqueeze(2) * (x.sum(1, keepdim=True) - x)


def _by_core(x: torch.Tensor) -> bool:
    # What is traced must be made of torch's operators; a subclass, a fake tensor for one, may have no memory.
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
    )


def _filled(kernel: Callable[..., Any], out: torch.Tensor, *arrays: torch.Tensor) -> torch.Tensor:
    kernel(*(array.detach().contiguous().numpy() for array in arrays), out.numpy())
    return out


def _places(x: torch.Tensor) -> torch.Tensor:
    """Where the pairs (i, j), j < i, are in a matrix [n, n] that is read row by row."""
    n = x.shape[1]
    rows, columns = torch.tril_indices(n, n, offset=-1, device=x.device).unbind()
    return rows * n + columns
