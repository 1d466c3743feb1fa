"""The store: all tables of a model behind one interface, wherever they are.

A model talks to its tables only through `Store`. Requests are plain arrays under a table's name, and all tables of a batch go
in one call, so that the same interface fits tables in this process (`LocalStore`) and tables on other machines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.table.arrays import Ids, Values
from monolith.table.buckets import NUM_BUCKETS
from monolith.table.call_threads import CallThreads
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable, PoolingMode, TableStats
from monolith.table.store_folder import read_store, write_store

__all__ = ["Bags", "Gradient", "LocalStore", "Store", "join_gradients"]

Result = TypeVar("Result")

THREADED_IDS = 4096
"""Ids in one call from which it pays to serve tables beside each other."""


@dataclass(frozen=True, kw_only=True)
class Bags:
    """What is asked of one table: bag b is `ids[offsets[b]:offsets[b + 1]]`, pooled to one vector."""

    table: str
    ids: np.ndarray
    """int64 [n]."""
    offsets: np.ndarray
    """int64 [bags + 1]."""
    pooling: PoolingMode = "sum"


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of what a lookup of `bags` returned."""

    bags: Bags
    values: torch.Tensor
    """float32 [bags, dim]."""
    learning_rates: tuple[float, ...] | None = None
    """One per segment; None takes those of the table."""
    snapshot: torch.Tensor | None = None
    """float32 [n, dim], what each id of `bags` was when it was looked up. For tables with `DelayCompensation`."""


