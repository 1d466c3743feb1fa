"""Buckets: the ids of a model in parts of about equal size. Owners, files and restores are arranged by bucket."""

from __future__ import annotations

import numpy as np

from monolith import _core
from monolith.errors import InvalidArgumentError
from monolith.table.arrays import Ids, id_array

__all__ = ["NUM_BUCKETS", "bucket_bounds", "bucket_of"]

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
    """First bucket and the one behind the last; None means all of them.

    Example:
        >>> bucket_bounds(range(1024, 2048)), bucket_bounds(None)
        ((1024, 2048), (0, 4096))
    """
    if buckets is None:
        return 0, NUM_BUCKETS
    if not isinstance(buckets, range) or buckets.step != 1 or not 0 <= buckets.start <= buckets.stop <= NUM_BUCKETS:
        raise InvalidArgumentError(f"buckets: expected range(first, last) within range({NUM_BUCKETS}), got {buckets!r}")
    return buckets.start, buckets.stop
