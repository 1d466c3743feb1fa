"""Bags cut into parts by id, and put together again, with the numbers one table would have given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from monolith import _core
from monolith.table.store import Bags, Gradient

__all__ = ["as_sum", "gather", "pool", "pooling_factors", "restrict", "single_ids", "unique_ids"]


def unique_ids(bags: Bags) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids of `bags`, and the place of each of its ids among them."""
    unique, inverse, _ = _core.unique_with_inverse(np.ascontiguousarray(bags.ids))
    return unique, inverse


def single_ids(table: str, ids: np.ndarray) -> Bags:
    """Bags of one id each: their vectors, not pooled."""
    return Bags(table=table, ids=ids, offsets=np.arange(len(ids) + 1))


def gather(parts: np.ndarray, answers: Sequence[np.ndarray]) -> np.ndarray:
    """One row per id, in order: that of id i is the next unused one of `answers[parts[i]]`.

    Example:
        >>> gather(np.array([1, 0, 1]), [np.array([[5.0]]), np.array([[6.0], [7.0]])]).tolist()
        [[6.0], [5.0], [7.0]]
    """
    rows = np.empty((len(parts), answers[0].shape[1]), dtype=answers[0].dtype)
    for part, answer in enumerate(answers):
        rows[parts == part] = answer
    return rows


def pool(rows: np.ndarray, places: np.ndarray, bags: Bags) -> torch.Tensor:
    """What a lookup of `bags` returns, given the vectors of distinct ids and the place of each id of `bags` among them.

    It goes through each bag in its order, as a table does: a sum has the same bits.
    """
    pooled = np.empty((len(bags.offsets) - 1, rows.shape[1]), dtype=np.float32)
    _core.pool_places(np.ascontiguousarray(rows), places, np.ascontiguousarray(bags.offsets), pooled)
    if bags.pooling != "sum":
        pooled *= pooling_factors(bags)
    return torch.from_numpy(pooled)


def as_sum(gradient: Gradient) -> Gradient:
    """The gradient of the sums that `gradient`'s bags were pooled from: cutting a sum into parts does not change it."""
    bags = gradient.bags
    if bags.pooling == "sum":
        return gradient
    values = gradient.values * torch.from_numpy(pooling_factors(bags))
    return replace(gradient, bags=replace(bags, pooling="sum"), values=values)


def restrict(gradient: Gradient, mine: np.ndarray) -> Gradient:
    """Returns the part of a gradient of sums that belongs to the ids where `mine` is true, without the bags that have none."""
    bags = gradient.bags
    before = np.concatenate([[0], np.cumsum(mine)])
    splits = before[bags.offsets]
    kept = np.flatnonzero(np.diff(splits))
    part = replace(bags, ids=bags.ids[mine], offsets=np.concatenate([[0], splits[kept + 1]]))
    snapshot = None if gradient.snapshot is None else gradient.snapshot[torch.from_numpy(mine)]
    return replace(gradient, bags=part, values=gradient.values[torch.from_numpy(kept)], snapshot=snapshot)


def pooling_factors(bags: Bags) -> np.ndarray:
    """float32 [bags, 1]: what the sum of each bag is multiplied by, unless "sum" is asked for.

    Example:
        >>> pooling_factors(Bags(table="t", ids=np.arange(4), offsets=np.array([0, 4]), pooling="mean")).tolist()
        [[0.25]]
    """
    sizes = np.maximum(np.diff(bags.offsets), 1).astype(np.float32)
    return (np.float32(1) / (sizes if bags.pooling == "mean" else np.sqrt(sizes)))[:, np.newaxis]
