"""Differentiable functions computed by the core where it can use the tensors, and by torch otherwise."""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd.function import FunctionCtx

from monolith import _core

__all__ = ["as_array", "core_can_use", "dot_pairs", "split_bias", "sum_pairs"]


def core_can_use(x: torch.Tensor) -> bool:
    """Return whether `x` has floats in main memory. While tracing, torch's operators must be used instead."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and type(x) in (torch.Tensor, torch.nn.Parameter)  # a subclass, such as a fake tensor, may have no memory
        and x.shape[-1] > 0
        and not torch.compiler.is_compiling()
    )


def as_array(x: torch.Tensor) -> np.ndarray:
    """Return `x` as a contiguous array, as the core reads it."""
    return x.detach().contiguous().numpy()


def split_bias(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows [n, 1 + dim] into bias [n, 1] and vectors [n, dim], both contiguous.

    Slices would be copied by layers that need contiguous tensors, as most do, and their gradients be joined by copies.

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
        if torch.is_grad_enabled():  # the gradient is differentiated too
            return torch.cat([bias, vectors], dim=1)
        rows = torch.empty(len(bias), 1 + vectors.shape[1])
        _core.join_bias(as_array(bias), as_array(vectors), rows.numpy())
        return rows


def dot_pairs(x: torch.Tensor, dense: torch.Tensor | None = None) -> torch.Tensor:
    """[B, n, k] -> [B, n (n - 1) / 2]: x_i · x_j for i = 1, 2, ... and each j < i.

    With `dense` [B, k] as one more vector, before the others, and once more before the products: -> [B, k + n (n + 1) / 2].

    Example:
        >>> x = torch.tensor([[[2.0, 1.0], [3.0, 1.0]]])
        >>> dot_pairs(x).tolist()
        [[7.0]]
        >>> dot_pairs(x, torch.tensor([[1.0, 0.0]])).tolist()
        [[1.0, 0.0, 2.0, 3.0, 7.0]]
    """
    if core_can_use(x) and (dense is None or core_can_use(dense)):
        products: torch.Tensor = _DotPairs.apply(x, dense)  # type: ignore[no-untyped-call]
        return products
    if dense is None:
        return torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, _places(x.shape[1], x.device))
    return torch.cat([dense, dot_pairs(torch.cat([dense.unsqueeze(1), x], dim=1))], dim=1)


def sum_pairs(x: torch.Tensor) -> torch.Tensor:
    """[B, n, k] -> [B, 1]: the sum of `dot_pairs`, without computing the pairs.

    Example:
        >>> sum_pairs(torch.tensor([[[1.0, 0.0], [2.0, 1.0], [3.0, 1.0]]])).tolist()
        [[12.0]]
    """
    if not core_can_use(x):
        return 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1, keepdim=True)
    total: torch.Tensor = _SumPairs.apply(x)  # type: ignore[no-untyped-call]
    return total


class _DotPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, dense: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, dense)  # type: ignore[arg-type]  # it takes None too
        batch, n, k = x.shape
        pairs = n * (n - 1) // 2 if dense is None else k + n * (n + 1) // 2
        out = torch.empty(batch, pairs)
        _core.dot_pairs(as_array(_or_none(dense)), as_array(x), out.numpy())
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x: torch.Tensor
        x, dense = ctx.saved_tensors  # type: ignore[attr-defined]
        if not torch.is_grad_enabled():
            grad_x, grad_dense = torch.empty(x.shape), torch.empty(_or_none(dense).shape)
            given = as_array(_or_none(dense)), as_array(x), as_array(grad)
            _core.dot_pairs_gradient(*given, grad_dense.numpy(), grad_x.numpy())
            return grad_x, None if dense is None else grad_dense
        # A gradient that is differentiated too is made of torch's operators.
        if dense is None:
            return _dot_gradient(x, grad), None
        k = x.shape[2]
        every = _dot_gradient(torch.cat([dense.unsqueeze(1), x], dim=1), grad[:, k:])
        return every[:, 1:], grad[:, :k] + every[:, 0]


class _SumPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        out = torch.empty(len(x), 1)
        _core.sum_pairs(as_array(x), out.numpy())
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            return grad.unsqueeze(2) * (x.sum(1, keepdim=True) - x)
        out = torch.empty(x.shape)
        _core.sum_pairs_gradient(as_array(x), as_array(grad), out.numpy())
        return out


def _or_none(dense: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0, 0) if dense is None else dense


def _dot_gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    n = x.shape[1]
    below = grad.new_zeros(len(x), n * n).index_copy(1, _places(n, x.device), grad).view(-1, n, n)
    return torch.bmm(below + below.transpose(1, 2), x)


def _places(n: int, device: torch.device) -> torch.Tensor:
    """Return the indices of the pairs (i, j), j < i, in a matrix [n, n] that is read row by row."""
    rows, columns = torch.tril_indices(n, n, offset=-1, device=device).unbind()
    return rows * n + columns
