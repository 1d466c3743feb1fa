"""Scatter-gather: one call split by server, and its answers put together.

Short bags (`DistinctIds`) ask for each id once. Rows are pooled and gradients summed here, in the order of the bag, as a table
does, so the result equals that of one table bit for bit. For long bags (`CutBags`) each server pools its own ids of every bag,
and one row for each bag is sent instead of one for each id. The sums of several servers are added here, so their last bits can
differ from those of one table. Parts that a server refuses because buckets have moved are split again and sent to the new owners.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import numpy as np
import torch

from monolith import _core
from monolith.errors import DeadlineExceededError, OwnershipChangedError
from monolith.ps.client.routes import Route, ServerRoutes
from monolith.table.bags import Bags, pool_rows, pooling_factors
from monolith.table.buckets import bucket_of
from monolith.transport.frames import Frame
from monolith.transport.link import Exchange, Link, finish_each, jittered

__all__ = [
    "BagSplit",
    "CutBags",
    "DistinctIds",
    "FIRST_PAUSE",
    "Indices",
    "LONGEST_PAUSE",
    "Part",
    "Some",
    "are_long",
    "run_parts",
    "split_by_owner",
]

Some = np.ndarray | slice
"""Some of the ids of a split, by their indices."""


class BagSplit(Protocol):
    """The bags of one table, split by server."""

    @property
    def bags(self) -> Bags:
        """What was split."""

    @property
    def ids(self) -> np.ndarray:
        """int64: those of the first server, those of the second, ..."""

    @property
    def sizes(self) -> list[int]:
        """How many each server has."""

    pooling: ClassVar[Literal["none", "sum"]]
    """What the server does with them."""

    def asked(self, some: Some) -> list[np.ndarray]:
        """Return the arrays of a lookup of `some` ids."""

    def pooled(self, answers: Sequence[tuple[Some, np.ndarray]]) -> torch.Tensor:
        """What a lookup of the bags returns, given float32 rows for all ids."""

    def pushed(self, values: np.ndarray) -> Callable[[Some], list[np.ndarray]]:
        """For `values`, the gradients of the pooled bags: the arrays of a push of some ids, gradients last."""


@dataclass(frozen=True, kw_only=True)
class DistinctIds:
    """The distinct ids of bags by server, and where each id of the bags is among them."""

    bags: Bags
    ids: np.ndarray
    sizes: list[int]
    inverse: np.ndarray
    """int64 [n]: `ids[inverse]` are the ids of the bags."""
    pooling: ClassVar[Literal["none", "sum"]] = "none"

    @classmethod
    def of(cls, bags: Bags, owners: np.ndarray, count: int) -> DistinctIds:
        """Split `bags` so that each id is asked for once. `owners` has, for each bucket, which of `count` servers owns it.

        Example:
            >>> bags = Bags(table="t", ids=np.array([7, 5, 7]), offsets=np.array([0, 3]))
            >>> split = DistinctIds.of(bags, np.zeros(4096, dtype=np.int64), 1)
            >>> split.ids.tolist(), split.inverse.tolist()
            ([7, 5], [0, 1, 0])
        """
        distinct, inverse, _ = _core.unique_with_inverse(bags.ids)
        if count == 1:
            return cls(bags=bags, ids=distinct, sizes=[len(distinct)], inverse=inverse)
        order, sizes = split_by_owner(distinct, owners, count)
        position_of = np.empty_like(order)
        position_of[order] = np.arange(len(order))
        return cls(bags=bags, ids=distinct[order], sizes=sizes, inverse=position_of[inverse])

    def asked(self, some: Some) -> list[np.ndarray]:
        """Ids."""
        return [self.ids[some]]

    def pooled(self, answers: Sequence[tuple[Some, np.ndarray]]) -> torch.Tensor:
        """Pooled from the rows of the distinct ids."""
        return pool_rows(self._joined(answers), self.inverse, self.bags)

    def pushed(self, values: np.ndarray) -> Callable[[Some], list[np.ndarray]]:
        """Ids, and the sum of each id's gradients."""
        summed = np.empty((len(self.ids), values.shape[1]), dtype=np.float32)
        _core.sum_places(_of_sums(values, self.bags), self.inverse, self.bags.offsets, summed)
        return lambda some: [self.ids[some], summed[some]]

    def _joined(self, answers: Sequence[tuple[Some, np.ndarray]]) -> np.ndarray:
        if len(answers) == 1:
            return answers[0][1]
        joined = np.empty((len(self.ids), answers[0][1].shape[1]), dtype=np.float32)
        for some, rows in answers:
            joined[some] = rows
        return joined


