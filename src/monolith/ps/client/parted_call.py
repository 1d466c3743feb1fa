"""One call cut by server. Parts that a server refuses, because buckets have moved, are cut anew and sent to the new owners."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from monolith.errors import DeadlineExceededError, OwnershipChangedError
from monolith.ps.client.bag_split import split_by_owner
from monolith.ps.client.server_routes import Route, ServerRoutes
from monolith.transport.frames import Frame
from monolith.transport.link import Exchange, Link, finish_each, jittered

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "Part", "Places", "run_parts"]

Places = tuple["np.ndarray | slice", ...]
"""For each table of a call, which of its ids."""

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1
"""Seconds between two attempts while buckets, or dense parameters, are on their way."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one server is asked."""

    link: Link
    version: int
    """Of its buckets, as this worker knows them."""
    places: Places
    round: int
    """0: the first attempt of the call."""


def run_parts(
    routes: ServerRoutes,
    route: Route,
    ids: Sequence[np.ndarray],
    sizes: Sequence[Sequence[int]],
    begin: Callable[[Part], Exchange],
    *,
    timeout: float,
) -> list[tuple[Places, Frame]]:
    """Ask the servers of `route` about their parts; the answers, each with the places it is for.

    `ids` of each table are in the order of the route's groups, `sizes` of each. Parts are refused before anything has
    happened, so those and only those are sent again; `begin` gives them new push numbers. Every server of the route is asked,
    those without an id too.
    """
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
    waiting: list[Places | None] = [_slices(sizes, number) for number in range(route.groups)]
    answers: list[tuple[Places, Frame]] = []
    turn = 0
    while waiting:
        parts = [
            Part(link=link, version=version, places=places, round=turn)
            for link, version, places in zip(route.links, route.versions, waiting, strict=False)
            if places is not None
        ]
        refused: list[Places] = [places for places in waiting[len(route.links) :] if places is not None]
        kept: set[Link] = set()
        outcomes = finish_each([begin(part) for part in parts])
        failures = [
            one for one in outcomes if isinstance(one, Exception) and not isinstance(one, OwnershipChangedError)
        ]
        if failures:
            raise failures[0]
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, Frame):
                answers.append((part.places, outcome))
            else:
                refused.append(part.places)
                kept.add(part.link)
        if not refused:
            return answers
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(f"buckets were on their way from one server to another for {timeout:g} s")
        if turn:
            time.sleep(jittered(pause))
            pause = min(2 * pause, LONGEST_PAUSE)
        route, turn = routes.after(route), turn + 1
        waiting = _split_again(ids, refused, route, kept)
    return answers


def _slices(sizes: Sequence[Sequence[int]], number: int) -> Places:
    return tuple(slice(sum(of_table[:number]), sum(of_table[: number + 1])) for of_table in sizes)


def _split_again(
    ids: Sequence[np.ndarray], refused: Sequence[Places], route: Route, kept: set[Link]
) -> list[Places | None]:
    """The places that were refused, by the groups of `route`; None: nothing for this server."""
    tables = []
    for table, of_table in enumerate(ids):
        places = np.concatenate([np.arange(len(of_table))[part[table]] for part in refused])
        order, sizes = split_by_owner(of_table[places], route.owners, route.groups)
        tables.append(np.split(places[order], np.cumsum(sizes)[:-1]))
    groups: list[Places | None] = []
    for number in range(route.groups):
        places_of = tuple(of_table[number] for of_table in tables)
        # A server that has refused its part has not seen the step, and sees it even if nothing is left for it.
        asked = any(len(one) for one in places_of) or (number < len(route.links) and route.links[number] in kept)
        groups.append(places_of if asked else None)
    return groups
