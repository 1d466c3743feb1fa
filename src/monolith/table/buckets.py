"""Buckets: the ids of a model in parts of about equal size. Owners, files and restores are arranged by bucket."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from monolith import _core
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.table.arrays import Ids, id_array

__all__ = ["NUM_BUCKETS", "bucket_bounds", "bucket_of", "bucket_owners", "bucket_ranges", "mask_of", "ranges_of"]

NUM_BUCKETS: int = _core.NUM_BUCKETS
"""Buckets of every model, for ever."""


def bucket_of(ids: Ids, count: int = NUM_BUCKETS) -> np.ndarray:
    """The bucket of each id among `count`: int64, shaped like `ids`. It never changes.

    Buckets are ranges of the id's hash, so bucket b of 4096 lies in bucket b // 2 of 2048.

    Example:
        >>> bucket_of([0, 1, 2**62]).tolist()
        [3618, 2320, 10]
        >>> bucket_of([0, 1, 2**62], 4).tolist()
        [3, 2, 0]
    """
    if not 0 < count < 2**63:
        raise InvalidArgumentError(f"count: expected a number of buckets in [1, 2**63), got {count}")
    wanted = id_array(ids)
    return _core.bucket_of(wanted.reshape(-1), count).reshape(wanted.shape)


def bucket_bounds(buckets: range | None) -> tuple[int, int]:
    """Returns the first bucket and the one after the last. None means all of them.

    Example:
        >>> bucket_bounds(range(1024, 2048)), bucket_bounds(None)
        ((1024, 2048), (0, 4096))
    """
    if buckets is None:
        return 0, NUM_BUCKETS
    if not isinstance(buckets, range) or buckets.step != 1 or not 0 <= buckets.start <= buckets.stop <= NUM_BUCKETS:
        raise InvalidArgumentError(f"buckets: expected range(first, last) within range({NUM_BUCKETS}), got {buckets!r}")
    return buckets.start, buckets.stop


def bucket_ranges(count: int) -> list[range]:
    """The buckets of each of `count` owners: contiguous, as equal as possible, together all of them.

    Example:
        >>> bucket_ranges(3)
        [range(0, 1365), range(1365, 2730), range(2730, 4096)]
    """
    if not 1 <= count <= NUM_BUCKETS:
        raise InvalidArgumentError(f"count: expected 1..{NUM_BUCKETS} owners, got {count}")
    bounds = [number * NUM_BUCKETS // count for number in range(count + 1)]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


def bucket_owners(ranges: Sequence[range], count: int) -> np.ndarray:
    """Returns the index of the owner of every bucket, int64 [NUM_BUCKETS]. `ranges` lists the buckets of each of `count` owners.

    Example:
        >>> bucket_owners([range(0, 1000), range(1000, 4096)], 2)[[0, 999, 1000, 4095]].tolist()
        [0, 0, 1, 1]
    """
    if len(ranges) != count:
        raise ConfigError(f"ranges: expected one for each of {count} owners, got {len(ranges)}")
    owners = np.full(NUM_BUCKETS, -1, dtype=np.int64)
    for number, buckets in enumerate(ranges):
        if buckets.step != 1 or not 0 <= buckets.start <= buckets.stop <= NUM_BUCKETS:
            raise ConfigError(f"ranges[{number}]: expected consecutive buckets of 0..{NUM_BUCKETS - 1}, got {buckets}")
        if (owners[buckets.start : buckets.stop] >= 0).any():
            raise ConfigError(f"ranges[{number}]: some of {buckets} belong to an earlier owner already")
        owners[buckets.start : buckets.stop] = number
    if (owners < 0).any():
        raise ConfigError(f"ranges: nobody owns bucket {int(np.argmin(owners))}; every bucket needs an owner")
    return owners


def mask_of(ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return bool [NUM_BUCKETS]: which buckets are in `ranges`."""
    mask = np.zeros(NUM_BUCKETS, dtype=np.bool_)
    for first, end in ranges:
        mask[first:end] = True
    return mask


def ranges_of(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the ranges of the buckets that are set in `mask`, as few as possible.

    Example:
        >>> ranges_of(mask_of([(0, 5), (5, 7), (9, 10)]))
        ((0, 7), (9, 10))
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))
