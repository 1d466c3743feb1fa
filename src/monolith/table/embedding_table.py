"""`EmbeddingTable`: int64 ids to embeddings, each id with a row of its own."""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

import numpy as np
import torch

from monolith import _core
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError
from monolith.table.arrays import Ids, Values, contiguous, file_name, id_array, id_vector, row_matrix, time_vector
from monolith.table.buckets import NUM_BUCKETS, bucket_bounds
from monolith.table.changes import FeedPiece, RawRows, TableCut
from monolith.table.config import TableConfig, to_core
from monolith.table.entries import Entries, TableState

if TYPE_CHECKING:
    import pyarrow as pa

    from monolith.table.admission import AdmissionFilter

__all__ = ["EmbeddingTable", "TableStats", "get_num_threads", "set_num_threads"]

PoolingMode = Literal["sum", "mean", "sqrtn"]

_COPIED_BUCKETS = 64
"""Buckets copied at once: a sixty-fourth of a table is in memory a second time meanwhile."""
_POOLING = {"sum": _core.Pooling.SUM, "mean": _core.Pooling.MEAN, "sqrtn": _core.Pooling.SQRTN}


def set_num_threads(n: int) -> None:
    """Let each call of the core use up to `n` threads, including the caller's. The default is one per processor.

    Best as many as `torch.get_num_threads()`: then calls of the main thread use the threads that torch has, instead of sharing
    the processors with them.

    Example:
        >>> import monolith
        >>> monolith.set_num_threads(1)
        >>> monolith.get_num_threads()
        1
    """
    if n < 1:
        raise InvalidArgumentError(f"set_num_threads: expected at least 1, got {n}")
    _core.set_num_threads(n)


def get_num_threads() -> int:
    """How many threads one call of the core may use."""
    return _core.num_threads()


@dataclass(frozen=True, kw_only=True)
class TableStats:
    """A table's size at one moment."""

    rows: int
    """Ids that have a row."""
    bytes: int
    """Everything the table holds from the system: rows, index, and room for more."""
    row_bytes: int
    """Weights and optimizer state of one row."""
    index_slots: int
    """Places for ids in the index."""
    growths: int
    """How often an index block was doubled or split."""
    max_event_time: int
    """The newest event time any write has carried."""

    @property
    def load(self) -> float:
        """Occupied share of the index."""
        return self.rows / self.index_slots

    @classmethod
    def total(cls, parts: Sequence[TableStats]) -> TableStats:
        """The size of one table whose rows are spread over several."""
        return cls(
            rows=sum(part.rows for part in parts),
            bytes=sum(part.bytes for part in parts),
            row_bytes=parts[0].row_bytes,
            index_slots=sum(part.index_slots for part in parts),
            growths=sum(part.growths for part in parts),
            max_event_time=max(part.max_event_time for part in parts),
        )


class TableUpdate(NamedTuple):
    """The gradients of one table, as `apply_updates` takes them."""

    table: _core.Table
    pooling: _core.Pooling
    ids: np.ndarray
    offsets: np.ndarray | None
    """None: each id is a bag of its own."""
    grads: np.ndarray
    learning_rates: np.ndarray
    snapshot: np.ndarray | None


def apply_updates(updates: Sequence[TableUpdate], *, step: int, event_time: int) -> None:
    """Step several tables, each named once, in one call of the core. On an error nothing has changed in any of them."""
    _core.apply_many(
        [update.table for update in updates],
        [update.pooling for update in updates],
        [update.ids for update in updates],
        [update.offsets for update in updates],
        [update.grads for update in updates],
        [update.learning_rates for update in updates],
        as_step(step),
        as_event_time(event_time),
        [update.snapshot for update in updates],
    )


