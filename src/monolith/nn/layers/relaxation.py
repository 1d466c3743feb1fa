"""Choosing by gradient: relaxed subsets of k, and a count that an SGD step keeps."""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from monolith.nn.checks import require_number

__all__ = ["continuous_topk", "fid_counter", "gumbel_keys", "sample_subset"]


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
    """A relaxed k-hot vector of the k largest of the last dimension: k softmaxes, each after damping what was chosen before.

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
    """A relaxed random subset of k, weighed by exp(w), differentiable in w: [*, n] -> [*, n], summing to k.

    Example:
        >>> subset = sample_subset(torch.zeros(4), 2, generator=torch.Generator().manual_seed(0))
        >>> round(subset.sum().item(), 4)
        2.0
    """
    return continuous_topk(gumbel_keys(w, generator=generator), k, t)


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
    """How often an id has been seen, kept in its own embedding: min(counter + step, threshold), [*] -> [*].

    The gradient is -step whatever comes from above, and 0 once counter has reached the threshold: a segment of dimension 1,
    initially zero, trained by SGD with learning rate 1, thus counts the occurrences of each id. The result must be part of the
    loss, if only with a factor of 0, for its gradient to be asked for.

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