@runtime_checkable
class Store(Protocol):
    """Tables by name. Calls take effect when they return; `lookup` may run beside any other call."""

    def configs(self) -> dict[str, TableConfig]:
        """The configuration of every table."""

    def lookup(self, requests: Sequence[Bags]) -> list[torch.Tensor]:
        """One float32 [bags, dim] per request, on the CPU; an empty bag is zeros. Never inserts."""

    def apply(self, gradients: Sequence[Gradient], *, step: int = 0, event_time: int = 0) -> None:
        """One optimizer step per table and id, with the sum of its gradients in all `gradients`."""

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set the embeddings of `ids` to `values` [n, dim]."""

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add `values` [n, dim] to the embeddings of `ids`."""

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and state of `ids`; int32 [n]: 1 it had a row, 0 it is new."""

    def evict(self, *, now: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Remove expired rows of all tables, at one time or at one by table; how many, by table."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all tables into a new folder, which appears complete or not at all."""

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Replace the rows of all tables by those that a store saved; on an error nothing has changed."""

    def prepare_restore(
        self, folder: str | os.PathLike[str], *, buckets: range = range(NUM_BUCKETS)
    ) -> Callable[[], None]:
        """Read and check the rows of `buckets` now; calling the answer puts them in place, which cannot fail."""

    def is_initialised(self) -> bool:
        """Whether it holds a state that is to be kept: False in a process that has just started."""

    def mark_initialised(self) -> None:
        """Say that what it holds now is to be kept, as after a restore or when training begins."""

    def stats(self) -> dict[str, TableStats]:
        """The size of every table."""


class LocalStore:
    """A `Store` whose tables are in this process.

    Example:
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from monolith.table import Bags, LocalStore, Ones
        >>> config = TableConfig(name="item", segments=(Segment(dim=2, initializer=Ones()),))
        >>> store = LocalStore([EmbeddingTable(config)])
        >>> bags = Bags(table="item", ids=np.array([3, 4, 5]), offsets=np.array([0, 2, 3]))
        >>> store.lookup([bags])[0].tolist()
        [[2.0, 2.0], [1.0, 1.0]]
    """

    def __init__(self, tables: Iterable[EmbeddingTable]) -> None:
        self._tables: dict[str, EmbeddingTable] = {}
        self._threads = CallThreads()
        self._initialised = False
        for table in tables:
            if table.name in self._tables:
                raise ConfigError(f"tables: two are named {table.name!r}; every table of a store has a name of its own")
            self._tables[table.name] = table

    def __deepcopy__(self, memo: dict[int, object]) -> LocalStore:
        copy = LocalStore(deepcopy(table, memo) for table in self._tables.values())
        copy._initialised = self._initialised
        return copy

    @property
    def tables(self) -> Mapping[str, EmbeddingTable]:
        """The tables by name."""
        return self._tables

    def configs(self) -> dict[str, TableConfig]:
        """The configuration of every table."""
        return {name: table.config for name, table in self._tables.items()}

    def lookup(self, requests: Sequence[Bags]) -> list[torch.Tensor]:
        """One float32 [bags, dim] per request; an empty bag is zeros. Never inserts."""
        tables = [self._table(request.table) for request in requests]
        calls = [partial(_lookup, table, request) for table, request in zip(tables, requests, strict=True)]
        return self._run(calls, sum(len(request.ids) for request in requests))

    def apply(self, gradients: Sequence[Gradient], *, step: int = 0, event_time: int = 0) -> None:
        """One optimizer step per table and id, with the sum of its gradients in all `gradients`."""
        joined = join_gradients(gradients)
        tables = [self._table(gradient.bags.table) for gradient in joined]
        calls = [partial(_apply, table, g, step, event_time) for table, g in zip(tables, joined, strict=True)]
        self._run(calls, sum(len(gradient.bags.ids) for gradient in joined))

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set the embeddings of `ids` to `values` [n, dim]."""
        self._table(table).assign(ids, values, event_time=event_time)

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add `values` [n, dim] to the embeddings of `ids`."""
        self._table(table).assign_add(ids, values, event_time=event_time)

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and state of `ids`; int32 [n]: 1 it had a row, 0 it is new."""
        return self._table(table).reinitialize(ids, event_time=event_time)

    def evict(self, *, now: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Remove expired rows of all tables at event time `now`, by default each table's newest; how many, by table."""
        moments = now if isinstance(now, Mapping) else dict.fromkeys(self._tables, now)
        return {name: table.evict(now=moments[name]) for name, table in self._tables.items()}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all tables and admission filters into a new folder, which appears complete and durable or not at all.

        Safe beside training; each table is as it was at some moment of the call.
        """
        write_store(self._tables, folder)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Replace the rows of all tables by those that a store saved; on an error nothing has changed.

        The folder must hold every table of the store, with the same rows: dims, optimizers, seed. Learning rates, expiry and
        thresholds are those of the store. Further tables of the folder are left alone.
        """
        self.prepare_restore(folder)()

    def prepare_restore(
        self, folder: str | os.PathLike[str], *, buckets: range = range(NUM_BUCKETS)
    ) -> Callable[[], None]:
        """Read and check the rows of `buckets` now; calling the answer puts them in place, which cannot fail."""
        fresh = read_store(self._tables, folder, buckets)

        def put_in_place() -> None:
            for name, table in self._tables.items():
                table.take_over(fresh[name])
            self.mark_initialised()

        return put_in_place

    def is_initialised(self) -> bool:
        """Whether it holds a state that is to be kept: since `mark_initialised` or a restore."""
        return self._initialised

    def mark_initialised(self) -> None:
        """Say that what it holds now is to be kept."""
        self._initialised = True

    def stats(self) -> dict[str, TableStats]:
        """The size of every table."""
        return {name: table.stats() for name, table in self._tables.items()}

    def __repr__(self) -> str:
        return f"LocalStore({', '.join(map(repr, self._tables.values()))})"

    def _run(self, calls: Sequence[Callable[[], Result]], ids: int) -> list[Result]:
        return [call() for call in calls] if ids < THREADED_IDS else self._threads.run(calls)

    def _table(self, name: str) -> EmbeddingTable:
        try:
            return self._tables[name]
        except KeyError:
            known = ", ".join(map(repr, self._tables)) or "none"
            raise InvalidArgumentError(f"table: the store has no {name!r}; it has {known}") from None


def _lookup(table: EmbeddingTable, bags: Bags) -> torch.Tensor:
    return table.lookup_pooled(bags.ids, bags.offsets, mode=bags.pooling)


def _apply(table: EmbeddingTable, gradient: Gradient, step: int, event_time: int) -> None:
    table.apply_pooled_gradients(
        gradient.bags.ids,
        gradient.bags.offsets,
        gradient.values,
        mode=gradient.bags.pooling,
        learning_rates=gradient.learning_rates,
        step=step,
        event_time=event_time,
        snapshot=gradient.snapshot,
    )


def join_gradients(gradients: Sequence[Gradient]) -> list[Gradient]:
    """One gradient per table, in the order of first mention: bags behind each other, in the order given.

    Gradients of one table must pool alike and have the same learning rates: a row makes one step with their sum.

    Example:
        >>> bags = Bags(table="t", ids=np.array([7, 8]), offsets=np.array([0, 2]))
        >>> (joined,) = join_gradients([Gradient(bags=bags, values=torch.ones(1, 4))] * 2)
        >>> joined.bags.offsets.tolist(), list(joined.values.shape)
        ([0, 2, 4], [2, 4])
    """
    by_table: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        by_table.setdefault(gradient.bags.table, []).append(gradient)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in by_table.values()]


def _join(parts: Sequence[Gradient]) -> Gradient:
    poolings = {part.bags.pooling for part in parts}
    if len(poolings) > 1:
        raise InvalidArgumentError(
            f"gradients of table {parts[0].bags.table!r}: expected one way of pooling, got {', '.join(sorted(poolings))}"
        )
    if any(part.learning_rates != parts[0].learning_rates for part in parts):
        rates = ", ".join(str(part.learning_rates) for part in parts)
        raise InvalidArgumentError(
            f"gradients of table {parts[0].bags.table!r}: expected one set of learning rates in a step, got {rates}; give "
            "features that share a table the same schedule"
        )
    ends = np.cumsum([0, *(len(part.bags.ids) for part in parts)])
    splits = [part.bags.offsets[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
    bags = replace(
        parts[0].bags,
        ids=np.concatenate([part.bags.ids for part in parts]),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), *splits]),
    )
    snapshots = [part.snapshot for part in parts if part.snapshot is not None]
    return Gradient(
        bags=bags,
        values=torch.cat([part.values for part in parts]),
        learning_rates=parts[0].learning_rates,
        # One that is missing is missed by the table, which says so.
        snapshot=torch.cat(snapshots) if len(snapshots) == len(parts) else None,
    )
