"""The tables of a parameter server, and the calls on them: check everything, then call the core."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from monolith import _core
from monolith.errors import ConfigError, InvalidArgumentError, OverloadedError, ProtocolError
from monolith.ps.protocol.messages import Apply, DeclaredTable, Lookup, Pooling, TableGradient, TableRead
from monolith.ps.protocol.precision import WIRE_DTYPES, narrow, widen
from monolith.ps.server.memory_limit import MemoryLimit
from monolith.state.compatibility import changed_settings, filters_fit
from monolith.table.admission import AdmissionFilter
from monolith.table.bags import Bags, pooling_factors
from monolith.table.buckets import bucket_of
from monolith.table.embedding_table import EmbeddingTable, TableStats, TableUpdate, apply_updates, as_pooling
from monolith.table.entries import Entries
from monolith.transport.calls import FrameMemory
from monolith.transport.frames import Frame, allocate

__all__ = ["CheckedRead", "ServedTables", "require_count"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Update:
    """Checked gradients of one table."""

    table: EmbeddingTable
    ids: np.ndarray
    offsets: np.ndarray | None
    values: np.ndarray
    gradient: TableGradient

    def without(self, buckets: np.ndarray) -> _Update:
        """Return the same update without the ids of `buckets`, a mask."""
        kept = ~buckets[bucket_of(self.ids)]
        if self.offsets is None:
            return replace(self, ids=self.ids[kept], values=self.values[kept])
        assert self.gradient.pooling != "none"
        bags = Bags(table=self.table.name, ids=self.ids, offsets=self.offsets, pooling=self.gradient.pooling)
        return replace(
            self,
            ids=self.ids[kept],
            offsets=np.concatenate([[0], np.cumsum(kept)])[self.offsets],
            # The mean is over the whole bag.
            values=self.values if bags.pooling == "sum" else self.values * pooling_factors(bags),
            gradient=self.gradient.model_copy(update={"pooling": "sum"}),
        )

    def for_core(self) -> TableUpdate:
        """Return the update in the form that the core takes."""
        return self.table.pooled_update(
            self.ids,
            self.offsets,
            self.values,
            mode="sum" if self.gradient.pooling == "none" else self.gradient.pooling,
            learning_rates=self.gradient.learning_rates,
        )


class CheckedRead(NamedTuple):
    """A checked lookup in one table."""

    table: EmbeddingTable
    pooling: Pooling
    ids: np.ndarray
    offsets: np.ndarray | None
    """None: no bags, one row for each id."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the answer."""
        return (len(self.ids) if self.offsets is None else len(self.offsets) - 1, self.table.dim)


INDEX_BYTES = 34
"""Bytes of a row, at the average load of a growing table."""


