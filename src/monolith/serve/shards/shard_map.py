"""`ShardMap`: which shard has which bucket, and the choice among the replicas of a shard."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from monolith.serve.shards.shard_replica import ShardReplica
from monolith.table.buckets import NUM_BUCKETS, mask_of, ranges_of

__all__ = ["ServedShard", "ShardMap", "choose_replica", "shards_without"]

# Not the generator of the process, which a seeded program draws from.
_random = random.Random()

MOST_FAILURES = 2
"""A replica that has failed less often than this is asked again if its shard has no other one."""


@dataclass(frozen=True, kw_only=True)
class ServedShard:
    """The replicas of one shard."""

    ranges: tuple[tuple[int, int], ...]
    """Its buckets."""
    replicas: tuple[ShardReplica, ...]

    def __str__(self) -> str:
        buckets = ", ".join(f"{first}..{end - 1}" for first, end in self.ranges)
        return f"the shard of buckets {buckets}"


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """Which shard has which bucket at one moment."""

    shards: tuple[ServedShard, ...]
    owners: np.ndarray
    """int64 [NUM_BUCKETS]: the index of the shard of each bucket. The number of shards if no shard has it."""

    @classmethod
    def of(cls, shards: Iterable[ServedShard]) -> ShardMap:
        """Return the map of `shards`, which have no bucket in common, in the order of their buckets."""
        ordered = tuple(sorted(shards, key=lambda shard: shard.ranges))
        owners = np.full(NUM_BUCKETS, len(ordered), dtype=np.int64)
        for number, shard in enumerate(ordered):
            owners[mask_of(shard.ranges)] = number
        return cls(shards=ordered, owners=owners)

    @cached_property
    def groups(self) -> int:
        """Parts that ids are split into: one for each shard, and one more if some buckets have none."""
        return len(self.shards) + bool((self.owners == len(self.shards)).any())

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """The buckets that no shard has."""
        return ranges_of(self.owners == len(self.shards))


def choose_replica(shard: ServedShard, tried: Sequence[ShardReplica]) -> ShardReplica | None:
    """Return the less busy of two healthy replicas that were not tried. None if there is nobody to ask."""
    healthy = [replica for replica in shard.replicas if replica.healthy and replica not in tried]
    if not healthy:
        # One failure may have been that of an old stream. It is asked once more, if nobody else is there.
        healthy = [
            replica
            for replica in shard.replicas
            if replica.described is not None
            and replica.failures < MOST_FAILURES
            and tried.count(replica) < MOST_FAILURES
        ]
    drawn = _random.sample(healthy, min(2, len(healthy)))
    return min(drawn, key=lambda replica: replica.load, default=None)


def shards_without(shards: Iterable[ServedShard], replica: ShardReplica) -> list[ServedShard]:
    """Return the shards without a replica. A shard that has no other one is left out."""
    kept = [
        ServedShard(ranges=shard.ranges, replicas=tuple(one for one in shard.replicas if one is not replica))
        for shard in shards
    ]
    return [shard for shard in kept if shard.replicas]
