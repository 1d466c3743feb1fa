"""Clipping of dense and sparse gradients together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.embedding_collection import embedding_collections

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    modules: nn.Module | Iterable[nn.Module], max_norm: float = 1000.0, *, sparse_max_norm: float | None = None
) -> torch.Tensor:
    """Scale all gradients of a model, dense and sparse, so that their joint L2 norm is at most `max_norm`.

    The norm is over the `grad` of every parameter and the gradients that its `EmbeddingCollection`s have collected, taken at
    the outputs of the lookups: after pooling and before equal ids are summed, as in the original's fused layout.
    With `sparse_max_norm` the sparse gradients are scaled to that instead, by the same norm. Gradients within the limit are
    not touched; a norm that is NaN leaves them as they are.

    Returns the norm before clipping, float32 [].

    Example:
        >>> linear = nn.Linear(2, 1, bias=False)
        >>> linear.weight.grad = torch.tensor([[-3.0, 4.0]])
        >>> clip_grad_norm_(linear, 4.0)
        tensor(5.)
        >>> linear.weight.grad
        tensor([[-2.4000,  3.2000]])
    """
    for name, limit in (("max_norm", max_norm), ("sparse_max_norm", sparse_max_norm)):
        if limit is not None and not limit > 0:
            raise InvalidArgumentError(f"{name}: expected a number above 0, got {limit!r}")
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    parameters = {id(parameter): parameter for root in roots for parameter in root.parameters()}
    dense = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    collections = embedding_collections(roots)
    sparse = [gradient.values for collection in collections for gradient in collection.gradients]
    norm = nn.utils.get_total_norm([*dense, *sparse])
    if dense and norm > max_norm:
        torch._foreach_mul_(dense, (max_norm / norm).item())
    sparse_limit = sparse_max_norm or max_norm
    if norm > sparse_limit:
        for collection in collections:
            collection.scale_gradients((sparse_limit / norm).item())
    return norm