class ServedTables:
    """Tables by name. All methods may run concurrently."""

    def __init__(self, memory: MemoryLimit | None = None) -> None:
        self._memory = memory or MemoryLimit()
        self._tables: dict[str, EmbeddingTable] = {}
        self._declared: dict[str, DeclaredTable] = {}
        self._run_of: dict[str, str] = {}
        self._texts = 0
        self._lock = threading.Lock()
        self.on_new: Callable[[list[EmbeddingTable]], None] = lambda made: None
        """Called with new tables, before anything can be written to them."""

    def reconfigure(self, tables: Iterable[DeclaredTable], *, run: str = "") -> list[str]:
        """Let existing tables use the hyperparameters of `tables`. All of them or, on an error, none.

        Call it while no table is changed.

        Args:
            tables: with the settings that a worker declares.
            run: the launch that the worker belongs to, "" if it does not say.

        Returns:
            The changes, as text.

        Raises:
            ConfigError: another worker of the same launch has declared other settings.
        """
        with self._lock:
            other = [table for table in tables if self._declared.get(table.config.name, table) != table]
            for table in other:
                self._require_other_run(table, run)
            filters = [self._filter(table) for table in other]
            for table, admission in zip(other, filters, strict=True):
                self._tables[table.config.name].reconfigure(table.config, admission=admission)
            changes = [text for table in other for text in _changes(self._declared[table.config.name], table)]
            self._declared |= {table.config.name: table for table in other}
            self._run_of |= {table.config.name: run for table in other}
        for text in changes:
            _log.warning("%s: declared by a worker", text)
        return changes

    def differ(self, tables: Iterable[DeclaredTable]) -> bool:
        """Whether some of `tables` exist with other settings."""
        return any(self._declared.get(table.config.name, table) != table for table in tables)

    def declare(self, tables: Sequence[DeclaredTable], *, run: str = "") -> None:
        """Create the tables that do not exist. All of them or, on an error, none.

        Existing tables keep their settings. Raises `ConfigError` if their rows do not fit. `run` is the launch of the worker.
        """
        with self._lock:
            new = [table for table in tables if not self._is_there(table)]
            names = [table.config.name for table in new]
            if len(set(names)) != len(names):
                raise ConfigError(f"tables: expected each table once, got {', '.join(names)}")
            self._memory.require_memory(sum(table.config.initial_capacity * 4 * table.config.dim for table in new))
            made = {table.config.name: _make(table) for table in new}
            # As objects, declarations take about four times as much memory as their text.
            texts = 4 * sum(len(table.model_dump_json()) for table in new)
            self._memory.require_memory(_nbytes(made.values()) + texts)
            if made:
                self.on_new(list(made.values()))
            self._declared |= {table.config.name: table for table in new}
            self._tables |= made
            self._texts += texts
            if run:
                same = (table.config.name for table in tables if self._declared[table.config.name] == table)
                self._run_of |= dict.fromkeys(same, run)

    def declared(self) -> list[DeclaredTable]:
        """Return the declarations, in order."""
        return list(self._declared.values())

    def all(self) -> list[EmbeddingTable]:
        """Return the tables, in the order they were declared."""
        return list(self._tables.values())

    def reads(self, lookup: Lookup, arrays: Sequence[np.ndarray]) -> list[CheckedRead]:
        """Check a lookup. Returns the reads of its tables."""
        each = [1 if read.pooling == "none" else 2 for read in lookup.tables]
        require_count(arrays, sum(each))
        left = iter(arrays)
        return [
            CheckedRead(self._table(read.table), read.pooling, *_bag(read, [next(left) for _ in range(count)]))
            for read, count in zip(lookup.tables, each, strict=True)
        ]

    def lookup(self, reads: Sequence[CheckedRead], out: Sequence[np.ndarray]) -> None:
        """Write the rows of each table into its array of `out`."""
        # The core writes into the frame itself: the rows of an answer are not copied together first.
        rows = [view if view.dtype == np.float32 else np.empty(view.shape, dtype=np.float32) for view in out]
        _core.lookup_many(
            [read.table.core for read in reads],
            [as_pooling("sum" if read.pooling == "none" else read.pooling) for read in reads],
            [read.ids for read in reads],
            [read.offsets for read in reads],
            rows,
        )
        for made, view in zip(rows, out, strict=True):
            if made is not view:
                narrow(made, view)

    def answer(
        self,
        lookup: Lookup,
        frame: Frame,
        *,
        instance: int,
        max_bytes: int,
        memory: FrameMemory,
        text: str = "{}",
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the bytes of the answer to `frame`, which asks for `lookup`. Rows are written into the answer itself.

        Args:
            lookup: the message in the frame.
            frame: has the arrays of the lookup.
            instance: the incarnation of the server.
            max_bytes: a larger answer is refused.
            memory: counts the frames of the server. An answer that does not fit is refused.
            text: JSON that the answer carries.
            out: where a large answer may be written.
        """
        reads = self.reads(lookup, frame.arrays)
        shapes = [(WIRE_DTYPES[lookup.wire], read.shape) for read in reads]
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes)
        if size > max_bytes:
            raise ProtocolError(
                f"lookup: the answer would have {size:,} bytes, the limit is {max_bytes:,}; ask for fewer ids"
            )
        if not memory.fits(size):
            raise OverloadedError(
                f"lookup: requests and answers of {memory.in_use:,} bytes are in memory, none is left for one of {size:,}; "
                "try again later"
            )
        buffer, views = allocate(
            call=frame.call, request=frame.request, instance=instance, text=text, shapes=shapes, out=out
        )
        self.lookup(reads, views)
        return buffer

    def apply(self, apply: Apply, arrays: Sequence[np.ndarray], *, leave_out: np.ndarray | None = None) -> None:
        """Make one optimizer step for each table and id. If anything is wrong, or does not fit into memory, nothing has changed.

        `leave_out` is a mask of buckets whose ids are not changed, because they have had this batch before.
        """
        updates = self._checked(apply, arrays)
        if leave_out is not None:
            # A table of which no id is left has seen the step before.
            updates = [left for update in updates if len((left := update.without(leave_out)).ids)]
        more = sum(_size_of_rows(update.table, update.ids) for update in updates)
        self._memory.require_memory(more + _size_of_position(apply), tables=len(updates))
        apply_updates([update.for_core() for update in updates], step=apply.step, event_time=apply.event_time)

    def writable(self, name: str, ids: np.ndarray) -> EmbeddingTable:
        """Return the table, after checking that the memory limit allows rows for `ids`."""
        table = self._table(name)
        _require("ids", ids, np.dtype("<i8"), 1)
        self._memory.require_memory(_size_of_rows(table, ids), tables=1)
        return table

    def rows(self, name: str, ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and stored weights of all rows in these ranges of buckets."""
        table = self._table(name)
        found = [table.rows_of_buckets(range(first, end)).ids for first, end in ranges]
        entries = table.lookup_entry(np.concatenate([np.empty(0, dtype=np.int64), *found]))
        # A row may have expired in between.
        return entries.ids[entries.found].numpy(), entries.values[entries.found].numpy()

    def entries(self, name: str, ids: np.ndarray) -> Entries:
        """Return the whole rows of `ids`."""
        table = self._table(name)
        _require("ids", ids, np.dtype("<i8"), 1)
        return table.lookup_entry(ids)

    def slot_counts(self, name: str) -> dict[int, int]:
        """Count the rows of each slot of a table."""
        return self._table(name).slot_counts()

    def evict(self, now: Mapping[str, int]) -> dict[str, int]:
        """Remove rows that have expired at the given times. Returns how many, by table."""
        tables = {name: self._table(name) for name in now}
        return {name: table.evict(now=now[name]) for name, table in tables.items()}

    def erase(self, name: str, ids: np.ndarray) -> int:
        """Remove the rows of `ids`. Returns how many there were."""
        table = self._table(name)
        _require("ids", ids, np.dtype("<i8"), 1)
        return int(table.erase(ids).sum())

    def stats(self) -> dict[str, TableStats]:
        """Return the size of every table."""
        return {name: table.stats() for name, table in self._tables.items()}

    @property
    def nbytes(self) -> int:
        """Memory held by tables, their declarations and their admission filters."""
        return _nbytes(list(self._tables.values())) + self._texts

    def _is_there(self, table: DeclaredTable) -> bool:
        there = self._declared.get(table.config.name)
        if there is not None and there != table:
            self._require_fit(there, table)
        return there is not None

    def _require_other_run(self, table: DeclaredTable, run: str) -> None:
        """Raise if the settings of a table come from a worker of the same launch: neither of the two is the newer one."""
        name = table.config.name
        if run and self._run_of.get(name) == run:
            changes = "; ".join(_changes(self._declared[name], table))
            raise ConfigError(
                f"{changes}: two workers of the launch {run!r} declare different settings; run the same code with the same "
                "configuration in all workers. To change a setting, start the job again, under another RunnerConfig.uuid if its "
                "servers stay"
            )

    def _require_fit(self, there: DeclaredTable, table: DeclaredTable) -> None:
        """Raise unless the rows and counts of the existing table can be used with the settings of `table`."""
        name = table.config.name
        fresh = EmbeddingTable(table.config.model_copy(update={"initial_capacity": 0}))
        kept = ("seed", "mode", "unseen", "skip_zero_rows")
        same = all(getattr(there.config, field) == getattr(table.config, field) for field in kept)
        if not same or fresh.layout != self._tables[name].layout:
            raise ConfigError(
                f"table {name!r}: the server has it with other rows: {'; '.join(_changes(there, table))}. All workers need the "
                "same model; one whose rows have changed needs a new model_dir"
            )
        if (
            there.admission is not None
            and table.admission is not None
            and not filters_fit(table.admission, there.admission)
        ):
            raise ConfigError(
                f"table {name!r}: the server counts with the admission filter {there.admission!r}, which {table.admission!r} "
                "cannot continue from; keep its capacity and kind"
            )

    def _filter(self, table: DeclaredTable) -> AdmissionFilter | None:
        """Return the admission filter of an existing table with the settings of `table`. It keeps its counts."""
        self._require_fit(self._declared[table.config.name], table)
        held = self._tables[table.config.name].admission
        if table.admission is None or (held is not None and held.config == table.admission):
            return None if table.admission is None else held
        fresh = AdmissionFilter(table.admission)
        if held is not None:
            fresh.core.restore(held.core.serialize())
        return fresh

    def _checked(self, apply: Apply, arrays: Sequence[np.ndarray]) -> list[_Update]:
        each = [2 if gradient.pooling == "none" else 3 for gradient in apply.tables]
        require_count(arrays, sum(each))
        names = [gradient.table for gradient in apply.tables]
        if len(set(names)) != len(names):
            raise InvalidArgumentError(f"tables: expected each table once, got {', '.join(names)}")
        left = iter(arrays)
        return [
            self._update(gradient, [next(left) for _ in range(count)])
            for gradient, count in zip(apply.tables, each, strict=True)
        ]

    def _update(self, gradient: TableGradient, arrays: Sequence[np.ndarray]) -> _Update:
        table = self._table(gradient.table)
        ids, splits = _bag(gradient, arrays[:-1])
        rows = len(ids) if splits is None else len(splits) - 1
        values = widen(arrays[-1], f"gradients of table {table.name!r}")
        if values.shape != (rows, table.dim):
            raise InvalidArgumentError(
                f"gradients of table {table.name!r}: expected [{rows}, {table.dim}], got {list(values.shape)}"
            )
        _require_trainable(table, gradient)
        return _Update(table=table, ids=ids, offsets=splits, values=values, gradient=gradient)

    def _table(self, name: str) -> EmbeddingTable:
        try:
            return self._tables[name]
        except KeyError:
            known = ", ".join(map(repr, self._tables)) or "none"
            raise InvalidArgumentError(f"table: the server has no {name!r}; it has {known}") from None


def _nbytes(tables: Iterable[EmbeddingTable]) -> int:
    made = list(tables)
    filters = sum(table.admission.nbytes for table in made if table.admission is not None)
    return sum(table.stats().bytes for table in made) + filters


def _size_of_rows(table: EmbeddingTable, ids: np.ndarray) -> int:
    """Return the bytes of the rows of `ids` if all of them are new."""
    return len(ids) * (table.row_bytes + INDEX_BYTES)


def _size_of_position(apply: Apply) -> int:
    return 0 if apply.position is None else len(apply.position.state or "")


def _make(table: DeclaredTable) -> EmbeddingTable:
    admission = None if table.admission is None else AdmissionFilter(table.admission)
    return EmbeddingTable(table.config, admission=admission)


def _bag(read: TableRead | TableGradient, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    _require(f"ids of table {read.table!r}", arrays[0], np.dtype("<i8"), 1)
    if len(arrays) == 1:
        return arrays[0], None
    ids, splits = arrays
    _require(f"offsets of table {read.table!r}", splits, np.dtype("<i8"), 1)
    if not len(splits):
        raise InvalidArgumentError(f"table {read.table!r}: offsets: expected one more than there are bags, got none")
    return ids, splits


def _require_trainable(table: EmbeddingTable, gradient: TableGradient) -> None:
    config, rates = table.config, gradient.learning_rates
    if config.mode != "training":
        raise InvalidArgumentError(f"table {table.name!r}: a serving table takes no gradients")
    if any(segment.optimizer.kind == "delay_compensation" for segment in config.segments):
        raise InvalidArgumentError(f"table {table.name!r}: DelayCompensation needs a table in the worker's process")
    if rates is not None and len(rates) != len(config.segments):
        raise InvalidArgumentError(
            f"learning_rates of table {table.name!r}: expected {len(config.segments)}, one per segment, got {len(rates)}"
        )


def require_count(arrays: Sequence[np.ndarray], expected: int) -> None:
    """Raise unless a frame has `expected` arrays."""
    if len(arrays) != expected:
        raise InvalidArgumentError(f"arrays: expected {expected} for these tables, got {len(arrays)}")


def _require(name: str, array: np.ndarray, dtype: np.dtype, dimensions: int) -> None:
    if array.dtype != dtype or array.ndim != dimensions:
        raise InvalidArgumentError(
            f"{name}: expected {dtype} with {dimensions} dimension, got {array.dtype} {list(array.shape)}"
        )


def _changes(there: DeclaredTable, table: DeclaredTable) -> list[str]:
    found = [f"table {table.config.name!r}: {text}" for text in changed_settings(there.config, table.config)]
    if there.admission != table.admission:
        found.append(f"table {table.config.name!r}: admission was {there.admission!r}, is now {table.admission!r}")
    return found
