"""Shards of now and shards of then: who had the ids that a shard has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monolith.checkpoint.manifest import ShardEntry
from monolith.table import bucket_ranges

__all__ = ["Shard", "saved_shard", "shards_of"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which part of a table it is: number `number` of `count`, with the ids of `buckets`."""

    number: int
    count: int
    buckets: range


def shards_of(count: int, buckets: range | None = None) -> list[Shard]:
    """The shards of a table in this process: `count` equal ones, or each with the same `buckets`.

    Example:
        >>> [shard.buckets for shard in shards_of(2)]
        [range(0, 2048), range(2048, 4096)]
    """
    ranges = bucket_ranges(count) if buckets is None else [buckets] * count
    return [Shard(number=number, count=count, buckets=owned) for number, owned in enumerate(ranges)]


def saved_shard(saved: Sequence[ShardEntry], shard: Shard) -> ShardEntry | None:
    """The saved shard that had all ids of `shard`; None if they were in several."""
    if len(saved) == shard.count:
        return saved[shard.number]
    for owned, entry in zip(bucket_ranges(max(len(saved), 1)), saved, strict=False):
        if owned.start <= shard.buckets.start and shard.buckets.stop <= owned.stop:
            return entry
    return None
