"""Shards of now and shards of then: who had the ids that a shard has."""

from __future__ import annotations

from collections.abc import Sequence

from monolith.state.manifest import ShardEntry
from monolith.table import bucket_ranges

__all__ = ["saved_shard", "shard_buckets"]


def shard_buckets(count: int, buckets: range | None = None) -> list[range]:
    """The buckets of each of `count` shards in this process: all of them divided, or the same `buckets` for each.

    Example:
        >>> shard_buckets(2), shard_buckets(1, range(1024))
        ([range(0, 2048), range(2048, 4096)], [range(0, 1024)])
    """
    return bucket_ranges(count) if buckets is None else [buckets] * count


def saved_shard(saved: Sequence[ShardEntry], buckets: range) -> ShardEntry | None:
    """The saved shard that had all ids of `buckets`; None if they were in several."""
    for owned, entry in zip(bucket_ranges(max(len(saved), 1)), saved, strict=False):
        if owned.start <= buckets.start and buckets.stop <= owned.stop:
            return entry
    return None
