"""The client's side of moving buckets: the plan, its execution, and taking back transfers."""

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
from monolith.ps.protocol.control_messages import Buckets, MoveBuckets, Moved, OutgoingTransfer, TakeBack, TakenBack
from monolith.ps.protocol.ownership import OwnershipMap
from monolith.table.buckets import NUM_BUCKETS, mask_of, ranges_of
from monolith.transport.addresses import distinct_addresses
from monolith.transport.link import Link

__all__ = [
    "BucketMove",
    "DenseMove",
    "SettledTransfer",
    "planned_dense_moves",
    "planned_moves",
    "rebalance_buckets",
    "take_back_buckets",
]


@dataclass(frozen=True, kw_only=True)
class BucketMove:
    """Buckets to move from one server to another."""

    source: str
    destination: str
    buckets: range


@dataclass(frozen=True, kw_only=True)
class DenseMove:
    """Dense parameters to move from one server to another."""

    source: str
    destination: str
    names: tuple[str, ...]


def planned_dense_moves(held: Mapping[str, Mapping[str, int]], addresses: Sequence[str]) -> list[DenseMove]:
    """Return the moves after which only servers at `addresses` hold dense parameters. `held`: bytes by server and name.

    Only the parameters of servers that leave move: the largest first, each to the server with the fewest bytes.

    Example:
        >>> planned_dense_moves({"a:1": {"v": 8}, "b:1": {"w": 4, "x": 6}}, ["a:1", "c:1"])
        [DenseMove(source='b:1', destination='c:1', names=('x', 'w'))]
    """
    sizes = {address: sum(held.get(address, {}).values()) for address in addresses}
    moves: dict[tuple[str, str], list[str]] = {}
    leaving = [(size, name, at) for at, one in held.items() if at not in sizes for name, size in one.items()]
    for size, name, source in sorted(leaving, key=lambda one: (-one[0], one[1])):
        destination = min(addresses, key=lambda address: sizes[address])
        sizes[destination] += size
        moves.setdefault((source, destination), []).append(name)
    return [
        DenseMove(source=source, destination=destination, names=tuple(names))
        for (source, destination), names in moves.items()
    ]


def planned_moves(current: OwnershipMap, addresses: Sequence[str]) -> list[BucketMove]:
    """Return the moves after which the servers at `addresses`, and no others, own all buckets, as equally as possible.

    No other plan with this result moves fewer buckets. A server gives up its last buckets first.

    Example:
        >>> two = OwnershipMap.even(["a:1", "b:1"])
        >>> [(move.source, move.destination, len(move.buckets)) for move in planned_moves(two, ["a:1", "b:1", "c:1"])]
        [('a:1', 'c:1', 682), ('b:1', 'c:1', 683)]
    """
    if holes := current.holes():
        raise InvalidArgumentError(
            f"no server owns the buckets {list(holes)}; they are in transit, or a server is missing"
        )
    owned = {server.address: mask_of(server.ranges) for server in current.servers}
    sizes = {address: int(mask.sum()) for address, mask in owned.items()}
    targets = _targets(sizes, addresses)
    sources = [
        (address, _from_the_end(owned[address], size - targets.get(address, 0))) for address, size in sizes.items()
    ]
    destinations = [(address, targets[address] - sizes.get(address, 0)) for address in addresses]
    return _matched(sources, destinations)


def _targets(sizes: dict[str, int], addresses: Sequence[str]) -> dict[str, int]:
    share, larger = divmod(NUM_BUCKETS, len(addresses))
    # The server with the most buckets keeps an odd one, which then need not move.
    by_size = sorted(addresses, key=lambda address: -sizes.get(address, 0))
    return {address: share + (index < larger) for index, address in enumerate(by_size)}


def _from_the_end(mask: np.ndarray, count: int) -> np.ndarray:
    """Return the last `count` buckets of `mask`, in order."""
    owned = np.flatnonzero(mask)
    return owned[len(owned) - max(count, 0) :]


def _matched(sources: list[tuple[str, np.ndarray]], destinations: list[tuple[str, int]]) -> list[BucketMove]:
    moves = []
    left = [(address, buckets) for address, buckets in sources if len(buckets)]
    for destination, capacity in destinations:
        while capacity > 0:
            source, buckets = left.pop(0)
            taken, rest = buckets[:capacity], buckets[capacity:]
            capacity -= len(taken)
            if len(rest):
                left.insert(0, (source, rest))
            taken_mask = np.zeros(NUM_BUCKETS, dtype=np.bool_)
            taken_mask[taken] = True
            moves += [
                BucketMove(source=source, destination=destination, buckets=range(*bounds))
                for bounds in ranges_of(taken_mask)
            ]
    return moves


