"""Which buckets and dense parameters go where when the set of servers changes: as few as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from monolith.errors import InvalidArgumentError
from monolith.ps.protocol.ownership import OwnershipMap, mask_of, ranges_of
from monolith.table.buckets import NUM_BUCKETS

__all__ = ["BucketMove", "DenseMove", "planned_dense_moves", "planned_moves"]


@dataclass(frozen=True, kw_only=True)
class BucketMove:
    """Buckets that one server gives to another."""

    giver: str
    taker: str
    buckets: range


@dataclass(frozen=True, kw_only=True)
class DenseMove:
    """Dense parameters that one server gives to another."""

    giver: str
    taker: str
    names: tuple[str, ...]


def planned_dense_moves(held: Mapping[str, Mapping[str, int]], addresses: Sequence[str]) -> list[DenseMove]:
    """The moves after which only servers at `addresses` hold dense parameters; `held`: bytes by server and name.

    Only those of servers that leave move: the largest first, each to the server with the least so far.

    Example:
        >>> planned_dense_moves({"a:1": {"v": 8}, "b:1": {"w": 4, "x": 6}}, ["a:1", "c:1"])
        [DenseMove(giver='b:1', taker='c:1', names=('x', 'w'))]
    """
    sizes = {address: sum(held.get(address, {}).values()) for address in addresses}
    moves: dict[tuple[str, str], list[str]] = {}
    leaving = [(size, name, at) for at, one in held.items() if at not in sizes for name, size in one.items()]
    for size, name, giver in sorted(leaving, key=lambda one: (-one[0], one[1])):
        taker = min(addresses, key=lambda address: sizes[address])
        sizes[taker] += size
        moves.setdefault((giver, taker), []).append(name)
    return [DenseMove(giver=giver, taker=taker, names=tuple(names)) for (giver, taker), names in moves.items()]


def planned_moves(current: OwnershipMap, addresses: Sequence[str]) -> list[BucketMove]:
    """The moves after which the servers at `addresses`, and no others, own all buckets, as equally as possible.

    No other plan with that end moves fewer buckets. Servers give from the end of what they have.

    Example:
        >>> two = OwnershipMap.even(["a:1", "b:1"])
        >>> [(move.giver, move.taker, len(move.buckets)) for move in planned_moves(two, ["a:1", "b:1", "c:1"])]
        [('a:1', 'c:1', 682), ('b:1', 'c:1', 683)]
    """
    if holes := current.holes():
        raise InvalidArgumentError(
            f"nobody owns the buckets {list(holes)}; a move is under way, or a server is missing"
        )
    owned = {server.address: mask_of(server.ranges) for server in current.servers}
    sizes = {address: int(mask.sum()) for address, mask in owned.items()}
    targets = _targets(sizes, addresses)
    givers = [
        (address, _from_the_end(owned[address], size - targets.get(address, 0))) for address, size in sizes.items()
    ]
    takers = [(address, targets[address] - sizes.get(address, 0)) for address in addresses]
    return _matched(givers, takers)


def _targets(sizes: dict[str, int], addresses: Sequence[str]) -> dict[str, int]:
    share, larger = divmod(NUM_BUCKETS, len(addresses))
    # Who has most keeps the odd bucket: it need not move.
    by_size = sorted(addresses, key=lambda address: -sizes.get(address, 0))
    return {address: share + (place < larger) for place, address in enumerate(by_size)}


def _from_the_end(mask: np.ndarray, count: int) -> np.ndarray:
    """The last `count` buckets of `mask`, in order."""
    owned = np.flatnonzero(mask)
    return owned[len(owned) - max(count, 0) :]


def _matched(givers: list[tuple[str, np.ndarray]], takers: list[tuple[str, int]]) -> list[BucketMove]:
    moves = []
    left = [(address, buckets) for address, buckets in givers if len(buckets)]
    for taker, room in takers:
        while room > 0:
            giver, buckets = left.pop(0)
            taken, rest = buckets[:room], buckets[room:]
            room -= len(taken)
            if len(rest):
                left.insert(0, (giver, rest))
            taken_mask = np.zeros(NUM_BUCKETS, dtype=np.bool_)
            taken_mask[taken] = True
            moves += [BucketMove(giver=giver, taker=taker, buckets=range(*bounds)) for bounds in ranges_of(taken_mask)]
    return moves
