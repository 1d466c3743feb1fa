"""The store: all tables of a model behind one interface, wherever they are.

A model talks to its tables only through `Store`. Requests are plain arrays under a table's name, and all tables of a batch go
in one call, so that the same interface fits tables in this process (`LocalStore`) and tables on other machines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypedDict, Unpack, runtime_checkable

import numpy as np
import torch
from pydantic import Field

from monolith import _core
from monolith.config import Config, Count
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.table.arrays import Ids, Values
from monolith.table.bags import Bags, Gradient, PackedBags, PackedGradients, join_gradients
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable, TableStats, apply_updates, as_pooling
from monolith.table.entries import Entries
from monolith.table.table_file import FileEntry, read_store, write_store

__all__ = [
    "LocalStore",
    "MAX_POSITION",
    "Position",
    "RestoreChoices",
    "Store",
    "StoreSave",
    "WorkerProgress",
]

MAX_POSITION = 2**20
"""Characters of the state of a source. Servers keep one for each worker."""


class Position(Config):
    """How far a worker is in its data when the gradients of a batch are pushed. A successor resumes from there.

    Example:
        >>> Position(batches=7, state='{"file": 2}').ended
        False
    """

    batches: Count
    """Batches trained, this one included, in all incarnations of the worker."""
    state: Annotated[str | None, Field(max_length=MAX_POSITION)] = None
    """The state of its source after this batch, JSON. None if the source cannot be resumed."""
    ended: bool = False
    """The data ended with this batch. A successor that makes another pass starts from the beginning."""
    epochs: Count = 0
    """Complete passes over the data before this batch, or with it if `ended`."""


@dataclass(frozen=True, kw_only=True)
class WorkerProgress:
    """What the holders of the rows have recorded about the worker that a store pushes for."""

    behind: Position | None = None
    """The position of whatever has had the fewest batches of an earlier incarnation. None if there was none."""
    last_batch: int = 0
    """The last batch that any of them has had."""
    ahead: tuple[Position, ...] = ()
    """The positions of those that have had more than `behind`, rising: batches that others have not had."""
    worker: str = ""
    """The name under which positions are recorded."""
    everyone: Callable[[], Mapping[str, Sequence[tuple[int, Position]]]] = dict
    """Returns the positions of all workers by name, each with its epoch, which grows with every incarnation of any worker."""


@dataclass(frozen=True, kw_only=True)
class StoreSave:
    """The part of a checkpoint that the holders of a store's rows are writing. What is in it is decided."""

    dense: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The values that the dense parameters they hold have in it."""
    finish: Callable[[], tuple[FileEntry, ...]] = tuple
    """Waits until it is durable. Returns the manifests of its parts. Raises `StorageError` for what may be tried again."""


class RestoreChoices(TypedDict, total=False):
    """How a restore deals with what changed since the save. All may be left out."""

    aliases: Mapping[str, str]
    """For tables that have another name now, the old name by the new one."""
    only: Collection[str] | None
    """Names of the tables to restore. The others keep what they have."""
    allow_new_tables: bool
    """A table that was not saved starts empty, instead of being an error."""
    allow_new_segments: bool
    """A table to which segments were added, or from which some were removed, is converted, instead of being an error: what was
    added is initialised as in a new row."""
    reset_admission: bool
    """An admission filter of another size starts counting from zero, instead of being an error."""


@runtime_checkable
class Store(Protocol):
    """All tables of a model by name, wherever their rows are. Callers never ask for its class.

    Rows are either here, in `tables`, where the caller logs, saves and restores them, or in other processes (`remote`), which do
    all that themselves when `begin_save` and `begin_restore` ask them to.

    A call takes effect before it returns. `lookup` may run concurrently with any other call.
    """

    @property
    def remote(self) -> bool:
        """Whether other processes hold the rows. Other clients may then change them between two calls."""

    @property
    def collective(self) -> frozenset[str]:
        """Names of the methods that all processes of the run must call together, as often and in the same order.

        A store whose rows are spread over the ranks of a run has some. One process that calls them alone waits for ever.
        """

    @property
    def tables(self) -> Mapping[str, EmbeddingTable]:
        """The tables in this process. Empty if `remote`."""

    def configs(self) -> dict[str, TableConfig]:
        """Return the configuration of every table."""

    def stats(self) -> dict[str, TableStats]:
        """Return the size of every table."""

    def lookup(self, requests: Sequence[Bags]) -> Sequence[torch.Tensor]:
        """Return one float32 [bags, dim] per request, on the CPU. An empty bag is zeros. Never inserts."""

    def lookup_entry(self, table: str, ids: Ids) -> Entries:
        """Return the whole rows of `ids`: stored weights, optimizer state and times. For debugging, not for a step."""

    def slot_counts(self, table: str) -> dict[int, int]:
        """Count the rows of each slot of a table whose ids have slots. Reads all of them where they are."""

    def iter_rows(self, table: str, *, chunk: int = 65536) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield all rows of a table, about `chunk` at a time: ids int64 [n] and stored weights float32 [n, dim].

        While others write, each row is whole, and rows that are there throughout come exactly once.
        """

    def prefetch(self, requests: Sequence[Bags]) -> None:
        """Begin a lookup whose answer the next `lookup` with equal `requests` takes. Does nothing where rows are at hand."""

    def apply(
        self, gradients: Sequence[Gradient], *, step: int = 0, event_time: int = 0, position: Position | None = None
    ) -> None:
        """Make one optimizer step per table and id, with the sum of its gradients in all `gradients`.

        `position` says which batch of this worker they are of. A successor that resumes from there counts it once.
        """

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set the embeddings of `ids` to `values` [n, dim]."""

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add `values` [n, dim] to the embeddings of `ids`."""

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and optimizer state of `ids`. Returns int32 [n]: 1 if the id had a row, 0 if it is new."""

    def erase(self, table: str, ids: Ids) -> int:
        """Remove the rows of `ids`. Returns how many there were. Admission filters keep what they have counted."""

    def evict(self, *, now: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Remove expired rows of all tables at event time `now`, by default the newest of each table.

        Returns how many were removed, by table.
        """

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all rows into a new folder, which appears complete or not at all."""

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Replace the rows of all tables by those of a folder that `save` wrote. On an error nothing has changed."""

    def prepare_restore(self, folder: str | os.PathLike[str], *, only_fresh: bool = False) -> Callable[[], None]:
        """Read and check what `restore` would. Returns a function that puts it in place and does not fail.

        With `only_fresh`, holders whose rows are to be kept (`is_initialised`) keep them.
        """

    def begin_save(self, path: str, *, step: int) -> StoreSave:
        """Let other processes take the rows they hold as they are now into their parts of the checkpoint `path`."""

    def open_log(self, model_dir: str) -> None:
        """Let other processes log their rows below `model_dir` from now on, if they log when the caller asks them to."""

    def begin_cut(self, *, step: int) -> StoreSave | None:
        """Let other processes commit the rows they hold as they are now to their logs. `finish` returns their segments.

        None if they cannot do so at the moment, or never do so at one moment.
        """

    def begin_restore(
        self, path: str | None, *, only_fresh: bool, rows_only: bool = False, **choices: Unpack[RestoreChoices]
    ) -> Callable[[], None]:
        """Let other processes read their rows from `path`, a checkpoint or a segment of a run's log that names their segments.

        Returns a function that puts them in place. None: they will hold nothing, as when they were new.

        With `only_fresh`, those that hold rows that are to be kept keep them. With `rows_only`, dense parameters are left as they
        are.
        """

    def is_initialised(self) -> bool:
        """Whether all holders of rows have a state that is to be kept: False in a process that has just started."""

    def mark_initialised(self) -> None:
        """Declare that the present state is to be kept, as after a restore or when training begins."""

    def lost(self, checkpoint: str, *, trained: bool) -> list[str]:
        """Return the addresses of holders that have no rows, although more was trained on them than `checkpoint` has.

        More was trained if the caller knows it (`trained`), or if other holders are not at that checkpoint. `checkpoint` is its
        name, "" if there is none.
        """

    def moved_on(self, checkpoint: str) -> list[str]:
        """Return the addresses of holders whose rows are not exactly those of `checkpoint`, without those that are new.

        `checkpoint` is its name. "": of holders that have rows at all.
        """

    def progress(self) -> WorkerProgress | None:
        """Return how far this worker's batches have come. None if nobody records the positions given to `apply`."""

    def close(self) -> None:
        """Release connections and threads. The rows stay where they are."""


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

    remote = False
    collective: frozenset[str] = frozenset()

    def __init__(self, tables: Iterable[EmbeddingTable]) -> None:
        self._tables: dict[str, EmbeddingTable] = {}
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

    def lookup(self, requests: Sequence[Bags]) -> Sequence[torch.Tensor]:
        """Return one float32 [bags, dim] per request. An empty bag is zeros. Never inserts."""
        if isinstance(requests, PackedBags):
            return requests.lookup(self._cores(requests.layout.tables))
        tables = [self._table(bags.table) for bags in requests]
        outs = [
            np.empty((len(bags.offsets) - 1, table.dim), dtype=np.float32)
            for bags, table in zip(requests, tables, strict=True)
        ]
        _core.lookup_many(
            [table.core for table in tables],
            [as_pooling(bags.pooling) for bags in requests],
            [bags.ids for bags in requests],
            [bags.offsets for bags in requests],
            outs,
        )
        return [torch.from_numpy(out) for out in outs]

    def lookup_entry(self, table: str, ids: Ids) -> Entries:
        """Return the whole rows of `ids`: stored weights, optimizer state and times."""
        return self._table(table).lookup_entry(ids)

    def slot_counts(self, table: str) -> dict[int, int]:
        """Count the rows of each slot of a table whose ids have slots."""
        return self._table(table).slot_counts()

    def iter_rows(self, table: str, *, chunk: int = 65536) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield all rows of a table, about `chunk` at a time: ids int64 [n] and stored weights float32 [n, dim]."""
        return ((entries.ids, entries.values) for entries in self._table(table).iter_batches(chunk))

    def prefetch(self, requests: Sequence[Bags]) -> None:
        """Do nothing: the rows are at hand."""

    def apply(
        self, gradients: Sequence[Gradient], *, step: int = 0, event_time: int = 0, position: Position | None = None
    ) -> None:
        """Make one optimizer step per table and id, with the sum of its gradients in all `gradients`.

        Nobody records the `position`: the rows are lost with the worker. On an error nothing has changed in any table.
        """
        if isinstance(gradients, PackedGradients) and not gradients.snapshots:
            names, rates = gradients.bags.layout.tables, gradients.learning_rates
            flat = np.concatenate([self._table(name).learning_rates for name in names]) if rates is None else rates.flat
            gradients.apply(self._cores(names), flat, step=step, event_time=event_time)
            return
        updates = [
            self._table(gradient.bags.table).pooled_update(
                gradient.bags.ids,
                gradient.bags.offsets,
                gradient.values,
                mode=gradient.bags.pooling,
                learning_rates=gradient.learning_rates,
                snapshot=gradient.snapshot,
            )
            for gradient in join_gradients(gradients)
        ]
        apply_updates(updates, step=step, event_time=event_time)

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set the embeddings of `ids` to `values` [n, dim]."""
        self._table(table).assign(ids, values, event_time=event_time)

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add `values` [n, dim] to the embeddings of `ids`."""
        self._table(table).assign_add(ids, values, event_time=event_time)

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and optimizer state of `ids`. Returns int32 [n]: 1 if the id had a row, 0 if it is new."""
        return self._table(table).reinitialize(ids, event_time=event_time)

    def erase(self, table: str, ids: Ids) -> int:
        """Remove the rows of `ids`. Returns how many there were."""
        return int(self._table(table).erase(ids).sum())

    def evict(self, *, now: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Remove expired rows of all tables at event time `now`, by default each table's newest. Returns how many, by table."""
        moments = now if isinstance(now, Mapping) else dict.fromkeys(self._tables, now)
        return {name: table.evict(now=moments[name]) for name, table in self._tables.items()}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all tables and admission filters into a new folder, which appears complete and durable or not at all.

        Safe during training. Each table is as it was at some moment of the call.
        """
        write_store(self._tables, folder)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Replace the rows of all tables by those that a store saved. On an error nothing has changed.

        The folder must hold every table of the store, with the same rows: dims, optimizers, seed. Learning rates, expiry and
        thresholds are those of the store. Further tables of the folder are left alone.
        """
        self.prepare_restore(folder)()

    def prepare_restore(self, folder: str | os.PathLike[str], *, only_fresh: bool = False) -> Callable[[], None]:
        """Read and check what `restore` would. Returns a function that puts it in place and does not fail."""
        if only_fresh and self._initialised:
            return lambda: None
        fresh = read_store(self._tables, folder)

        def put_in_place() -> None:
            for name, table in self._tables.items():
                table.take_over(fresh[name])
            self.mark_initialised()

        return put_in_place

    def begin_save(self, path: str, *, step: int) -> StoreSave:
        """Return an empty save: all rows are in `tables`, which the caller saves."""
        return StoreSave()

    def open_log(self, model_dir: str) -> None:
        """Do nothing: the caller logs the rows in `tables`."""

    def begin_cut(self, *, step: int) -> StoreSave:
        """Return an empty cut: all rows are in `tables`, which the caller logs."""
        return StoreSave()

    def begin_restore(
        self, path: str | None, *, only_fresh: bool, rows_only: bool = False, **choices: Unpack[RestoreChoices]
    ) -> Callable[[], None]:
        """Return a function that does nothing: all rows are in `tables`, which the caller restores."""
        return lambda: None

    def is_initialised(self) -> bool:
        """Whether it holds a state that is to be kept: since `mark_initialised` or a restore."""
        return self._initialised

    def mark_initialised(self) -> None:
        """Say that what it holds now is to be kept."""
        self._initialised = True

    def lost(self, checkpoint: str, *, trained: bool) -> list[str]:
        """Return nothing: rows in this process are lost with the caller."""
        return []

    def moved_on(self, checkpoint: str) -> list[str]:
        """Return nothing: rows in this process are those of the caller."""
        return []

    def progress(self) -> None:
        """Return None: nobody records positions."""

    def close(self) -> None:
        """Do nothing: threads end with the process."""

    def stats(self) -> dict[str, TableStats]:
        """Return the size of every table."""
        return {name: table.stats() for name, table in self._tables.items()}

    def __repr__(self) -> str:
        return f"LocalStore({', '.join(map(repr, self._tables.values()))})"

    def _cores(self, names: Sequence[str]) -> list[_core.Table]:
        try:
            return [self._tables[name].core for name in names]
        except KeyError as missing:
            self._table(missing.args[0])
            raise

    def _table(self, name: str) -> EmbeddingTable:
        try:
            return self._tables[name]
        except KeyError:
            known = ", ".join(map(repr, self._tables)) or "none"
            raise InvalidArgumentError(f"table: the store has no {name!r}; it has {known}") from None
