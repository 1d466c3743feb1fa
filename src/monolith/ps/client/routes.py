"""`ServerRoutes`: which server owns which id, as the servers of a group say, kept up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    MonolithError,
    OwnershipChangedError,
    ServerRestartedError,
    UnavailableError,
)
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import Buckets, OwnBuckets
from monolith.ps.protocol.ownership import OwnedByServer, OwnershipMap
from monolith.table.buckets import NUM_BUCKETS, mask_of, ranges_of
from monolith.transport.frames import Frame
from monolith.transport.link import Link, finish_each

__all__ = [
    "Route",
    "ServerRoutes",
    "ask_buckets",
    "ask_each",
    "buckets_in",
    "destinations_of",
    "has_left",
    "misses_dense",
]

QUERY_SECONDS = 2.0
"""How long a server that does not answer delays a call to all of them."""


def ask_buckets(link: Link) -> Buckets:
    """Return what the server owns."""
    return Buckets.from_json(link.call(Call.BUCKETS).text)


def ask_each(links: Sequence[Link]) -> dict[Link, Frame | Exception]:
    """Ask all servers at once. Returns the answer or the error of each."""
    seconds = [min(link.timeout, QUERY_SECONDS) for link in links]
    outcomes = finish_each(
        [link.begin(Call.BUCKETS, "{}", timeout=limit) for link, limit in zip(links, seconds, strict=True)]
    )
    return dict(zip(links, outcomes, strict=True))


def buckets_in(outcome: Frame | Exception | None) -> Buckets | None:
    """Return the buckets in an answer. None if the server did not answer or was not asked."""
    if outcome is None or isinstance(outcome, UnavailableError | DeadlineExceededError | OwnershipChangedError):
        return None
    if isinstance(outcome, Exception):
        raise outcome
    return Buckets.from_json(outcome.text)


def misses_dense(told: Iterable[Buckets | None]) -> bool:
    """Whether dense parameters were moved to servers that were not asked."""
    known = [one for one in told if one is not None]
    held = {name for one in known for name in one.dense}
    return any(name not in held for one in known for name in one.gave_dense)


def destinations_of(told: Iterable[Buckets | None]) -> set[str]:
    """Return the addresses to which these servers have moved something, or are moving it."""
    known = [one for one in told if one is not None]
    return {address for one in known for address in one.gave} | {one.giving.taker for one in known if one.giving}


def has_left(told: Buckets) -> bool:
    """Whether the server has moved away all that it owned."""
    return told.version > 0 and told.giving is None and not told.ranges and not told.dense


POLL_SECONDS = 0.05
"""Seconds between two checks of buckets in transit."""
SILENT = 5.0
"""Seconds until a server that did not answer, and to which buckets were once moved, is asked again."""
LOOKS = 5
"""How many checks in a row must find buckets missing before that is an error."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """How requests are split at one moment."""

    links: tuple[Link, ...]
    """Servers that own buckets."""
    versions: tuple[int, ...]
    """The version of the buckets of each."""
    owners: np.ndarray
    """int64 [NUM_BUCKETS]: the index of the link of each bucket. The number of links if the bucket is in transit."""

    @cached_property
    def groups(self) -> int:
        """Parts that ids are split into: one for each link, and one more if some are in transit."""
        return len(self.links) + bool((self.owners == len(self.links)).any())

    def map(self) -> OwnershipMap:
        """Return the route as a map that can be shown and stored."""
        return OwnershipMap(
            servers=tuple(
                OwnedByServer(address=link.address, version=version, ranges=ranges_of(self.owners == number))
                for number, (link, version) in enumerate(zip(self.links, self.versions, strict=True))
            )
        )


@dataclass
class _Known:
    version: int
    mask: np.ndarray
    dense: frozenset[str]
    """The dense parameters it holds."""

    @property
    def anything(self) -> bool:
        return bool(self.mask.any()) or bool(self.dense)


class ServerRoutes:
    """Asks the servers of a group what they own, at first and whenever a request was refused.

    Args:
        links: returns the links of the group.
        keep: called with the links to servers of the group, and with those to servers that have left it.
        join: joins a server and returns a link to it, given its address. None if it does not answer.
    """

    def __init__(
        self,
        links: Callable[[], Sequence[Link]],
        *,
        keep: Callable[[list[Link], list[Link]], None],
        join: Callable[[str], Link | None],
        timeout: float,
    ) -> None:
        self._links, self._keep, self._join = links, keep, join
        self._timeout = timeout
        self._lock = threading.Lock()
        self._known: dict[Link, _Known] = {}
        self._is_open = False
        self._disputed: tuple[tuple[int, int], ...] = ()
        self._missed: set[str] = set()
        self._silent: dict[str, float] = {}
        self.current = Route(links=(), versions=(), owners=np.zeros(NUM_BUCKETS, dtype=np.int64))
        """The newest route."""

    def begin(self, first: OwnershipMap, *, replace_lost: bool = False) -> None:
        """Assign `first` to servers that have never owned anything, unless others own something else already.

        With `replace_lost` they get the buckets that no server owns.
        """
        links = list(self._links())
        told = [ask_buckets(link) for link in links]
        if all(one.version == 0 or one.ranges == mine.ranges for one, mine in zip(told, first.servers, strict=True)):
            # In the order of addresses: of two clients that disagree, one is refused before it has changed anything.
            for link, one, mine in sorted(zip(links, told, first.servers, strict=True), key=lambda e: e[0].address):
                if one.version == 0 and not self._given(link, mine.ranges):
                    break
        try:
            # Wait for a server that does not answer and has buckets, unless it is declared lost.
            self.settled(patient=not replace_lost)
        except ConfigError:
            # Not while a server does not answer or buckets are in transit: they may not be missing.
            if not replace_lost or self._is_open:
                raise
            self._replace_lost()
            self.settled()
        if replace_lost:
            self._forget_lost_dense()

    def after(self, route: Route) -> Route:
        """Return a newer route than `route`."""
        with self._lock:
            if self.current is route:
                self._fetch()
            return self.current

    def settled(self, *, patient: bool = True) -> Route:
        """Return the newest route once nothing is in transit. Raises `ConfigError` if buckets have no owner."""
        deadline, looks = time.monotonic() + self._timeout, 0
        with self._lock:
            while not self._fetch():
                looks += 1
                # A transfer that arrives while the servers are asked may be seen on neither side, but not several times in a row.
                is_open = self._is_open or (patient and bool(self._missed))
                if time.monotonic() >= deadline or (looks >= LOOKS and not is_open):
                    raise ConfigError(self._what_is_wrong())
                time.sleep(POLL_SECONDS)
            return self.current

    def refresh_routes(self, away: Link) -> None:
        """Check whether others own the buckets of `away`, which does not answer. Does nothing while another thread does that."""
        if self._known and self._lock.acquire(blocking=False):
            try:
                # Errors of other servers are reported to the threads that call them.
                with suppress(MonolithError):
                    self._fetch(away)
            finally:
                self._lock.release()

    def _replace_lost(self) -> None:
        """Assign buckets without an owner to servers that have never owned anything, in equal shares."""
        missing = np.flatnonzero(self.current.owners == len(self.current.links))
        fresh = sorted(
            (link for link in self._links() if ask_buckets(link).version == 0), key=lambda link: link.address
        )
        for link, share in zip(fresh, np.array_split(missing, max(1, len(fresh))), strict=False):
            mask = np.zeros(NUM_BUCKETS, dtype=np.bool_)
            mask[share] = True
            self._given(link, ranges_of(mask))

    def _forget_lost_dense(self) -> None:
        """Let dense parameters be declared again whose servers are lost."""
        told = {link: ask_buckets(link) for link in self._links()}
        # Those in transit are not lost: nobody trains them until they arrive.
        held = {name for one in told.values() for name in (*one.dense, *(one.giving.dense if one.giving else ()))}
        for link, one in told.items():
            if lost := tuple(name for name in one.gave_dense if name not in held):
                own = OwnBuckets(ranges=one.ranges, lost_dense=lost)
                link.call(Call.OWN_BUCKETS, own.model_dump_json())

    def _what_is_wrong(self) -> str:
        names = ", ".join(link.address for link in self._links())
        if self._disputed:
            return (
                f"addresses: more than one of {names} owns the buckets {list(self._disputed)}: a server that was declared "
                "lost is back; stop it"
            )
        missing = list(ranges_of(self.current.owners == len(self.current.links)))
        given = f", and {', '.join(sorted(self._missed))}, to which some were moved, does not answer" * bool(
            self._missed
        )
        return f"addresses: none of {names} owns the buckets {missing}{given}; name all servers"

    def _given(self, link: Link, ranges: tuple[tuple[int, int], ...]) -> bool:
        try:
            link.call(Call.OWN_BUCKETS, OwnBuckets(ranges=ranges).model_dump_json())
        except OwnershipChangedError:
            return False
        return True

    def _fetch(self, away: Link | None = None) -> bool:
        """Ask all servers except `away`. Returns whether every bucket has one owner."""
        links = list(self._links())
        asked = ask_each([link for link in links if link is not away])
        told: dict[Link, Buckets | None] = {}
        for link in links:
            answer = asked.get(link)
            if isinstance(answer, ServerRestartedError) and not self._had(link):
                # It held nothing of this group.
                self._let_go(link)
            else:
                told[link] = self._claimed_again(link, buckets_in(answer))
        if not self._claimed(told).all() or misses_dense(told.values()):
            told |= self._follow(told)
        self._missed = destinations_of(told.values()) - {link.address for link in told}
        claims = self._claims(told)
        counted = sum((known.mask.astype(np.int64) for known in claims.values()), np.zeros(NUM_BUCKETS, dtype=np.int64))
        # Of two servers that claim a bucket, one has moved it away since it answered: ask again.
        for known in claims.values():
            known.mask = known.mask & (counted == 1)
        self._disputed = ranges_of(counted > 1)
        self._is_open = bool(self._disputed) or any(one is None or one.giving for one in told.values())
        self._put_in_place(told, claims)
        return bool((counted == 1).all())

    def _claimed_again(self, link: Link, told: Buckets | None) -> Buckets | None:
        # Transfers are durable at once, the first claim is not: a server that was started again may have lost only that.
        if told is not None and told.version == 0 and link in self._known and self._known[link].mask.any():
            own = OwnBuckets(ranges=ranges_of(self._known[link].mask))
            return Buckets.from_json(link.call(Call.OWN_BUCKETS, own.model_dump_json()).text)
        return told

    def _had(self, link: Link) -> bool:
        return link in self._known and self._known[link].anything

    def _claimed(self, told: dict[Link, Buckets | None]) -> np.ndarray:
        mask = np.zeros(NUM_BUCKETS, dtype=np.bool_)
        for link, one in told.items():
            if one is not None:
                mask |= mask_of(one.ranges)
            elif link in self._known:
                mask |= self._known[link].mask
        return mask

    def _follow(self, told: dict[Link, Buckets | None]) -> dict[Link, Buckets | None]:
        """Return the servers to which buckets were moved, and that this worker does not know yet."""
        found: dict[Link, Buckets | None] = {}
        now = time.monotonic()
        asked = {link.address for link in told} | {at for at, since in self._silent.items() if now - since < SILENT}
        waiting = destinations_of(told.values()) - asked
        while waiting:
            address = waiting.pop()
            asked.add(address)
            link = self._join(address)
            if link is None:
                self._silent[address] = now
                continue
            answer = ask_each([link])[link]
            if isinstance(answer, ServerRestartedError | UnavailableError | DeadlineExceededError):
                # It has stopped since it was joined.
                self._silent[address] = now
                self._let_go(link)
                continue
            found[link] = buckets_in(answer)
            waiting |= destinations_of([found[link]]) - asked
        return found

    def _let_go(self, link: Link) -> None:
        """Drop the link to a server that does not know this worker. It is joined again if buckets lead there."""
        link.left = True
        self._keep([other for other in self._links() if other is not link], [link])

    def _claims(self, told: dict[Link, Buckets | None]) -> dict[Link, _Known]:
        claims = {
            link: _Known(one.version, mask_of(one.ranges), frozenset(one.dense))
            for link, one in told.items()
            if one is not None
        }
        answered = sum((known.mask for known in claims.values()), np.zeros(NUM_BUCKETS, dtype=np.bool_))
        dense = frozenset().union(*(known.dense for known in claims.values()))
        for link, one in told.items():
            if one is None and link in self._known:
                # It does not answer now. It still owns the buckets that no other server claims, and has moved the rest.
                known = self._known[link]
                claims[link] = _Known(known.version, known.mask & ~answered, known.dense - dense)
        return claims

    def _put_in_place(self, told: dict[Link, Buckets | None], claims: dict[Link, _Known]) -> None:
        for link, one in told.items():
            if one is not None:
                link.server, link.left = one.server, has_left(one)
            elif link in claims:
                # It does not answer, and other servers own all its buckets.
                link.left = not claims[link].anything
        self._keep([link for link in told if not link.left], [link for link in told if link.left])
        self._known = claims
        owning = [(link, known) for link, known in claims.items() if known.mask.any()]
        owners = np.full(NUM_BUCKETS, len(owning), dtype=np.int64)
        for number, (_, known) in enumerate(owning):
            owners[known.mask] = number
        self.current = Route(
            links=tuple(link for link, _ in owning), versions=tuple(known.version for _, known in owning), owners=owners
        )
