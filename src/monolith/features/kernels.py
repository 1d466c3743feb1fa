"""Kernels over ragged batches: pooling, deduplication, splits by shard and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from monolith import _core
from monolith.errors import InvalidArgumentError
from monolith.features.ragged import Ragged
from monolith.table.arrays import Ids, id_array, id_vector

__all__ = [
    "ShardSplit",
    "Unique",
    "pool",
    "ragged_split_by_indices",
    "reorder_by_indices",
    "split_by_indices",
    "split_by_shard",
    "unique_with_inverse",
]

PoolReduction = Literal["sum", "mean", "sqrtn", "l2"]

_REDUCTIONS = {
    "sum": _core.Reduction.SUM,
    "mean": _core.Reduction.MEAN,
    "sqrtn": _core.Reduction.SQRTN,
    "l2": _core.Reduction.L2,
}


def pool(rows: torch.Tensor, offsets: Ragged | Ids, *, mode: PoolReduction = "sum") -> torch.Tensor:
    """Pool the rows of each bag: float32 [n, dim] -> [bags, dim], differentiable in `rows`. An empty bag gives zeros.

    `offsets` may also be the `Ragged` of ids whose embeddings `rows` are. With n rows x in a bag, "sum" is sum(x), "mean"
    sum(x) / n, "sqrtn" sum(x) / sqrt(n), and "l2" sqrt(sum(x * x)) by element, the original's reduce_sqrtn.

    Example:
        >>> pool(torch.tensor([[1.0], [2.0], [6.0]]), [0, 1, 1, 3], mode="mean").tolist()
        [[1.0], [0.0], [4.0]]
    """
    if mode not in _REDUCTIONS:
        raise InvalidArgumentError(f"mode: expected one of {', '.join(map(repr, _REDUCTIONS))}, got {mode!r}")
    if rows.ndim != 2 or rows.dtype != torch.float32:
        raise InvalidArgumentError(f"rows: expected float32 [n, dim], got {rows.dtype} {list(rows.shape)}")
    splits = offsets.offsets.numpy() if isinstance(offsets, Ragged) else id_vector(offsets, "offsets")
    out: torch.Tensor = _Pool.apply(rows, splits, _REDUCTIONS[mode])  # type: ignore[no-untyped-call]
    return out


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, splits: np.ndarray, reduction: _core.Reduction) -> torch.Tensor:
        values = _rows(rows)
        pooled = torch.from_numpy(_core.pool(reduction, values, splits))
        ctx.splits, ctx.reduction = splits, reduction  # type: ignore[attr-defined]
        if reduction == _core.Reduction.L2:
            ctx.save_for_backward(rows, pooled)
        return pooled.to(rows.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        splits: np.ndarray = ctx.splits  # type: ignore[attr-defined]
        rows = pooled = np.empty((0, grad.shape[1]), dtype=np.float32)
        if ctx.saved_tensors:  # type: ignore[attr-defined]
            rows, pooled = map(_rows, ctx.saved_tensors)  # type: ignore[attr-defined]
        reduction: _core.Reduction = ctx.reduction  # type: ignore[attr-defined]
        grad_rows = _core.pool_gradient(reduction, _rows(grad), rows, pooled, splits, int(splits[-1]))
        return torch.from_numpy(grad_rows).to(grad.device), None, None


@dataclass(frozen=True, kw_only=True)
class Unique:
    """Distinct ids of a batch and how to get the batch back: `ids[inverse]`."""

    ids: torch.Tensor
    """int64 [distinct], in the order of first occurrence."""
    inverse: torch.Tensor
    """int64, shape of the batch: the position of each id in `ids`."""
    counts: torch.Tensor | None
    """int64 [distinct]: occurrences, if requested."""


def unique_with_inverse(ids: Ids, *, return_counts: bool = False) -> Unique:
    """Return distinct ids in the order of first occurrence, and the position of each id of the batch among them.

    Example:
        >>> unique = unique_with_inverse([5, 3, 5, 9], return_counts=True)
        >>> unique.ids.tolist(), unique.inverse.tolist(), unique.counts.tolist()
        ([5, 3, 9], [0, 1, 0, 2], [2, 1, 1])
    """
    batch = id_array(ids)
    distinct, inverse, counts = _core.unique_with_inverse(batch.reshape(-1), return_counts)
    return Unique(
        ids=torch.from_numpy(distinct),
        inverse=torch.from_numpy(inverse).reshape(batch.shape),
        counts=torch.from_numpy(counts) if return_counts else None,
    )


@dataclass(frozen=True, kw_only=True)
class ShardSplit:
    """Ids grouped by the shard that owns them, and how to undo it."""

    ids: torch.Tensor
    """int64 [n]: shard 0's ids first, each shard's in their order of the batch."""
    order: torch.Tensor
    """int64 [n]: `ids[k]` was at index `order[k]` of the batch."""
    sizes: torch.Tensor
    """int64 [shards]: ids of each shard."""

    def by_shard(self) -> tuple[torch.Tensor, ...]:
        """Return the ids of each shard, as views of `ids`."""
        return torch.split(self.ids, self.sizes.tolist())

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder rows from the order of `ids` to the order of the batch. Differentiable.

        Example:
            >>> split = split_by_shard([3, 2, 1, 4], 2)
            >>> split.restore(split.ids * 10).tolist()
            [30, 20, 10, 40]
        """
        out: torch.Tensor = _Restore.apply(rows, self.order.numpy())  # type: ignore[no-untyped-call]
        return out


