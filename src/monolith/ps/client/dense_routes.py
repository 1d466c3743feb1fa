"""`DenseRoutes`: which server holds which dense parameter. Parameters that have moved are located again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from monolith.errors import ConfigError, DeadlineExceededError, OwnershipChangedError, UnavailableError
from monolith.ps.client.routes import LOOKS, ask_buckets
from monolith.ps.client.scatter_gather import FIRST_PAUSE, LONGEST_PAUSE
from monolith.ps.client.server_group import ServerGroup
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import Buckets
from monolith.transport.frames import Frame
from monolith.transport.link import Link, finish_each

__all__ = ["DensePart", "DenseRoutes"]


@dataclass(frozen=True, kw_only=True)
class DensePart:
    """The names of one server's part of a call."""

    names: tuple[str, ...]
    round: int
    """0 for the first attempt of the call."""


class DenseRoutes:
    """The servers of dense parameters, each of which is on one server of `group`. `sizes`: bytes of all of them, by name."""

    def __init__(self, group: ServerGroup, sizes: Mapping[str, int]) -> None:
        self._group, self._sizes = group, dict(sizes)
        self._link_of: dict[str, Link] = {}

    def ask(
        self,
        call: Call,
        names: Iterable[str],
        text: Callable[[DensePart], str],
        arrays: Mapping[str, np.ndarray] = MappingProxyType({}),
        *,
        packed: Sequence[np.ndarray] = (),
    ) -> list[tuple[tuple[str, ...], Frame]]:
        """Call each server that holds some of `names`. Returns the names and the answer of each call.

        `arrays` has one array for each name, `packed` is sent to every server. A part is refused before anything has happened, so
        only refused parts are sent again, to the servers that hold them then.
        """
        deadline, pause = time.monotonic() + self._group.config.timeout, FIRST_PAUSE
        waiting, attempt = list(names), 0
        answers: list[tuple[tuple[str, ...], Frame]] = []
        while waiting:
            self._locate(waiting, again=attempt > 0, deadline=deadline, may_place=call == Call.DECLARE_DENSE)
            parts = [(link, DensePart(names=mine, round=attempt)) for link, mine in self._by_server(waiting)]
            outcomes = finish_each(
                [
                    link.begin(call, text(part), [*packed, *(arrays[name] for name in part.names if name in arrays)])
                    for link, part in parts
                ]
            )
            waiting = []
            for (_, part), outcome in zip(parts, outcomes, strict=True):
                if isinstance(outcome, Frame):
                    answers.append((part.names, outcome))
                elif isinstance(outcome, OwnershipChangedError):
                    waiting += part.names
                else:
                    raise outcome
            if waiting and time.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"dense parameter {waiting[0]!r} was in transit between servers for {self._group.config.timeout:g} s"
                )
            if waiting and attempt:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            attempt += 1
        return answers

    def _by_server(self, names: Sequence[str]) -> list[tuple[Link, tuple[str, ...]]]:
        links = dict.fromkeys(self._link_of[name] for name in names)
        return [(link, tuple(name for name in names if self._link_of[name] is link)) for link in links]

    def _locate(self, names: Sequence[str], *, again: bool, deadline: float, may_place: bool) -> None:
        """Find a server for each of `names`. `again`: the known ones are outdated. `may_place`: some may be new."""
        if not again and all(name in self._link_of for name in names):
            return
        links, found = self._found(deadline, () if may_place else names)
        placed = _placed(self._sizes, len(links), found)
        self._link_of = {name: links[number] for name, number in placed.items()}

    def _found(self, deadline: float, declared: Sequence[str] = ()) -> tuple[list[Link], dict[str, int]]:
        """Return the servers, and the number of the one that holds each name, if any does. Those that are `declared` should be
        somewhere: the server that holds them may not be known yet.
        """
        looks, same_looks = 0, 0
        before: dict[str, list[str]] = {}
        while True:
            links, looks = list(self._group.links), looks + 1
            told = [ask_buckets(link) for link in links]
            found = {name: number for number, one in enumerate(told) for name in one.dense if name in self._sizes}
            away = sorted((_away(told) & self._sizes.keys()) - found.keys())
            is_whole = looks >= LOOKS or all(name in found for name in declared)
            # One that moves while the servers are asked may be seen on both sides, but not on the same two for several looks.
            holders = {
                name: [link.address for link, one in zip(links, told, strict=True) if name in one.dense]
                for name in found
            }
            twice = {name: addresses for name, addresses in sorted(holders.items()) if len(addresses) > 1}
            if links and not away and is_whole and not twice:
                return links, found
            same_looks = same_looks + 1 if twice == before else 1
            before = twice
            if twice and same_looks >= LOOKS:
                name, addresses = next(iter(twice.items()))
                raise ConfigError(
                    f"dense parameter {name!r}: more than one of {', '.join(addresses)} trains it; two workers declared it first "
                    "while servers joined or left. Start the servers again from a checkpoint"
                )
            if time.monotonic() >= deadline:
                if not links:
                    raise UnavailableError(
                        "the servers that were known have all left, and none that they named answers"
                    )
                raise UnavailableError(
                    f"dense parameter {away[0]!r}: it was moved to a server that does not answer; start that again, or declare "
                    "it lost: ServerStore(..., replace_lost=True), monolith rebalance --replace-lost"
                )
            time.sleep(LONGEST_PAUSE)
            self._group.refresh_routes()


def _away(told: Iterable[Buckets]) -> set[str]:
    """Return the parameters that a server has moved away, or is moving."""
    return {name for one in told for name in (*one.gave_dense, *(one.giving.dense if one.giving else ()))}


def _placed(sizes: Mapping[str, int], servers: int, found: Mapping[str, int] = MappingProxyType({})) -> dict[str, int]:
    """Return the index of the server of each name. Those that were found stay where they are."""
    held = [sum(sizes[name] for name, at in found.items() if at == number) for number in range(servers)]
    server_of = dict(found)
    for name in sorted(sizes.keys() - found.keys(), key=lambda name: (-sizes[name], name)):
        number = held.index(min(held))
        held[number] += sizes[name]
        server_of[name] = number
    return server_of