MOVE_RETRY_SECONDS = 0.2
"""Seconds until a move to an unreachable destination is tried again."""
MOVE_WAIT = 5.0
"""Seconds after which a source answers that a transfer is still in transit."""


def rebalance_buckets(
    current: OwnershipMap,
    addresses: Sequence[str],
    links: Mapping[str, Link],
    *,
    report: Callable[[int, int], None],
    timeout: float,
) -> None:
    """Move buckets, starting from `current`, until the servers at `addresses` own all. `links` has the servers of both."""
    moves = planned_moves(current, addresses)
    planned, moved = sum(len(move.buckets) for move in moves), 0
    number = secrets.randbits(62) | 1
    try:
        # First: a server without buckets that stops answering then holds nothing that workers wait for.
        for dense in planned_dense_moves(_held(links, timeout), addresses):
            while _next_transfer(dense, links[dense.source], number, timeout) is not None:
                pass
        for move in moves:
            while (count := _next_transfer(move, links[move.source], number, timeout)) is not None:
                moved += count
                report(moved, planned)
    finally:
        for address, link in links.items():
            # Another client may move buckets at once. On a server that does not answer, the lease must expire first.
            with suppress(MonolithError):
                _ask_move(link, MoveBuckets(taker=address, rebalance=number, wait=0.0))


def _held(links: Mapping[str, Link], timeout: float) -> dict[str, dict[str, int]]:
    """Return the dense parameters of each server and their bytes, when none is in transit."""
    deadline = time.monotonic() + timeout
    while True:
        owned = {address: ask_buckets(link) for address, link in links.items()}
        giving = next((one.giving for one in owned.values() if one.giving is not None), None)
        if giving is None:
            return {address: dict(zip(one.dense, one.dense_bytes, strict=True)) for address, one in owned.items()}
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"{giving} are in transit to {giving.taker}, which does not answer; start it again, and they arrive by "
                "themselves"
            )
        time.sleep(MOVE_RETRY_SECONDS)


def _next_transfer(move: BucketMove | DenseMove, source: Link, number: int, timeout: float) -> int | None:
    """Let `source` move one transfer and wait until it has arrived. Returns the number of buckets, None if nothing was left."""
    deadline = time.monotonic() + timeout
    wanted = MoveBuckets(
        buckets=(move.buckets.start, move.buckets.stop) if isinstance(move, BucketMove) else None,
        dense=move.names if isinstance(move, DenseMove) else (),
        taker=move.destination,
        rebalance=number,
        wait=min(MOVE_WAIT, timeout / 2),
    )
    while True:
        moved = _ask_move(source, wanted)
        if (moved.buckets is not None or moved.dense) and not moved.pending:
            return 0 if moved.buckets is None else moved.buckets[1] - moved.buckets[0]
        if not moved.pending and moved.missing is None:
            return None
        if time.monotonic() >= deadline:
            raise UnavailableError(f"{_why(moved, move)}; tried for {timeout:g} s")
        time.sleep(0.0 if moved.pending else MOVE_RETRY_SECONDS)


def _why(moved: Moved, move: BucketMove | DenseMove) -> str:
    if not moved.pending:
        return f"{move.destination} cannot accept anything: {moved.missing}"
    what = f"{len(moved.dense)} dense parameters" if moved.buckets is None else f"the buckets {moved.buckets}"
    return (
        f"{what} are in transit from {move.source} to {move.destination}, which does not answer; start it again, and they arrive "
        "by themselves"
    )


def _ask_move(source: Link, move: MoveBuckets) -> Moved:
    return Moved.from_json(source.call(Call.MOVE_BUCKETS, move.model_dump_json()).text)


@dataclass(frozen=True, kw_only=True)
class SettledTransfer:
    """A transfer of buckets or dense parameters that is no longer in transit."""

    source: str
    destination: str
    buckets: tuple[int, int] | None = None
    dense: tuple[str, ...] = ()
    owner: str
    """Its owner now: the source, or the destination if it had it already."""


