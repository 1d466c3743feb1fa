"""Moving buckets between the servers of a group until each has its share, and dense parameters from those that leave."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import numpy as np

from monolith.errors import InvalidArgumentError, MonolithError, UnavailableError
from monolith.ps.client.routes import ask_buckets
from monolith.ps.client.server_group import ClientConfig, link_to
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import Buckets, Giving, MoveBuckets, Moved, TakeBack, TakenBack
from monolith.ps.protocol.ownership import OwnershipMap, mask_of, ranges_of
from monolith.table.buckets import NUM_BUCKETS
from monolith.transport.addresses import distinct_addresses
from monolith.transport.link import Link

__all__ = [
    "BucketMove",
    "DenseMove",
    "SettledPiece",
    "planned_dense_moves",
    "planned_moves",
    "rebalance_buckets",
    "take_back_buckets",
]


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


PAUSE = 0.2
"""Seconds until a taker that is missing is asked again."""
WAIT = 5.0
"""Seconds after which a giver says that a piece is still on its way."""


def rebalance_buckets(
    current: OwnershipMap,
    addresses: Sequence[str],
    links: Mapping[str, Link],
    *,
    report: Callable[[int, int], None],
    timeout: float,
) -> None:
    """Move buckets from what `current` says until the servers at `addresses` own all; `links` lead to all of both."""
    moves = planned_moves(current, addresses)
    planned, moved = sum(len(move.buckets) for move in moves), 0
    number = secrets.randbits(62) | 1
    try:
        # First: a server that owns no bucket and does not answer has then nothing that workers would wait for.
        for dense in planned_dense_moves(_held(links, timeout), addresses):
            while _next_piece(dense, links[dense.giver], number, timeout) is not None:
                pass
        for move in moves:
            while (piece := _next_piece(move, links[move.giver], number, timeout)) is not None:
                moved += piece
                report(moved, planned)
    finally:
        for address, link in links.items():
            # So that somebody else may move at once; whoever cannot be told waits for the lease.
            with suppress(MonolithError):
                _ask_move(link, MoveBuckets(taker=address, rebalance=number, wait=0.0))


def _held(links: Mapping[str, Link], timeout: float) -> dict[str, dict[str, int]]:
    """The dense parameters of each server, by address, when none is on its way."""
    deadline = time.monotonic() + timeout
    while True:
        told = {address: ask_buckets(link) for address, link in links.items()}
        giving = next((one.giving for one in told.values() if one.giving is not None), None)
        if giving is None:
            return {address: dict(zip(one.dense, one.dense_bytes, strict=True)) for address, one in told.items()}
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"{giving} are on their way to {giving.taker}, which does not answer; start it again, and they arrive by "
                "themselves"
            )
        time.sleep(PAUSE)


def _next_piece(move: BucketMove | DenseMove, giver: Link, number: int, timeout: float) -> int | None:
    """Let `giver` give one piece and wait until it has arrived; how many buckets, or None if nothing was left."""
    deadline = time.monotonic() + timeout
    wanted = MoveBuckets(
        buckets=(move.buckets.start, move.buckets.stop) if isinstance(move, BucketMove) else None,
        dense=move.names if isinstance(move, DenseMove) else (),
        taker=move.taker,
        rebalance=number,
        wait=min(WAIT, timeout / 2),
    )
    while True:
        moved = _ask_move(giver, wanted)
        if (moved.buckets is not None or moved.dense) and not moved.pending:
            return 0 if moved.buckets is None else moved.buckets[1] - moved.buckets[0]
        if not moved.pending and moved.missing is None:
            return None
        if time.monotonic() >= deadline:
            raise UnavailableError(f"{_why(moved, move)}; tried for {timeout:g} s")
        time.sleep(0.0 if moved.pending else PAUSE)


def _why(moved: Moved, move: BucketMove | DenseMove) -> str:
    if not moved.pending:
        return f"{move.taker} cannot be given anything: {moved.missing}"
    what = f"{len(moved.dense)} dense parameters" if moved.buckets is None else f"the buckets {moved.buckets}"
    return (
        f"{what} are on their way from {move.giver} to {move.taker}, which does not answer; start it again, and they arrive "
        "by themselves"
    )


def _ask_move(giver: Link, move: MoveBuckets) -> Moved:
    return Moved.from_json(giver.call(Call.MOVE_BUCKETS, move.model_dump_json()).text)


@dataclass(frozen=True, kw_only=True)
class SettledPiece:
    """A piece that was on its way, and is no longer: buckets, or dense parameters."""

    giver: str
    taker: str
    buckets: tuple[int, int] | None = None
    dense: tuple[str, ...] = ()
    owner: str
    """Who owns it now: the giver, or the taker, which had it already."""


def take_back_buckets(
    addresses: Sequence[str], *, lost: Sequence[str] = (), config: ClientConfig | None = None
) -> list[SettledPiece]:
    """Settle every piece that the servers at `addresses` are giving away and whose takers do not come for it.

    Each giver asks its taker. One that has the piece keeps it; one that has not never takes it from then on, and the giver
    owns it again, with every update. A taker that cannot be asked may have the piece: `UnavailableError`, and nothing has
    changed, unless it is `lost`.

    Args:
        addresses: of all servers that are left.
        lost: takers that are lost for good with their folders, as `--replace-lost` of `monolith rebalance`: updates that they
            may have acknowledged since they had the piece are given up. They must never be started again on those folders.

    Example:
        >>> from monolith.ps import ParameterServer, ServerStore, take_back_buckets
        >>> with ParameterServer() as one, ParameterServer() as two, ServerStore([one.address, two.address]):
        ...     take_back_buckets([one.address, two.address])  # nothing is on its way
        []
    """
    known = config or ClientConfig()
    with ExitStack() as stack:
        links = {at: stack.enter_context(closing(link_to(at, known))) for at in distinct_addresses(addresses)}
        told = {address: ask_buckets(link) for address, link in links.items()}
        pieces = {address: one.giving for address, one in told.items() if one.giving is not None}
        _require_lost(lost, pieces, told)
        return [
            _settled(links[giver], giving, lost=giving.taker in lost, timeout=known.timeout)
            for giver, giving in pieces.items()
        ]


def _require_lost(lost: Sequence[str], pieces: Mapping[str, Giving], told: Mapping[str, Buckets]) -> None:
    takers = {giving.taker for giving in pieces.values()}
    for address in lost:
        if address in told:
            raise InvalidArgumentError(f"lost: {address} answers; ask without it being lost")
        if address not in takers:
            named = ", ".join(sorted(takers)) or "nobody"
            raise InvalidArgumentError(f"lost: nothing is on its way to {address}, but to {named}")
    for giver, giving in pieces.items():
        for address, one in told.items():
            if giving.taker in lost and _has_some(one, giving):
                raise InvalidArgumentError(
                    f"lost: {address} owns some of {giving}: {giving.taker} had them from {giver} and has given them on; "
                    "start it again"
                )


def _has_some(told: Buckets, giving: Giving) -> bool:
    if giving.buckets is None:
        return not set(told.dense).isdisjoint(giving.dense)
    return bool((mask_of(told.ranges) & mask_of([giving.buckets])).any())


def _settled(link: Link, giving: Giving, *, lost: bool, timeout: float) -> SettledPiece:
    number, deadline = secrets.randbits(62) | 1, time.monotonic() + timeout
    try:
        while True:
            back = _ask_take_back(link, giving, lost=lost, number=number, wait=min(WAIT, timeout / 2))
            if back.missing is not None:
                raise UnavailableError(
                    f"{giving} are on their way from {link.address} to {giving.taker}, which may have them "
                    f"and cannot be asked: {back.missing}; start it again, or say that it is lost for good"
                )
            if not back.pending:
                owner = giving.taker if back.arrived else link.address
                return SettledPiece(
                    giver=link.address, taker=giving.taker, buckets=giving.buckets, dense=giving.dense, owner=owner
                )
            if time.monotonic() >= deadline:
                raise UnavailableError(f"{link.address} was asking {giving.taker} for {timeout:g} s; try again")
    finally:
        # So that somebody else may move at once; whoever cannot be told waits for the lease.
        with suppress(MonolithError):
            done = MoveBuckets(taker=giving.taker, rebalance=number, wait=0.0)
            link.call(Call.MOVE_BUCKETS, done.model_dump_json())


def _ask_take_back(link: Link, giving: Giving, *, lost: bool, number: int, wait: float) -> TakenBack:
    back = TakeBack(lost=giving.taker if lost else None, rebalance=number, wait=wait)
    taken = TakenBack.from_json(link.call(Call.TAKE_BACK, back.model_dump_json()).text)
    if taken.found:
        return taken
    # It was settled by itself meanwhile: taken, or refused by the taker.
    return TakenBack(found=True, arrived=not _has_some(ask_buckets(link), giving))