@dataclass(frozen=True, kw_only=True)
class CutBags:
    """Every bag cut by server: all servers have all bags, each with its own ids of them, in their order."""

    bags: Bags
    ids: np.ndarray
    sizes: list[int]
    order: np.ndarray | None
    """`bags.ids[order]` are `ids`. None: one server has them all."""
    pooling: ClassVar[Literal["none", "sum"]] = "sum"

    @classmethod
    def of(cls, bags: Bags, owners: np.ndarray, count: int) -> CutBags:
        """Ask every server for the sums of its own ids.

        Example:
            >>> bags = Bags(table="t", ids=np.array([7, 5, 7]), offsets=np.array([0, 1, 3]))
            >>> split = CutBags.of(bags, np.zeros(4096, dtype=np.int64), 1)
            >>> [array.tolist() for array in split.asked(slice(0, 3))]
            [[7, 5, 7], [0, 1, 3]]
        """
        if count == 1:
            return cls(bags=bags, ids=bags.ids, sizes=[len(bags.ids)], order=None)
        order, sizes = split_by_owner(bags.ids, owners, count)
        return cls(bags=bags, ids=bags.ids[order], sizes=sizes, order=order)

    @cached_property
    def bag_of(self) -> np.ndarray:
        """int64 [n]: the bag of each of `ids`."""
        bag_of = _core.value_rowids(self.bags.offsets, len(self.bags.ids))
        return bag_of if self.order is None else bag_of[self.order]

    def asked(self, some: Some) -> list[np.ndarray]:
        """Ids, and the row splits of all bags."""
        if self.order is None and isinstance(some, slice):
            return [self.ids, self.bags.offsets]
        bags = self.bag_of[some]
        # Parts that were refused and cut again may join the ids of two servers: then the bags begin again in the middle.
        order = np.argsort(bags, kind="stable")
        ends = np.cumsum(np.bincount(bags, minlength=len(self.bags.offsets) - 1))
        return [self.ids[some][order], np.concatenate([[0], ends])]

    def pooled(self, answers: Sequence[tuple[Some, np.ndarray]]) -> torch.Tensor:
        """Return the servers' sums, added in the order of the answers."""
        first = answers[0][1]
        # The memory of a frame is not ours to write.
        total = first if len(answers) == 1 and first.flags.writeable else first.copy()
        for _, rows in answers[1:]:
            total += rows
        if self.bags.pooling != "sum":
            total *= pooling_factors(self.bags)
        return torch.from_numpy(total)

    def pushed(self, values: np.ndarray) -> Callable[[Some], list[np.ndarray]]:
        """Ids, row splits, and the gradients of all bags."""
        values = _of_sums(values, self.bags)
        return lambda some: [*self.asked(some), values]


def are_long(bags: Bags, servers: int) -> bool:
    """Whether bags are better pooled by the servers: fewer rows travel, nearly every server has ids of every bag.

    Example:
        >>> bags = Bags(table="t", ids=np.arange(8), offsets=np.array([0, 4, 8]))
        >>> are_long(bags, servers=2), are_long(bags, servers=3)
        (True, False)
    """
    return len(bags.ids) >= 2 * servers * (len(bags.offsets) - 1)


