"""Who owns an id: a fixed number of buckets by hash, contiguous ranges of them for each server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monolith.errors import ConfigError
from monolith.table.buckets import NUM_BUCKETS

__all__ = ["bucket_owners"]


def bucket_owners(ranges: Sequence[range], count: int) -> np.ndarray:
    """The number of the server of every bucket, int64 [NUM_BUCKETS]; `ranges` says who owns which.

    Example:
        >>> bucket_owners([range(0, 1000), range(1000, 4096)], 2)[[0, 999, 1000, 4095]].tolist()
        [0, 0, 1, 1]
    """
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
