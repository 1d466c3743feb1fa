"""Bags cut by server and put together again: ids asked once each, rows pooled here, gradients summed here.

Pooling and summing go through the bag, and through the gradients of an id, in their order, as a table does. So the result of
a sum is that of one table bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from monolith import _core
from monolith.table.bag_parts import pooling_factors
from monolith.table.buckets import bucket_of
from monolith.table.store import Bags

__all__ = ["IdSplit", "single_gradients", "split_by_owner", "split_ids", "summed_gradients"]


@dataclass(frozen=True, kw_only=True)
class IdSplit:
    """The distinct ids of a request by server, and where each id of the request is among them."""

    ids: np.ndarray
    """int64 [distinct]: those of the first server, those of the second, ..."""
    sizes: list[int]
    """How many each server has."""
    places: np.ndarray
    """int64 [n]: `ids[places]` are the ids of the request."""

    def is_of(self, ids: np.ndarray) -> bool:
        """Whether this is the split of `ids`."""
        return len(ids) == len(self.places) and bool((self.ids[self.places] == ids).all())

    def parts(self, rows: np.ndarray) -> list[np.ndarray]:
        """`rows`, one for each of `ids`, by server."""
        ends = np.cumsum([0, *self.sizes]).tolist()
        return [rows[begin:end] for begin, end in pairwise(ends)]


def split_ids(ids: np.ndarray, owners: np.ndarray, count: int) -> IdSplit:
    """Ask each id once, and its owner: `owners` has the server of every bucket, of `count`.

    Example:
        >>> split = split_ids(np.array([7, 5, 7]), np.zeros(4096, dtype=np.int64), 1)
        >>> split.ids.tolist(), split.places.tolist()
        ([7, 5], [0, 1, 0])
    """
    distinct, inverse, _ = _core.unique_with_inverse(np.ascontiguousarray(ids))
    if count == 1:
        return IdSplit(ids=distinct, sizes=[len(distinct)], places=inverse)
    order, sizes = split_by_owner(distinct, owners, count)
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order))
    return IdSplit(ids=distinct[order], sizes=sizes, places=place_of[inverse])


def split_by_owner(ids: np.ndarray, owners: np.ndarray, count: int) -> tuple[np.ndarray, list[int]]:
    """The places of `ids` by server, in order within each, and how many each has."""
    order, sizes = _core.split_by_indices(owners[bucket_of(ids)], count)
    return order, sizes.tolist()


def summed_gradients(values: np.ndarray, split: IdSplit, bags: Bags) -> np.ndarray:
    """float32 [distinct, dim]: the gradient of each of `split.ids`, given those of the pooled bags."""
    if bags.pooling != "sum":
        values = values * pooling_factors(bags)
    summed = np.empty((len(split.ids), values.shape[1]), dtype=np.float32)
    _core.sum_places(values, split.places, np.ascontiguousarray(bags.row_splits), summed)
    return summed


def single_gradients(values: np.ndarray, split: IdSplit, bags: Bags) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Ids and gradients by server, each occurrence of an id by itself: what an admission filter has to count."""
    if bags.pooling != "sum":
        values = values * pooling_factors(bags)
    bag_of = np.repeat(np.arange(len(values)), np.diff(bags.row_splits))
    server_of = np.repeat(np.arange(len(split.sizes)), split.sizes)
    order, sizes = _core.split_by_indices(server_of[split.places], len(split.sizes))
    rows = np.take(values, bag_of[order], axis=0)
    ends = np.cumsum(sizes)[:-1]
    return np.split(bags.ids[order], ends), np.split(rows, ends)