def take_back_buckets(
    addresses: Sequence[str], *, lost: Sequence[str] = (), config: ClientConfig | None = None
) -> list[SettledTransfer]:
    """Settle every transfer in transit from the servers at `addresses`, such as those whose destination is down.

    Each source asks its destination. A destination that has the transfer keeps it. One that does not have it will never accept
    it, and the source owns it again with every update. A destination that does not answer may have the transfer:
    `UnavailableError` is raised and nothing has changed, unless it is `lost`.

    Args:
        addresses: all remaining servers.
        lost: destinations that are lost for good with their folders, as `--replace-lost` of `monolith rebalance`. Updates that
            they may have acknowledged since they had the transfer are lost. Never start them again on those folders.

    Example:
        >>> from monolith.ps import ParameterServer, ServerStore, take_back_buckets
        >>> with ParameterServer() as one, ParameterServer() as two, ServerStore([one.address, two.address]):
        ...     take_back_buckets([one.address, two.address])  # nothing is in transit
        []
    """
    known = config or ClientConfig()
    with ExitStack() as stack:
        links = {at: stack.enter_context(closing(link_to(at, known))) for at in distinct_addresses(addresses)}
        owned = {address: ask_buckets(link) for address, link in links.items()}
        outgoing = {address: one.giving for address, one in owned.items() if one.giving is not None}
        _require_lost(lost, outgoing, owned)
        return [
            _settled(links[source], giving, lost=giving.taker in lost, timeout=known.timeout)
            for source, giving in outgoing.items()
        ]


def _require_lost(lost: Sequence[str], outgoing: Mapping[str, OutgoingTransfer], owned: Mapping[str, Buckets]) -> None:
    destinations = {giving.taker for giving in outgoing.values()}
    for address in lost:
        if address in owned:
            raise InvalidArgumentError(f"lost: {address} answers, so it is not lost; leave it out")
        if address not in destinations:
            named = ", ".join(sorted(destinations)) or "nobody"
            raise InvalidArgumentError(f"lost: nothing is in transit to {address}, but to {named}")
    for source, giving in outgoing.items():
        for address, one in owned.items():
            if giving.taker in lost and _has_some(one, giving):
                raise InvalidArgumentError(
                    f"lost: {address} owns some of {giving}: {giving.taker} had them from {source} and has moved them on; "
                    "start it again"
                )


def _has_some(told: Buckets, giving: OutgoingTransfer) -> bool:
    if giving.buckets is None:
        return not set(told.dense).isdisjoint(giving.dense)
    return bool((mask_of(told.ranges) & mask_of([giving.buckets])).any())


def _settled(link: Link, giving: OutgoingTransfer, *, lost: bool, timeout: float) -> SettledTransfer:
    number, deadline = secrets.randbits(62) | 1, time.monotonic() + timeout
    try:
        while True:
            back = _ask_take_back(link, giving, lost=lost, number=number, wait=min(MOVE_WAIT, timeout / 2))
            if back.missing is not None:
                raise UnavailableError(
                    f"{giving} are in transit from {link.address} to {giving.taker}, which may have them "
                    f"and cannot be asked: {back.missing}; start it again, or declare it lost"
                )
            if not back.pending:
                owner = giving.taker if back.arrived else link.address
                return SettledTransfer(
                    source=link.address,
                    destination=giving.taker,
                    buckets=giving.buckets,
                    dense=giving.dense,
                    owner=owner,
                )
            if time.monotonic() >= deadline:
                raise UnavailableError(f"{link.address} was asking {giving.taker} for {timeout:g} s; try again")
    finally:
        # Another client may move buckets at once. On a server that does not answer, the lease must expire first.
        with suppress(MonolithError):
            done = MoveBuckets(taker=giving.taker, rebalance=number, wait=0.0)
            link.call(Call.MOVE_BUCKETS, done.model_dump_json())


def _ask_take_back(link: Link, giving: OutgoingTransfer, *, lost: bool, number: int, wait: float) -> TakenBack:
    back = TakeBack(lost=giving.taker if lost else None, rebalance=number, wait=wait)
    taken = TakenBack.from_json(link.call(Call.TAKE_BACK, back.model_dump_json()).text)
    if taken.found:
        return taken
    # It was settled in the meantime: accepted or refused by the destination.
    return TakenBack(found=True, arrived=not _has_some(ask_buckets(link), giving))
