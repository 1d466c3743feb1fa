"""Taking back what is on its way to a server that does not come for it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

from monolith.errors import InvalidArgumentError, MonolithError, UnavailableError
from monolith.ps.client.bucket_answers import ask_buckets
from monolith.ps.client.server_group import ClientConfig, link_to
from monolith.ps.protocol.bucket_messages import Buckets, Giving, MoveBuckets, TakeBack, TakenBack
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.ownership import mask_of
from monolith.transport.addresses import distinct_addresses
from monolith.transport.link import Link

__all__ = ["SettledPiece", "take_back_buckets"]

WAIT = 5.0
"""Seconds after which a giver says that it is still asking the taker."""


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
            back = _ask(link, giving, lost=lost, number=number, wait=min(WAIT, timeout / 2))
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


def _ask(link: Link, giving: Giving, *, lost: bool, number: int, wait: float) -> TakenBack:
    back = TakeBack(lost=giving.taker if lost else None, rebalance=number, wait=wait)
    taken = TakenBack.from_json(link.call(Call.TAKE_BACK, back.model_dump_json()).text)
    if taken.found:
        return taken
    # It was settled by itself meanwhile: taken, or refused by the taker.
    return TakenBack(found=True, arrived=not _has_some(ask_buckets(link), giving))
