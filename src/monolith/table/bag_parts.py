"""Pooling of bags outside of a table, with the bits one table would have given."""

from __future__ import annotations

import numpy as np
import torch

from monolith import _core
from monolith.table.store import Bags

__all__ = ["pool", "pooling_factors", "single_ids"]


def single_ids(table: str, ids: np.ndarray) -> Bags:
    """Return bags of one id each: their vectors are not pooled."""
    return Bags(table=table, ids=ids, offsets=np.arange(len(ids) + 1))


def pool(rows: np.ndarray, places: np.ndarray, bags: Bags) -> torch.Tensor:
    """Return what a lookup of `bags` would, given the vectors of distinct ids and the index of each id of `bags` among them.

    It adds each bag in its order, as a table does, so a sum has the same bits.
    """
    pooled = np.empty((len(bags.offsets) - 1, rows.shape[1]), dtype=np.float32)
    _core.pool_places(np.ascontiguousarray(rows), places, np.ascontiguousarray(bags.offsets), pooled)
    if bags.pooling != "sum":
        pooled *= pooling_factors(bags)
    return torch.from_numpy(pooled)


def pooling_factors(bags: Bags) -> np.ndarray:
    """Return float32 [bags, 1]: what the sum of each bag is multiplied by to pool it as a mean or by sqrtn.

    Example:
        >>> pooling_factors(Bags(table="t", ids=np.arange(4), offsets=np.array([0, 4]), pooling="mean")).tolist()
        [[0.25]]
    """
    sizes = np.maximum(np.diff(bags.offsets), 1).astype(np.float32)
    return (np.float32(1) / (sizes if bags.pooling == "mean" else np.sqrt(sizes)))[:, np.newaxis]
