"""Which server owns which buckets.

Every server alone decides which buckets it owns. It counts a version, which grows whenever it loses or gains buckets, and a
request names the version that its client knows. A request that was split before the server lost buckets is refused before
anything happens. A request from before the server gained buckets is served: it uses none of them. No two maps of one version
can exist. The map of a group is the union of what its servers own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from monolith.config import Config
from monolith.table.buckets import NUM_BUCKETS, bucket_owners, bucket_ranges, mask_of, ranges_of
from monolith.transport.addresses import Address

__all__ = ["BucketRange", "BucketRanges", "NOBODY", "OwnedByServer", "OwnershipMap"]

NOBODY = -1
"""The owner of a bucket that is in transit from one server to another."""


def _ordered(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] >= bounds[1]:
        raise ValueError("expected the first bucket and, larger, the one behind the last")
    return bounds


def _apart(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if any(one[1] > other[0] for one, other in pairwise(ranges)):
        raise ValueError("expected ranges in order that do not overlap")
    return ranges


_Bound = Annotated[int, Field(ge=0, le=NUM_BUCKETS)]
BucketRange = Annotated[tuple[_Bound, _Bound], AfterValidator(_ordered)]
"""The first bucket, and the one after the last."""
BucketRanges = Annotated[tuple[BucketRange, ...], Field(max_length=NUM_BUCKETS), AfterValidator(_apart)]
"""In order and disjoint. Empty: no bucket."""


class OwnedByServer(Config):
    """A server of a map, and the buckets that it owns."""

    address: Address
    version: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Which of its states this is. Grows when it gives buckets away or gains some. 0: it has never owned any."""
    ranges: BucketRanges = ()


class OwnershipMap(Config):
    """The servers of a group and which buckets each owns. JSON by `model_dump_json` and `from_json`.

    Example:
        >>> whole = OwnershipMap.even(["10.0.0.1:7100", "10.0.0.2:7100"])
        >>> [server.ranges for server in whole.servers], whole.holes()
        ([((0, 2048),), ((2048, 4096),)], ())
        >>> OwnershipMap.from_json(whole.model_dump_json()) == whole
        True
    """

    servers: tuple[OwnedByServer, ...]

    @model_validator(mode="after")
    def _consistent(self) -> OwnershipMap:
        addresses = [server.address for server in self.servers]
        if len(set(addresses)) != len(addresses):
            raise ValueError(f"expected each server once, got {', '.join(addresses)}")
        if sum(int(mask_of(server.ranges).sum()) for server in self.servers) > int((self.owners() != NOBODY).sum()):
            raise ValueError("expected at most one owner of every bucket")
        return self

    @classmethod
    def even(cls, addresses: Sequence[str], ranges: Sequence[range] | None = None) -> OwnershipMap:
        """What servers own at first: `ranges`, by default contiguous and as equal as possible."""
        wanted = bucket_ranges(len(addresses)) if ranges is None else list(ranges)
        bucket_owners(wanted, len(addresses))  # refuses overlaps and gaps in the words of a caller's argument
        return cls(
            servers=tuple(
                OwnedByServer(address=address, version=1, ranges=((mine.start, mine.stop),) if mine else ())
                for address, mine in zip(addresses, wanted, strict=True)
            )
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the servers are."""
        return tuple(server.address for server in self.servers)

    def owners(self) -> np.ndarray:
        """Return int64 [NUM_BUCKETS]: the number of the server of each bucket, or `NOBODY`."""
        owners = np.full(NUM_BUCKETS, NOBODY, dtype=np.int64)
        for number, server in enumerate(self.servers):
            owners[mask_of(server.ranges)] = number
        return owners

    def holes(self) -> tuple[tuple[int, int], ...]:
        """Buckets that no server of the map owns."""
        return ranges_of(self.owners() == NOBODY)
