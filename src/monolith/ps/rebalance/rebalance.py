"""Moving buckets between the servers of a group until each has its share, and dense parameters from those that leave."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from monolith.errors import MonolithError, UnavailableError
from monolith.ps.client.bucket_answers import ask_buckets
from monolith.ps.protocol.bucket_messages import MoveBuckets, Moved
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.ownership import OwnershipMap
from monolith.ps.rebalance.plan import BucketMove, DenseMove, planned_dense_moves, planned_moves
from monolith.transport.link import Link

__all__ = ["rebalance_buckets"]

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
                _ask(link, MoveBuckets(taker=address, rebalance=number, wait=0.0))


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
        moved = _ask(giver, wanted)
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


def _ask(giver: Link, move: MoveBuckets) -> Moved:
    return Moved.from_json(giver.call(Call.MOVE_BUCKETS, move.model_dump_json()).text)
