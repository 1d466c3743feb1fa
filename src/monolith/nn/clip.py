"""Clipping of dense and sparse gradients: by a joint norm, by separate norms, tensor by tensor, or value by value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, get_args

import numpy as np
import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.collection import EmbeddingBagCollection, embedding_collections

__all__ = ["ClipType", "clip_grad_norm_", "clip_grads_"]

ClipType = Literal["global_norm", "dense_and_sparse", "norm", "value"]
"""What `clip_grads_` limits."""


def clip_grad_norm_(
    modules: nn.Module | Iterable[nn.Module],
    max_norm: float = 1000.0,
    *,
    sparse_max_norm: float | None = None,
    sparse_squares: np.ndarray | None = None,
) -> torch.Tensor:
    """Scale all gradients of a model, dense and sparse, so that their joint L2 norm is at most `max_norm`.

    The norm is over the `grad` of every parameter and the gradients that its `EmbeddingBagCollection`s have collected, taken at
    the outputs of the lookups: after pooling and before equal ids are summed, as in the original's fused layout.
    With `sparse_max_norm` the sparse gradients are scaled to that instead, by the same norm. Gradients within the limit do not
    change, and a norm that is NaN changes none. `sparse_squares`: see `clip_grads_`.

    Returns the norm before clipping, float32 [].

    Example:
        >>> linear = nn.Linear(2, 1, bias=False)
        >>> linear.weight.grad = torch.tensor([[-3.0, 4.0]])
        >>> clip_grad_norm_(linear, 4.0)
        tensor(5.)
        >>> linear.weight.grad
        tensor([[-2.4000,  3.2000]])
    """
    _require_limits(max_norm=max_norm, sparse_max_norm=sparse_max_norm)
    dense, collections = _gradients(modules)
    if sparse_squares is None:
        norm = nn.utils.get_total_norm([*dense, *_sparse(collections)])
    else:
        norm = _joint_norm(dense, sparse_squares)
    _scale_dense(dense, norm, max_norm)
    _scale_sparse(collections, norm, sparse_max_norm or max_norm)
    return norm


def clip_grads_(
    modules: nn.Module | Iterable[nn.Module],
    limit: float = 1000.0,
    *,
    by: ClipType = "global_norm",
    sparse_limit: float | None = None,
    sparse_squares: np.ndarray | None = None,
) -> torch.Tensor:
    """Clip all gradients of a model, dense and sparse.

    - "global_norm": the joint norm is at most `limit`, see `clip_grad_norm_`.
    - "dense_and_sparse": the norm of the dense gradients is at most `limit`, and the norm of the sparse ones at most
      `sparse_limit`. None does not clip them.
    - "norm": the norm of each tensor is at most `limit`: of each parameter, of each table's lookup.
    - "value": every element is within [-limit, limit].

    With "norm" and "value", `sparse_limit` is that of the sparse gradients if it is given. NaN stays as it is.

    Where other processes have parts of the batch, `sparse_squares` are the sums of squares of the sparse gradients of all parts,
    one after the other as `gradient_squares` of each collection returns them. Norms are then those of the whole batch.

    Returns the joint norm before clipping, float32 [].

    Example:
        >>> linear = nn.Linear(2, 1, bias=False)
        >>> linear.weight.grad = torch.tensor([[-3.0, 4.0]])
        >>> clip_grads_(linear, 3.5, by="value")
        tensor(5.)
        >>> linear.weight.grad
        tensor([[-3.0000,  3.5000]])
    """
    if by == "global_norm":
        return clip_grad_norm_(modules, limit, sparse_max_norm=sparse_limit, sparse_squares=sparse_squares)
    _require_limits(limit=limit, sparse_limit=sparse_limit)
    dense, collections = _gradients(modules)
    if sparse_squares is None:
        sparse = _sparse(collections)
        norm, sparse_norm = nn.utils.get_total_norm([*dense, *sparse]), nn.utils.get_total_norm(sparse)
    else:
        norm, sparse_norm = _joint_norm(dense, sparse_squares), _joint_norm([], sparse_squares)
    if by == "dense_and_sparse":
        _scale_dense(dense, nn.utils.get_total_norm(dense), limit)
        if sparse_limit is not None:
            _scale_sparse(collections, sparse_norm, sparse_limit)
        return norm
    if by not in _ONE_BY_ONE:
        raise InvalidArgumentError(f"by: expected one of {', '.join(get_args(ClipType))}, got {by!r}")
    clip, bound = _ONE_BY_ONE[by], sparse_limit or limit
    for gradient in dense:
        gradient.copy_(clip(gradient, limit))
    if by == "norm" and sparse_squares is not None:
        _scale_tables(collections, sparse_squares, bound)
        return norm
    for collection in collections:
        collection.change_gradients(lambda values: clip(values, bound))
    return norm


def _gradients(modules: nn.Module | Iterable[nn.Module]) -> tuple[list[torch.Tensor], list[EmbeddingBagCollection]]:
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    parameters = {id(parameter): parameter for root in roots for parameter in root.parameters()}
    dense = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    return dense, embedding_collections(roots)


def _sparse(collections: Iterable[EmbeddingBagCollection]) -> list[torch.Tensor]:
    return [values for collection in collections for values in collection.gradient_values()]


def _joint_norm(dense: list[torch.Tensor], sparse_squares: np.ndarray) -> torch.Tensor:
    squares = nn.utils.get_total_norm(dense).double().square() + float(sparse_squares.sum())
    return squares.sqrt().float()


def _scale_tables(collections: Iterable[EmbeddingBagCollection], squares: np.ndarray, limit: float) -> None:
    first = 0
    for collection in collections:
        count = len(collection.plan.layout.tables)
        norms = np.sqrt(squares[first : first + count])
        # A norm that is NaN changes nothing.
        factors = [limit / norm if norm > limit else 1.0 for norm in norms.tolist()]
        if any(factor != 1.0 for factor in factors):
            collection.scale_tables(factors)
        first += count


def _scale_dense(dense: list[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    if dense and norm > limit:
        torch._foreach_mul_(dense, (limit / norm).item())


def _scale_sparse(collections: Iterable[EmbeddingBagCollection], norm: torch.Tensor, limit: float) -> None:
    if norm > limit:
        for collection in collections:
            collection.scale_gradients((limit / norm).item())


def _within_norm(gradient: torch.Tensor, limit: float) -> torch.Tensor:
    norm = gradient.norm()
    return gradient * (limit / norm) if norm > limit else gradient


def _within_value(gradient: torch.Tensor, limit: float) -> torch.Tensor:
    return gradient.clamp(-limit, limit)


_ONE_BY_ONE: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {"norm": _within_norm, "value": _within_value}


def _require_limits(**limits: float | None) -> None:
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise InvalidArgumentError(f"{name}: expected a number above 0, got {limit!r}")