class EmbeddingTable:
    """A table of embeddings for any int64 ids: unbounded, collisionless, trained in place by its own optimizer.

    Lookups never insert: an id without a row reads its initial value, a pure function of (seed, table name, id). The first
    gradient, or an `assign`, gives it a row. Every call takes a batch, releases the GIL, and may run concurrently with any other.
    `ids` are int64 tensors, arrays or sequences. Values and gradients are float32. A process can hold some four billion rows of
    one table (2**32 row numbers). Parameter servers hold a larger one.

    Example:
        >>> import torch
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from monolith.table import SGD, Zeros
        >>> segment = Segment(dim=2, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))
        >>> table = EmbeddingTable(TableConfig(name="item", segments=(segment,)))
        >>> table.apply_gradients(torch.tensor([7, 7, -1]), torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]))
        >>> table.lookup(torch.tensor([7, -1, 99])).tolist()
        [[-2.0, -4.0], [-3.0, -4.0], [0.0, 0.0]]
        >>> len(table)
        2
    """

    def __init__(self, config: TableConfig, *, admission: AdmissionFilter | None = None) -> None:
        if not isinstance(config, TableConfig):
            raise InvalidArgumentError(f"config: expected a TableConfig, got {type(config).__name__}")
        self._build(config, admission, config.initial_capacity)

    def _build(self, config: TableConfig, admission: AdmissionFilter | None, capacity: int) -> None:
        self.config = config
        self.admission = admission
        self._tracks_changes = False
        self._replacements = 0
        self._core = _core.Table(to_core(config, capacity), None if admission is None else admission.core)
        self._learning_rates = np.asarray(config.learning_rates, dtype=np.float32)

    @property
    def name(self) -> str:
        """The table's name."""
        return self.config.name

    @property
    def core(self) -> _core.Table:
        """The table as the core knows it. Another one after `take_over`."""
        return self._core

    @property
    def learning_rates(self) -> np.ndarray:
        """float32: those of the configuration, one per segment."""
        return self._learning_rates

    @property
    def dim(self) -> int:
        """Elements of a looked-up vector."""
        return self._core.dim

    @property
    def layout(self) -> str:
        """One line of text, equal for two tables iff their raw rows are interchangeable byte for byte."""
        return self._core.layout

    @property
    def row_bytes(self) -> int:
        """Weights and optimizer state of one row."""
        return self._core.row_bytes

    def lookup(self, ids: Ids) -> torch.Tensor:
        """Embeddings of `ids`: float32 [*ids.shape, dim]."""
        wanted = id_array(ids)
        out = np.empty((wanted.size, self.dim), dtype=np.float32)
        self._core.lookup(wanted.reshape(-1), out)
        return torch.from_numpy(out).reshape(*wanted.shape, self.dim)

    def lookup_pooled(self, ids: Ids, offsets: Ids, *, mode: PoolingMode = "sum") -> torch.Tensor:
        """Returns one vector per bag, float32 [bags, dim]. Bag b holds `ids[offsets[b]:offsets[b + 1]]`.

        `mode`: "sum", "mean", or "sqrtn" (the sum divided by the square root of the bag's size). An empty bag is zero.

        Example:
            >>> from monolith import EmbeddingTable, Segment, TableConfig
            >>> from monolith.table import Ones
            >>> table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=1, initializer=Ones()),)))
            >>> table.lookup_pooled([5, 6, 7], [0, 2, 2, 3]).tolist()
            [[2.0], [0.0], [1.0]]
        """
        splits = id_vector(offsets, "offsets")
        out = np.empty((max(splits.size - 1, 0), self.dim), dtype=np.float32)
        self._core.lookup_pooled(id_vector(ids), splits, as_pooling(mode), out)
        return torch.from_numpy(out)

    def lookup_entry(self, ids: Ids) -> Entries:
        """Whole rows of `ids`: stored values, optimizer slots and times."""
        wanted = id_array(ids).reshape(-1)
        batch = _core.RowBatch()
        found = np.empty(wanted.size, dtype=np.bool_)
        self._core.copy_rows(wanted, found, batch)
        return self._take(batch, found)

    def apply_gradients(
        self,
        ids: Ids,
        grads: Values,
        *,
        learning_rates: Sequence[float] | None = None,
        step: int = 0,
        event_time: int = 0,
        duplicates: Literal["sum", "sequential"] = "sum",
        snapshot: Values | None = None,
    ) -> None:
        """Make one optimizer step per unique id with the sum of its gradients.

        Args:
            ids: which rows. An id without one gets its initial value first, if the admission filter admits it.
            grads: float32 [*ids.shape, dim].
            learning_rates: one per segment. None takes those of the configuration.
            step: the global step, for optimizers and compressors that depend on it.
            event_time: seconds since 1970, kept as the rows' last-update time.
            duplicates: "sum" adds the gradients of equal ids before one step. "sequential" makes a step for each.
            snapshot: like `grads`, the values the gradients were computed at. Required by `DelayCompensation`.
        """
        if duplicates not in ("sum", "sequential"):
            raise InvalidArgumentError(f"duplicates: expected 'sum' or 'sequential', got {duplicates!r}")
        wanted = id_array(ids).reshape(-1)
        self._core.apply_gradients(
            wanted,
            self._matrix("grads", grads),
            self._rates(learning_rates),
            as_step(step),
            as_event_time(event_time),
            duplicates == "sequential",
            self._snapshot(snapshot),
        )

    def apply_pooled_gradients(
        self,
        ids: Ids,
        offsets: Ids,
        grads: Values,
        *,
        mode: PoolingMode = "sum",
        learning_rates: Sequence[float] | None = None,
        step: int = 0,
        event_time: int = 0,
        snapshot: Values | None = None,
    ) -> None:
        """The backward of `lookup_pooled` and the optimizer step in one pass. `grads` is float32 [bags, dim].

        `snapshot` is float32 [ids, dim], the value of each id that the gradients were computed at. `DelayCompensation` requires
        it. Other optimizers ignore it.
        """
        update = self.pooled_update(ids, offsets, grads, mode=mode, learning_rates=learning_rates, snapshot=snapshot)
        apply_updates([update], step=step, event_time=event_time)

    def pooled_update(
        self,
        ids: Ids,
        offsets: Ids | None,
        grads: Values,
        *,
        mode: PoolingMode,
        learning_rates: Sequence[float] | None,
        snapshot: Values | None = None,
    ) -> TableUpdate:
        """Return what `apply_updates` needs to do `apply_pooled_gradients`. Without `offsets` each id is a bag of its own."""
        wanted, matrix, rates = id_vector(ids), self._matrix("grads", grads), self._rates(learning_rates)
        splits, pooling = None if offsets is None else id_vector(offsets, "offsets"), as_pooling(mode)
        if not self.config.needs_snapshot:
            return TableUpdate(self._core, pooling, wanted, splits, matrix, rates, None)
        if splits is not None:
            matrix = _spread_over_ids(matrix, splits, len(wanted), mode)
        return TableUpdate(self._core, pooling, wanted, None, matrix, rates, self._snapshot(snapshot))

    def assign(self, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set embeddings. Optimizer state is kept, or is initial for a new id. The last of equal ids wins."""
        self._core.assign(id_array(ids).reshape(-1), self._matrix("values", values), as_event_time(event_time))

    def assign_add(self, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add to embeddings. A new id starts from its initial value, and each of equal ids adds."""
        self._core.assign_add(id_array(ids).reshape(-1), self._matrix("values", values), as_event_time(event_time))

    def reinitialize(self, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and state of `ids` to those of a new row. Returns an int32 per id: 1 if it had a row, 0 if it is new."""
        wanted = id_array(ids)
        existed = np.empty(wanted.size, dtype=np.int32)
        self._core.reinitialize(wanted.reshape(-1), as_event_time(event_time), existed)
        return torch.from_numpy(existed).reshape(wanted.shape)

    def contains(self, ids: Ids) -> torch.Tensor:
        """Whether each id has a row: bool, shaped like `ids`."""
        wanted = id_array(ids)
        found = np.empty(wanted.size, dtype=np.bool_)
        self._core.contains(wanted.reshape(-1), found)
        return torch.from_numpy(found).reshape(wanted.shape)

    def erase(self, ids: Ids) -> torch.Tensor:
        """Remove rows. Returns a bool per id: whether this call removed it. The memory is reused by later ids."""
        wanted = id_array(ids)
        erased = np.empty(wanted.size, dtype=np.bool_)
        self._core.erase(wanted.reshape(-1), erased)
        return torch.from_numpy(erased).reshape(wanted.shape)

    def evict(self, *, now: int | None = None) -> int:
        """Remove the rows whose slot's expiry has passed at event time `now`. Returns how many.

        None takes the newest event time that any write has carried, so that a replay of old data expires as it did live.
        """
        return self._core.evict(self._core.max_event_time if now is None else as_event_time(now, name="now"))

    def clear(self) -> None:
        """Remove all rows and return their memory to the system."""
        self._core.clear()

    def __len__(self) -> int:
        return len(self._core)

    def __contains__(self, id_: int) -> bool:
        return bool(self.contains([id_])[0])

    def __deepcopy__(self, memo: dict[int, object]) -> EmbeddingTable:
        """A table of its own with the same rows, optimizer state and admission counts. It tracks no changes."""
        copy = EmbeddingTable(self.config, admission=deepcopy(self.admission, memo))
        for first in range(0, NUM_BUCKETS, _COPIED_BUCKETS):
            part = self.rows_of_buckets(range(first, first + _COPIED_BUCKETS))
            copy.insert_rows(part.ids, part.times, part.rows)
        copy.set_state(self.state())
        return copy

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            f"table {self.name!r}: cannot be pickled, its rows are outside of Python; use save(path) and EmbeddingTable.load, or "
            "monolith.train.ModelCheckpoints for a whole model"
        )

    def __repr__(self) -> str:
        return f"EmbeddingTable({self.name!r}, rows={len(self)}, layout={self._core.layout!r})"

    def stats(self) -> TableStats:
        """Size, memory and index load now."""
        stats = self._core.stats()
        return TableStats(
            rows=stats.rows,
            bytes=stats.bytes,
            row_bytes=stats.row_bytes,
            index_slots=stats.index_slots,
            growths=stats.growths,
            max_event_time=stats.max_event_time,
        )

    def iter_batches(self, batch_size: int = 65536) -> Iterator[Entries]:
        """All rows in batches of about `batch_size`. While others write, each row is whole, and rows that stay come once."""
        if batch_size < 1:
            raise InvalidArgumentError(f"batch_size: expected at least 1, got {batch_size}")
        cursor, batch = _core.Cursor(), _core.RowBatch()
        while self._core.scan(cursor, batch):
            if len(batch) >= batch_size:
                yield self._take(batch)
        if len(batch):
            yield self._take(batch)

    def __iter__(self) -> Iterator[int]:
        for entries in self.iter_batches():
            yield from entries.ids.tolist()

    def entries(self) -> Entries:
        """All rows at once."""
        return next(self.iter_batches(2**63 - 1), None) or self.lookup_entry([])

    def to_numpy(self) -> dict[str, np.ndarray]:
        """All rows as NumPy arrays: `ids`, `values`, `times`, and each optimizer slot."""
        return self.entries().to_numpy()

    def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table."""
        return self.entries().to_arrow()

    def rows_of_buckets(self, buckets: range) -> RawRows:
        """Copies of all rows of `buckets`, as `insert_rows` takes them. Concurrently with writers, each row is whole.

        Example:
            >>> from monolith import EmbeddingTable, Segment, TableConfig
            >>> table = EmbeddingTable(TableConfig(name="item", segments=(Segment(dim=2),)))
            >>> _ = table.reinitialize([0, 1, 2**62])  # in the buckets 3618, 2320 and 10
            >>> table.rows_of_buckets(range(0, 2400)).ids.tolist()
            [4611686018427387904, 1]
        """
        ids, times, rows = self._core.rows_of_buckets(*bucket_bounds(buckets))
        return RawRows(ids=ids, times=times, rows=rows)

    def slot_counts(self) -> dict[int, int]:
        """Count the rows of each slot, bits 48 to 62 of an id. Copies all rows, some buckets after the other.

        Example:
            >>> from monolith import EmbeddingTable, Segment, TableConfig
            >>> table = EmbeddingTable(TableConfig(name="slots", segments=(Segment(dim=2),)))
            >>> _ = table.reinitialize([5 << 48, 5 << 48 | 1, 7 << 48])
            >>> table.slot_counts()
            {5: 2, 7: 1}
        """
        counts: Counter[int] = Counter()
        for first in range(0, NUM_BUCKETS, _COPIED_BUCKETS):
            ids = self.rows_of_buckets(range(first, first + _COPIED_BUCKETS)).ids
            slots, rows = np.unique(ids >> 48 & 0x7FFF, return_counts=True)
            counts.update(dict(zip(slots.tolist(), rows.tolist(), strict=True)))
        return dict(sorted(counts.items()))

    def track_changes(self) -> None:
        """Track from now on which ids are written or removed, for `cut_changes`. A second call does nothing."""
        self._core.track_changes()
        self._tracks_changes = True

    @property
    def changed(self) -> int:
        """Ids in the next cut. One that was removed and inserted again counts twice. 0 without tracking."""
        return self._core.changed

    def cut_changes(self) -> TableCut:
        """Close the set of changed ids and return it. Later changes belong to the next cut. Takes microseconds.

        While a write runs, the cut has some rows of it, each whole, and the next cut the others: nothing is lost. For a
        cut that is exactly the state between two steps, call it between them.

        Raises `InvalidArgumentError` without `track_changes`, or while a cut is neither committed nor rolled back.
        """
        return TableCut(self._core)

    def track_feed(self) -> None:
        """Track from now on which ids are written or removed, for `read_feed`. A second call does nothing.

        It is independent of `track_changes`, and of who reads which of the two.
        """
        self._core.track_feed()

    def read_feed(self) -> Iterator[FeedPiece]:
        """Yield the rows that were written since the last pass, as they are now, and the ids that were removed.

        One reader at a time. A copy that applies all pieces in order, removed ids first, has the stored weights of every row that
        is not being written. Writers wait for microseconds. Raises `InvalidArgumentError` without `track_feed`.

        Example:
            >>> from monolith import EmbeddingTable, Segment, TableConfig
            >>> table = EmbeddingTable(TableConfig(name="item", segments=(Segment(dim=2),)))
            >>> table.track_feed()
            >>> _ = table.reinitialize([3, 4])
            >>> _ = table.erase([3])
            >>> [(piece.ids.tolist(), piece.erased.tolist()) for piece in table.read_feed()]
            [([4], [3])]
        """
        while (arrays := self._core.read_feed()) is not None:
            ids, times, values, erased = arrays
            yield FeedPiece(ids=ids, times=times, values=values, erased=erased)

    def take_over(self, other: EmbeddingTable) -> None:
        """Have the rows, state and admission filter of `other` instead of one's own, from one moment to the next.

        `other` must have the same `layout` and seed, and should not be used any more. If changes were remembered they still are,
        and none is waiting.

        Example:
            >>> from monolith import EmbeddingTable, Segment, TableConfig
            >>> config = TableConfig(name="item", segments=(Segment(dim=2),))
            >>> table, built_aside = EmbeddingTable(config), EmbeddingTable(config)
            >>> _ = built_aside.reinitialize([3, 4])
            >>> table.take_over(built_aside)
            >>> len(table)
            2
        """
        mine, theirs = (self.layout, self.config.seed), (other.layout, other.config.seed)
        if mine != theirs:
            raise InvalidArgumentError(f"other: expected a table of layout and seed {mine}, got {theirs}")
        if self._tracks_changes:
            other.track_changes()
        self._core, self.admission = other._core, other.admission
        self._replacements += 1

    def reconfigure(self, config: TableConfig, *, admission: AdmissionFilter | None = None) -> None:
        """Use other hyperparameters for the same rows: of optimizers, initializers and compressors, expiry, and `admission`.

        Lookups may run at the same time. No other call may.

        Raises:
            InvalidArgumentError: `config` has another name, seed, mode or layout. Nothing has changed.

        Example:
            >>> from monolith import EmbeddingTable, Segment, TableConfig
            >>> from monolith.table import SGD, Zeros
            >>> def rate(learning_rate):
            ...     segment = Segment(dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=learning_rate))
            ...     return TableConfig(name="item", segments=(segment,))
            >>> table = EmbeddingTable(rate(1.0))
            >>> table.apply_gradients([7], [[1.0]])
            >>> table.reconfigure(rate(0.5))
            >>> table.apply_gradients([7], [[1.0]])
            >>> table.lookup([7]).tolist()
            [[-1.5]]
        """
        self._core.reconfigure(to_core(config, config.initial_capacity), None if admission is None else admission.core)
        self.config, self.admission = config, admission
        self._learning_rates = np.asarray(config.learning_rates, dtype=np.float32)

    @property
    def replacements(self) -> int:
        """How often `take_over` gave it other rows: a reader of its changes has to start from a snapshot then."""
        return self._replacements

    def insert_rows(self, ids: Ids, times: Ids, rows: Values) -> None:
        """Upsert raw rows, uint8 [n, row_bytes], of a table of the same `layout`. Not subject to admission.

        Example:
            >>> from monolith import EmbeddingTable, Segment, TableConfig
            >>> config = TableConfig(name="item", segments=(Segment(dim=2),))
            >>> table, copy = EmbeddingTable(config), EmbeddingTable(config)
            >>> table.track_changes()
            >>> _ = table.reinitialize([3, 4])
            >>> for piece in table.cut_changes():
            ...     copy.insert_rows(piece.ids, piece.times, piece.rows)
            >>> bool((copy.lookup([3, 4]) == table.lookup([3, 4])).all())
            True
        """
        self._core.insert_rows(id_vector(ids), time_vector(times), row_matrix(rows, self.row_bytes))

    def decode(self, ids: Ids, times: Ids, rows: Values) -> Entries:
        """Raw rows of this table's `layout` as stored weights and optimizer slots."""
        wanted, seconds, raw = id_vector(ids).copy(), time_vector(times), row_matrix(rows, self.row_bytes)
        if not len(wanted) == len(seconds) == len(raw):
            raise InvalidArgumentError(
                f"decode: expected as many ids as times and rows, got {len(wanted)}, {len(seconds)} and {len(raw)}"
            )
        return self._entries(wanted, seconds, raw, np.ones(len(wanted), dtype=np.bool_))

    def encode(self, entries: Entries) -> np.ndarray:
        """Raw rows of this table's `layout`, uint8 [n, row_bytes], that `decode` to these entries.

        Example:
            >>> from monolith import EmbeddingTable, Segment, TableConfig
            >>> table = EmbeddingTable(TableConfig(name="item", segments=(Segment(dim=2),)))
            >>> _ = table.reinitialize([3, 4])
            >>> entries = table.entries()
            >>> table.insert_rows(entries.ids, entries.times, table.encode(entries))
        """
        infos = self._core.slot_infos()
        missing = [info.name for info in infos if info.name not in entries.slots]
        if missing:
            known = ", ".join(entries.slots) or "none"
            raise InvalidArgumentError(
                f"slots: table {self.name!r} needs {', '.join(missing)}; the entries have {known}"
            )
        slots = [
            contiguous(entries.slots[info.name], info.name).astype(
                np.int64 if info.is_int64 else np.float32, copy=False
            )
            for info in infos
        ]
        return self._core.encode(self._matrix("values", entries.values), slots)

    def state(self) -> TableState:
        """What the table knows besides its rows."""
        max_event_time, updates, scales = self._core.state
        return TableState(max_event_time=max_event_time, updates=updates, hashnet_scales=tuple(scales))

    def set_state(self, state: TableState) -> None:
        """Continue from `state`, except that the newest event time does not go back."""
        self._core.set_state(
            as_event_time(state.max_event_time, name="max_event_time"),
            _whole("updates", state.updates, 2**32, "a number of updates in [0, 2**32)"),
            list(state.hashnet_scales),
        )

    def save(self, path: str | os.PathLike[str], *, skip_expired: bool = False, buckets: range | None = None) -> int:
        """Write the table, or the rows of some `buckets`, to one file and return its size in bytes. Safe during training.

        The file appears under `path` complete and durable, or not at all. `skip_expired` leaves out what `evict` would.
        """
        metadata = self.config.model_dump_json()
        first, last = bucket_bounds(buckets)
        _, size = _core.save_table(self._core, file_name(path), metadata, skip_expired, first, last)
        return size

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, admission: AdmissionFilter | None = None) -> EmbeddingTable:
        """Read a table that `save` wrote, with the configuration it had.

        Raises `CorruptFileError` for a file that is damaged, of a newer format, or not a table.

        Example:
            >>> import tempfile
            >>> from monolith import EmbeddingTable, Segment, TableConfig
            >>> table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=4),)))
            >>> table.reinitialize([1, 2]).tolist()
            [0, 0]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     size = table.save(folder + "/t.table")
            ...     len(EmbeddingTable.load(folder + "/t.table"))
            2
        """
        file = _core.TableFile(file_name(path))
        try:
            config = TableConfig.from_json(file.metadata.decode())
        except (ConfigError, UnicodeDecodeError) as error:
            raise CorruptFileError(f"{Path(path)}: its configuration cannot be read: {error}") from None
        table = cls.__new__(cls)
        # No more room than its rows fill: a damaged file must not make us ask for all memory.
        table._build(config, admission, min(config.initial_capacity, file.rows))
        file.load_into(table._core)
        return table

    def _take(self, batch: _core.RowBatch, found: np.ndarray | None = None) -> Entries:
        ids, times, rows = batch.take(self.row_bytes)
        return self._entries(ids, times, rows, np.ones(len(ids), dtype=np.bool_) if found is None else found)

    def _entries(self, ids: np.ndarray, times: np.ndarray, rows: np.ndarray, found: np.ndarray) -> Entries:
        n = len(ids)
        slots = {
            info.name: np.empty((n, info.width), dtype=np.int64 if info.is_int64 else np.float32)
            for info in self._core.slot_infos()
        }
        values = np.empty((n, self.dim), dtype=np.float32)
        self._core.decode(rows, values, list(slots.values()))
        return Entries(
            ids=torch.from_numpy(ids),
            found=torch.from_numpy(found),
            values=torch.from_numpy(values),
            slots={name: torch.from_numpy(slot) for name, slot in slots.items()},
            times=torch.from_numpy(times.astype(np.int64)),
        )

    def _matrix(self, name: str, values: Values) -> np.ndarray:
        array = contiguous(values, name)
        if array.dtype != np.float32:
            raise InvalidArgumentError(f"{name}: expected float32, got {array.dtype}; convert with .float()")
        if array.ndim < 2 or array.shape[-1] != self.dim:
            raise InvalidArgumentError(
                f"{name}: expected [..., {self.dim}], one row of table {self.name!r} per id, got {list(array.shape)}"
            )
        return array.reshape(-1, self.dim)

    def _snapshot(self, snapshot: Values | None) -> np.ndarray | None:
        if snapshot is None and self.config.needs_snapshot:
            raise InvalidArgumentError(
                "snapshot: DelayCompensation needs the values the gradients were computed at; pass what lookup returned"
            )
        return None if snapshot is None else self._matrix("snapshot", snapshot)

    def _rates(self, learning_rates: Sequence[float] | None) -> np.ndarray:
        if learning_rates is None:
            return self._learning_rates
        try:
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, which the core refuses
                return np.asarray(learning_rates, dtype=np.float32).reshape(-1)
        except (TypeError, ValueError):
            raise InvalidArgumentError(f"learning_rates: expected numbers, got {learning_rates!r}") from None


def as_pooling(mode: str) -> _core.Pooling:
    """Return the way of pooling that `mode` names."""
    if mode not in _POOLING:
        raise InvalidArgumentError(f"mode: expected 'sum', 'mean' or 'sqrtn', got {mode!r}")
    return _POOLING[mode]


def _whole(name: str, value: int, limit: int, expected: str) -> int:
    try:
        whole = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name}: expected {expected}, got {value!r}") from None
    if not 0 <= whole < limit:
        raise InvalidArgumentError(f"{name}: expected {expected}, got {value!r}")
    return whole


def as_event_time(seconds: int, *, name: str = "event_time") -> int:
    """Return `seconds` as the core takes an event time."""
    return _whole(name, seconds, 2**32, "whole seconds since 1970 in [0, 2**32)")


def _spread_over_ids(grads: np.ndarray, offsets: np.ndarray, ids: int, mode: PoolingMode) -> np.ndarray:
    """The gradient of each id, [ids, dim], from those of pooled bags, [bags, dim]."""
    sizes = np.diff(offsets)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != ids or (sizes < 0).any() or len(grads) != len(sizes):
        raise InvalidArgumentError(
            f"offsets: expected {len(grads) + 1} rising numbers from 0 to {ids}, the number of ids, got {offsets.size}"
        )
    if mode != "sum":
        counts = np.maximum(sizes, 1).astype(np.float32)
        grads = grads / (counts if mode == "mean" else np.sqrt(counts))[:, np.newaxis]
    return np.repeat(grads, sizes, axis=0)


def as_step(step: int) -> int:
    """Return `step` as the core takes a global step."""
    return _whole("step", step, 2**63, "a global step in [0, 2**63)")
