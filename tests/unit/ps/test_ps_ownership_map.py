"""Danger: a map assigns buckets to no server or to two, or a hostile map is trusted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.ps.protocol.control_messages import Buckets
from monolith.ps.protocol.ownership import NOBODY, OwnedByServer, OwnershipMap
from monolith.ps.rebalance.client import planned_moves
from monolith.table.buckets import NUM_BUCKETS, mask_of, ranges_of


def described(*servers: tuple[str, object, object]) -> str:
    return json.dumps({"servers": [{"address": a, "version": v, "ranges": r} for a, v, r in servers]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (described(("a:1", 2**63, [])), "version"),
        (described(("a:1", -1, [])), "version"),
        (described(("a:1", "1", [])), "version"),
        (described(("a:1", 1, [[0, 5000]])), "ranges"),
        (described(("a:1", 1, [[-1, 5]])), "ranges"),
        (described(("a:1", 1, [[5, 5]])), "first bucket"),
        (described(("a:1", 1, [[9, 5]])), "first bucket"),
        (described(("a:1", 1, [[0, 10], [9, 20]])), "do not overlap"),
        (described(("a:1", 1, [[10, 20], [0, 5]])), "in order"),
        (described(("a:1", 1, [[0, 10]]), ("b:1", 1, [[9, 20]])), "at most one owner"),
        (described(("a:1", 1, []), ("a:1", 1, [])), "each server once"),
        (described(("nowhere", 1, [])), "host:port"),
        (described(("a/b:1", 1, [])), "host:port"),
        (described(("a:70000", 1, [])), "host:port"),
        ('{"servers": [], "more": 1}', "unknown field"),
        ("[]", "OwnershipMap"),
        ("{", "OwnershipMap"),
    ],
)
def test_a_map_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OwnershipMap.from_json(text)


def test_what_a_server_says_is_checked_before_it_is_believed() -> None:
    good = Buckets(server=1, version=2, ranges=((0, 5),)).model_dump()
    for change in ({"version": 2**63}, {"ranges": [[0, 9], [3, 12]]}, {"server": -1}, {"gave": ["no address"]}):
        with pytest.raises(ConfigError):
            Buckets.from_json(json.dumps({**good, **change}))


def test_ranges_and_buckets_say_the_same() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        mask = rng.random(NUM_BUCKETS) < 0.5
        assert (mask_of(ranges_of(mask)) == mask).all()
    with_hole = OwnershipMap(servers=(OwnedByServer(address="a:1", version=3, ranges=((0, 7), (9, NUM_BUCKETS))),))
    assert with_hole.holes() == ((7, 9),)
    assert with_hole.owners()[[0, 7, 8, 9]].tolist() == [0, NOBODY, NOBODY, 0]
    assert OwnershipMap.from_json(with_hole.model_dump_json()) == with_hole


def after(current: OwnershipMap, addresses: list[str]) -> tuple[OwnershipMap, int]:
    """The map after the planned moves, and how many buckets they move."""
    owned = {server.address: mask_of(server.ranges) for server in current.servers}
    moves = planned_moves(current, addresses)
    for move in moves:
        piece = mask_of([(move.buckets.start, move.buckets.stop)])
        assert (owned[move.source] & piece).sum() == len(move.buckets)
        owned[move.source] &= ~piece
        owned[move.destination] = owned.get(move.destination, np.zeros(NUM_BUCKETS, dtype=np.bool_)) | piece
    servers = tuple(OwnedByServer(address=a, ranges=ranges_of(mask)) for a, mask in owned.items() if mask.any())
    return OwnershipMap(servers=servers), sum(len(move.buckets) for move in moves)


def test_plans_end_in_equal_shares_and_move_no_bucket_that_need_not() -> None:
    rng = np.random.default_rng(1)
    names = [f"s{number}:1" for number in range(9)]
    current = OwnershipMap.even(names[:2])
    for _ in range(60):
        wanted = list(rng.choice(names, size=int(rng.integers(1, 10)), replace=False))
        sizes = {server.address: int(mask_of(server.ranges).sum()) for server in current.servers}
        current, moved = after(current, wanted)
        assert sorted(current.addresses) == sorted(wanted)
        assert current.holes() == ()
        shares = [int(mask_of(server.ranges).sum()) for server in current.servers]
        assert max(shares) - min(shares) <= 1
        # Fewer cannot do: of what each has, at most its share stays, and the larger shares go to those that have most.
        share, odd = divmod(NUM_BUCKETS, len(wanted))
        staying = sorted((sizes.get(name, 0) for name in wanted), reverse=True)
        kept = sum(min(have, share + (place < odd)) for place, have in enumerate(staying))
        assert moved == NUM_BUCKETS - kept


def test_a_group_that_is_as_wanted_moves_nothing_and_one_with_a_hole_is_not_planned_for() -> None:
    even = OwnershipMap.even(["a:1", "b:1", "c:1"])
    assert planned_moves(even, ["c:1", "a:1", "b:1"]) == []
    torn = OwnershipMap(servers=(OwnedByServer(address="a:1", version=1, ranges=((0, 100),)),))
    with pytest.raises(InvalidArgumentError, match="no server owns"):
        planned_moves(torn, ["a:1", "b:1"])