def split_by_owner(ids: np.ndarray, owners: np.ndarray, count: int) -> tuple[np.ndarray, list[int]]:
    """Return the indices of `ids` by server, in order within each, and how many each server has."""
    order, sizes = _core.split_by_indices(owners[bucket_of(ids)], count)
    return order, sizes.tolist()


def _of_sums(values: np.ndarray, bags: Bags) -> np.ndarray:
    """Return the gradients of the sums of bags, given those of the pooled outputs."""
    return values if bags.pooling == "sum" else values * pooling_factors(bags)


Indices = tuple["np.ndarray | slice", ...]
"""For each table of a call, which of its ids."""

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1
"""Seconds between two attempts while buckets, or dense parameters, are in transit."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a call for one server."""

    link: Link
    version: int
    """Of its buckets, as this worker knows them."""
    indices: Indices
    round: int
    """0 for the first attempt of the call."""


def run_parts(
    routes: ServerRoutes,
    route: Route,
    ids: Sequence[np.ndarray],
    sizes: Sequence[Sequence[int]],
    begin: Callable[[Part], Exchange],
    *,
    timeout: float,
) -> list[tuple[Indices, Frame]]:
    """Send each server of `route` its part. Returns the answers, each with the indices of its ids.

    `ids` of each table are in the order of the route's groups, `sizes` has the size of each group. A part is refused before
    anything has happened, so only refused parts are split again and sent to the new owners. `begin` gives them new sequence
    numbers. Every server of the route is called, also those without an id.
    """
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
    waiting: list[Indices | None] = [_slices(sizes, number) for number in range(route.groups)]
    answers: list[tuple[Indices, Frame]] = []
    attempt = 0
    while waiting:
        parts = [
            Part(link=link, version=version, indices=indices, round=attempt)
            for link, version, indices in zip(route.links, route.versions, waiting, strict=False)
            if indices is not None
        ]
        refused: list[Indices] = [indices for indices in waiting[len(route.links) :] if indices is not None]
        kept: set[Link] = set()
        outcomes = finish_each([begin(part) for part in parts])
        failures = [
            one for one in outcomes if isinstance(one, Exception) and not isinstance(one, OwnershipChangedError)
        ]
        if failures:
            raise failures[0]
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, Frame):
                answers.append((part.indices, outcome))
            else:
                refused.append(part.indices)
                kept.add(part.link)
        if not refused:
            return answers
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(f"buckets were in transit from one server to another for {timeout:g} s")
        if attempt:
            time.sleep(jittered(pause))
            pause = min(2 * pause, LONGEST_PAUSE)
        route, attempt = routes.after(route), attempt + 1
        waiting = _split_again(ids, refused, route, kept)
    return answers


def _slices(sizes: Sequence[Sequence[int]], number: int) -> Indices:
    return tuple(slice(sum(of_table[:number]), sum(of_table[: number + 1])) for of_table in sizes)


def _split_again(
    ids: Sequence[np.ndarray], refused: Sequence[Indices], route: Route, kept: set[Link]
) -> list[Indices | None]:
    """Split the refused ids again by the groups of `route`. None for a server without a part."""
    tables = []
    for table, of_table in enumerate(ids):
        indices = np.concatenate([np.arange(len(of_table))[part[table]] for part in refused])
        order, sizes = split_by_owner(of_table[indices], route.owners, route.groups)
        tables.append(np.split(indices[order], np.cumsum(sizes)[:-1]))
    groups: list[Indices | None] = []
    for number in range(route.groups):
        indices_of = tuple(of_table[number] for of_table in tables)
        # A server that has refused its part has not seen the step, and sees it even if nothing is left for it.
        asked = any(len(one) for one in indices_of) or (number < len(route.links) and route.links[number] in kept)
        groups.append(indices_of if asked else None)
    return groups
