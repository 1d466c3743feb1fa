"""Who owns an id: a fixed number of buckets by hash, contiguous ranges of them for each server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.table.buckets import NUM_BUCKETS

__all__ = ["bucket_owners", "bucket_ranges"]


def bucket_ranges(count: int) -> list[range]:
    """The buckets of each of `count` servers: contiguous, as equal as possible, together all of them.

    Example:
        >>> bucket_ranges(3)
        [range(0, 1365), range(1365, 2730), range(2730, 4096)]
    """
    if not 1 <= count <= NUM_BUCKETS:
        raise InvalidArgumentError(f"count: expected 1..{NUM_BUCKETS} servers, got {count}")
    bounds = [number * NUM_BUCKETS // count for number in range(count + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def bucket_owners(ranges: Sequence[range], count: int) -> np.ndarray:
    """The number of the server of every bucket, int64 [NUM_BUCKETS]."""
    if len(ranges) != count:
        raise ConfigError(f"ranges: expected one for each of {count} servers, got {len(ranges)}")
    owners = np.full(NUM_BUCKETS, -1, dtype=np.int64)
    for number, buckets in enumerate(ranges):
        if buckets.step != 1 or not 0 <= buckets.start <= buckets.stop <= NUM_BUCKETS:
            raise ConfigError(f"ranges[{number}]: expected consecutive buckets of 0..{NUM_BUCKETS - 1}, got {buckets}")
        if (owners[buckets.start : buckets.stop] >= 0).any():
            raise ConfigError(f"ranges[{number}]: some of {buckets} belong to an earlier server already")
        owners[buckets.start : buckets.stop] = number
    if (owners < 0).any():
        raise ConfigError(f"ranges: nobody owns bucket {int(np.argmin(owners))}; every bucket needs an owner")
    return owners
