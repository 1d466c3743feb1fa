"""What servers say about what they own, asked one by one or all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from monolith.errors import DeadlineExceededError, OwnershipChangedError, UnavailableError
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import Buckets
from monolith.transport.frames import Frame
from monolith.transport.link import Link, finish_each

__all__ = ["ask_buckets", "ask_each", "buckets_in", "has_left", "misses_dense", "takers_of"]

ASK_SECONDS = 2.0
"""How long a server that does not answer holds up those that ask all of them."""


def ask_buckets(link: Link) -> Buckets:
    """What the server says about itself."""
    return Buckets.from_json(link.call(Call.BUCKETS).text)


def ask_each(links: Sequence[Link]) -> dict[Link, Frame | Exception]:
    """What each answers."""
    seconds = [min(link.timeout, ASK_SECONDS) for link in links]
    outcomes = finish_each(
        [link.begin(Call.BUCKETS, "{}", timeout=limit) for link, limit in zip(links, seconds, strict=True)]
    )
    return dict(zip(links, outcomes, strict=True))


def buckets_in(outcome: Frame | Exception | None) -> Buckets | None:
    """What a server says; None: it does not answer, or was not asked."""
    if outcome is None or isinstance(outcome, UnavailableError | DeadlineExceededError | OwnershipChangedError):
        return None
    if isinstance(outcome, Exception):
        raise outcome
    return Buckets.from_json(outcome.text)


def misses_dense(told: Iterable[Buckets | None]) -> bool:
    """Whether dense parameters were given to servers that were not asked."""
    known = [one for one in told if one is not None]
    held = {name for one in known for name in one.dense}
    return any(name not in held for one in known for name in one.gave_dense)


def takers_of(told: Iterable[Buckets | None]) -> set[str]:
    """Where those that answered have given something, or are giving it."""
    known = [one for one in told if one is not None]
    return {address for one in known for address in one.gave} | {one.giving.taker for one in known if one.giving}


def has_left(told: Buckets) -> bool:
    """Whether the server has given away all that it owned."""
    return told.version > 0 and told.giving is None and not told.ranges and not told.dense