def split_by_shard(ids: Ids, num_shards: int) -> ShardSplit:
    """Group ids by owner, stably: shard = id % num_shards with the id taken as unsigned.

    Example:
        >>> split = split_by_shard([3, 2, 1, 4], 2)
        >>> [shard.tolist() for shard in split.by_shard()]
        [[2, 4], [3, 1]]
    """
    grouped, order, sizes = _core.split_by_shard(id_array(ids).reshape(-1), _parts("num_shards", num_shards))
    return ShardSplit(ids=torch.from_numpy(grouped), order=torch.from_numpy(order), sizes=torch.from_numpy(sizes))


def split_by_indices(indices: Ids, rows: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, ...]:
    """Split rows [n, ...] into `num_splits` parts, row i to part `indices[i]`, in order. Differentiable in `rows`.

    Example:
        >>> [part.tolist() for part in split_by_indices([0, 1, 0], torch.tensor([4, 5, 6]), 2)]
        [[4, 6], [5]]
    """
    parts = id_vector(indices, "indices")
    if rows.ndim == 0 or len(rows) != parts.size:
        raise InvalidArgumentError(f"rows: expected [{parts.size}, ...], one row per index, got {list(rows.shape)}")
    order, sizes = _core.split_by_indices(parts, _parts("num_splits", num_splits))
    grouped: torch.Tensor = _Group.apply(rows, order)  # type: ignore[no-untyped-call]
    return torch.split(grouped, sizes.tolist())


def ragged_split_by_indices(indices: Ids, ragged: Ragged, num_splits: int) -> tuple[list[Ragged], list[Ragged]]:
    """Split the values of `ragged` into `num_splits` parts that keep all rows. Returns the parts and the positions of their
    values.

    Example:
        >>> parts, positions = ragged_split_by_indices([0, 1, 0, 1], Ragged.from_lists([[4, 3, 2], [1]]), 2)
        >>> [part.to_lists() for part in parts], [part.to_lists() for part in positions]
        ([[[4, 2], []], [[3], [1]]], [[[0, 2], []], [[1], [3]]])
    """
    flat = id_vector(indices, "indices")
    if flat.size != len(ragged.values):
        raise InvalidArgumentError(f"indices: expected {len(ragged.values)} entries, one per value, got {flat.size}")
    order, sizes, splits = _core.split_ragged_by_indices(flat, ragged.offsets.numpy(), _parts("num_splits", num_splits))
    positions = torch.split(torch.from_numpy(order), sizes.tolist())
    parts = [Ragged(ragged.values[position], split) for position, split in zip(positions, splits, strict=True)]
    return parts, [Ragged(position, split) for position, split in zip(positions, splits, strict=True)]


def reorder_by_indices(ids: Ids, shard_ids: Ids, num_shards: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distinct ids grouped by shard, and the size of each group. An id's first `shard_ids` entry counts.

    Inside a shard ids keep the order of first occurrence (the original reverses it).

    Example:
        >>> ids, sizes = reorder_by_indices([0, 1, 2, 2, 3, 5], [0, 1, 2, 2, 0, 2], 3)
        >>> ids.tolist(), sizes.tolist()
        ([0, 3, 1, 2, 5], [2, 1, 2])
    """
    batch, shards = id_vector(ids), id_vector(shard_ids, "shard_ids")
    if shards.size != batch.size:
        raise InvalidArgumentError(f"shard_ids: expected {batch.size} entries, one per id, got {shards.size}")
    distinct, inverse, _ = _core.unique_with_inverse(batch, False)
    first = np.full(distinct.size, -1, dtype=np.int64)
    # Assigned from the back, so that the first occurrence is written last.
    first[inverse[::-1]] = shards[::-1]
    order, sizes = _core.split_by_indices(first, _parts("num_shards", num_shards))
    return torch.from_numpy(distinct[order]), torch.from_numpy(sizes)


class _Restore(torch.autograd.Function):
    """out[order[k]] = rows[k]. The gradient gathers."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, order: np.ndarray) -> torch.Tensor:
        ctx.order = order  # type: ignore[attr-defined]
        return _move(_core.restore_order, rows, order)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out: torch.Tensor = _Group.apply(grad, ctx.order)  # type: ignore[no-untyped-call, attr-defined]
        return out, None


class _Group(torch.autograd.Function):
    """out[k] = rows[order[k]]. The order is a permutation, so the gradient scatters back."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, order: np.ndarray) -> torch.Tensor:
        ctx.order = order  # type: ignore[attr-defined]
        return _move(_core.gather_rows, rows, order)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out: torch.Tensor = _Restore.apply(grad, ctx.order)  # type: ignore[no-untyped-call, attr-defined]
        return out, None


def _move(kernel: Any, rows: torch.Tensor, order: np.ndarray) -> torch.Tensor:  # noqa: ANN401 - a function of the extension
    if rows.ndim == 0 or len(rows) != order.size:
        raise InvalidArgumentError(f"rows: expected [{order.size}, ...], one row per id, got {list(rows.shape)}")
    source = rows.detach().cpu().contiguous()
    out = torch.empty_like(source)
    kernel(_bytes(source), order, _bytes(out))
    return out.to(rows.device)


def _bytes(rows: torch.Tensor) -> np.ndarray:
    row_bytes = rows.element_size() * (rows[0].numel() if len(rows) else 0)
    return rows.reshape(-1).view(torch.uint8).numpy().reshape(len(rows), row_bytes)


def _rows(rows: torch.Tensor) -> np.ndarray:
    return rows.detach().cpu().contiguous().numpy()


def _parts(name: str, number: int) -> int:
    if not 1 <= number < 2**32:
        raise InvalidArgumentError(f"{name}: expected 1..{2**32 - 1}, got {number}")
    return number
