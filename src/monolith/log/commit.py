"""What a commit takes from the tables at one moment, and how it becomes a durable segment."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from monolith import _core
from monolith.durable import sync_to_disk
from monolith.errors import InvalidArgumentError
from monolith.log.segment_format import (
    CRC_SIZE,
    MAX_PIECE,
    Footer,
    PieceHeader,
    SegmentInfo,
    SegmentMeta,
    StateHeader,
    TableMeta,
    TableStateMeta,
    add_to_digest,
    pack_footer,
    pack_header,
    pack_piece_header,
    pack_state_header,
    segment_name,
    unpack_footer,
)
from monolith.state_bytes import PackedState
from monolith.table import EmbeddingTable, TableCut

__all__ = [
    "LoggedTables",
    "Tables",
    "TablesCut",
    "Throttle",
    "UnwrittenChanges",
    "named_tables",
    "read_ahead",
    "remove_unfinished_segments",
    "write_segment",
]

_UNFINISHED = ".unfinished"

Item = TypeVar("Item")

Tables = Sequence[EmbeddingTable] | Mapping[str, EmbeddingTable | Sequence[EmbeddingTable]]
"""Tables, each under its own name, or by the name they have in log and checkpoints. Several under one name are its shards."""


def named_tables(tables: Tables) -> tuple[list[str], list[EmbeddingTable]]:
    """Return the names and the tables, in order.

    Example:
        >>> from monolith.testing import sgd_table_config
        >>> user = EmbeddingTable(sgd_table_config(1, name="user"))
        >>> named_tables([user])[0], named_tables({"0/user": user})[0]
        (['user'], ['0/user'])
    """
    if isinstance(tables, Mapping):
        groups = ((name, [one] if isinstance(one, EmbeddingTable) else one) for name, one in tables.items())
        pairs = [(name, table) for name, shards in groups for table in shards]
    else:
        pairs = [(table.name, table) for table in tables]
    if len({id(table) for _, table in pairs}) != len(pairs):
        raise InvalidArgumentError("tables: expected each table once")
    return [name for name, _ in pairs], [table for _, table in pairs]


class Throttle:
    """Lets a thread work for `share` of the time, until `hurry` is called.

    Example:
        >>> rests = []
        >>> throttle = Throttle(0.25, worked=iter([0.0, 2.0, 2.0, 3.0, 3.0]).__next__, rest=rests.append)
        >>> list(throttle.paced("ab")), rests
        (['a', 'b'], [6.0, 3.0])
    """

    def __init__(
        self,
        share: float,
        *,
        worked: Callable[[], float] = time.thread_time,
        rest: Callable[[float], object] | None = None,
    ) -> None:
        """`worked` returns the seconds of processor time of this thread. `rest` waits for at most the given seconds."""
        if not 0 < share <= 1:
            raise InvalidArgumentError(f"share: expected a number in (0, 1], got {share!r}")
        self._rests_per_work = 1 / share - 1
        self._hurried = threading.Event()
        self._worked, self._rest = worked, rest or self._hurried.wait

    @property
    def rests(self) -> bool:
        """Whether the thread rests at all."""
        return self._rests_per_work > 0

    def paced(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the same items, with a rest after each in proportion to the time it took to make and to use it."""
        if not self.rests:
            yield from items
            return
        began = self._worked()
        for item in items:
            yield item
            self._rest((self._worked() - began) * self._rests_per_work)
            began = self._worked()

    def hurry(self) -> None:
        """Stop resting, because a caller waits."""
        self._hurried.set()


def read_ahead(items: Iterable[Item], capacity: int, size: Callable[[Item], int]) -> Iterator[Item]:
    """Yield the same items, making as many of them ahead as `capacity` holds by their `size`.

    While a row of a cut is unread, whoever changes it has to copy it first. A throttled writer therefore reads ahead.

    Example:
        >>> made = []
        >>> items = (made.append(name) or name for name in ["aa", "bbb", "c", "dd"])
        >>> next(read_ahead(items, 5, len)), made
        ('aa', ['aa', 'bbb', 'c'])
    """
    ahead: deque[Item] = deque()
    held = 0
    for item in items:
        ahead.append(item)
        held += size(item)
        while held > capacity:
            held -= size(ahead[0])
            yield ahead.popleft()
    while ahead:
        yield ahead.popleft()


class LoggedTables:
    """The tables, or shards of tables, of one log."""

    def __init__(self, tables: Tables, kind: Literal["rows", "values"]) -> None:
        self._names, self._tables = named_tables(tables)
        self._configs = [json.loads(table.config.model_dump_json()) for table in self._tables]
        self._replacements = [table.replacements for table in self._tables]
        self.kind = kind

    def add(self, tables: Tables) -> None:
        """Add empty tables and begin to track their changes."""
        other = LoggedTables(tables, self.kind)
        if not other.empty:
            raise InvalidArgumentError("tables: expected empty ones; rows from before are in no commit of this log")
        other.track_changes()
        self._names, self._tables = self._names + other._names, self._tables + other._tables
        self._configs, self._replacements = self._configs + other._configs, self._replacements + other._replacements

    @property
    def empty(self) -> bool:
        """Whether no table has a row."""
        return not any(map(len, self._tables))

    @property
    def changed(self) -> int:
        """Ids waiting for the next cut."""
        return sum(table.changed for table in self._tables)

    def track_changes(self) -> None:
        """Let the tables track their changes from now on."""
        for table in self._tables:
            table.track_changes()

    def cut(self) -> TablesCut:
        """Cut all tables, or none if one cannot be cut."""
        for name, table, replacements in zip(self._names, self._tables, self._replacements, strict=True):
            if table.replacements != replacements:
                # Its rows come from another position of the log than the one this log continues.
                raise InvalidArgumentError(
                    f"tables: {name!r} was restored after this log was opened; close it and open it with the restore's parent"
                )
        cuts: list[TableCut] = []
        try:
            for table in self._tables:
                cuts.append(table.cut_changes())
            return TablesCut(self._tables, cuts, self.kind, tuple(map(self._meta, range(len(cuts)))))
        except BaseException:
            for cut in cuts:
                cut.rollback()
            raise

    def _meta(self, number: int) -> TableMeta:
        table = self._tables[number]
        state = table.state()
        return TableMeta(
            name=self._names[number],
            config=self._configs[number],
            layout=table.layout,
            row_bytes=table.row_bytes if self.kind == "rows" else 4 * table.dim,
            state=TableStateMeta(
                max_event_time=state.max_event_time, updates=state.updates, hashnet_scales=tuple(state.hashnet_scales)
            ),
        )


class UnwrittenChanges(NamedTuple):
    """Changes of one table that are about to be written."""

    table: int
    """Its index in the meta's `tables`."""
    ids: np.ndarray
    times: np.ndarray
    rows: np.ndarray
    erased: np.ndarray

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        return self.ids.nbytes + self.times.nbytes + self.rows.nbytes + self.erased.nbytes


class TablesCut:
    """The changes of all tables up to one moment, to be committed or rolled back once."""

    def __init__(
        self,
        tables: list[EmbeddingTable],
        cuts: list[TableCut],
        kind: Literal["rows", "values"],
        metas: tuple[TableMeta, ...],
    ) -> None:
        self.metas = metas
        self._tables = tables
        self._cuts = cuts
        self._kind = kind

    @property
    def event_time(self) -> int:
        """The newest event time of all tables at the cut."""
        return max((meta.state.max_event_time for meta in self.metas), default=0)

    def changes(self) -> Iterator[UnwrittenChanges]:
        """Yield the rows as they were at the cut, and the erased ids, in chunks."""
        for number, cut in enumerate(self._cuts):
            for chunk in cut:
                rows = chunk.rows
                if self._kind == "values":
                    entries = self._tables[number].decode(chunk.ids, chunk.times, chunk.rows)
                    rows = entries.values.numpy().view(np.uint8)
                yield UnwrittenChanges(number, chunk.ids, chunk.times, rows, chunk.erased)

    def commit(self) -> None:
        """Let the tables forget the changes, which are durable now."""
        for cut in self._cuts:
            cut.commit()

    def rollback(self) -> None:
        """Let the changes count as not yet committed again."""
        for cut in self._cuts:
            cut.rollback()


def write_segment(
    folder: Path, meta: SegmentMeta, changes: Iterable[UnwrittenChanges], state: PackedState | None = None
) -> SegmentInfo:
    """Write a segment that appears in `folder` whole and durable, or not at all.

    Whatever fails, the next attempt needs a new sequence number.
    """
    target = folder / segment_name(meta.sequence)
    temporary = folder / f".{target.name}.{secrets.token_hex(8)}{_UNFINISHED}"
    with _removed_on_failure(temporary):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            footer = _write_parts(descriptor, meta, changes, state)
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        temporary.rename(target)
    # It has not been acknowledged yet, and its rows will come again under another number.
    with _removed_on_failure(target):
        sync_to_disk(folder)
        return SegmentInfo.of(target, size, meta, footer)


def remove_unfinished_segments(folder: Path) -> None:
    """Remove what killed writers left behind. The caller must know that no writer is alive."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _write_parts(
    descriptor: int, meta: SegmentMeta, changes: Iterable[UnwrittenChanges], state: PackedState | None
) -> Footer:
    header = pack_header(meta)
    _write(descriptor, header)
    digest = _core.crc32c(header[-CRC_SIZE:])
    pieces, rows, erased = 0, [0] * len(meta.tables), [0] * len(meta.tables)
    for piece in _bounded(changes):
        head = _write_piece(descriptor, piece, meta.tables[piece.table].row_bytes)
        digest = add_to_digest(head, digest)
        pieces += 1
        rows[piece.table] += len(piece.ids)
        erased[piece.table] += len(piece.erased)
    state_size = 0
    if state is not None:
        head, state_size = _write_state(descriptor, state)
        digest = add_to_digest(head, digest)
    footer = pack_footer(
        Footer(pieces=pieces, state_size=state_size, rows=tuple(rows), erased=tuple(erased), digest=digest)
    )
    _write(descriptor, footer)
    return unpack_footer(footer, "footer", tables=len(meta.tables))


def _bounded(changes: Iterable[UnwrittenChanges]) -> Iterator[UnwrittenChanges]:
    """Yield the same changes in pieces that are not empty and not too large."""
    for table, ids, times, rows, erased in changes:
        for begin in range(0, max(len(ids), len(erased)), MAX_PIECE):
            part = slice(begin, begin + MAX_PIECE)
            yield UnwrittenChanges(table, ids[part], times[part], rows[part], erased[part])


def _write_piece(descriptor: int, piece: UnwrittenChanges, row_bytes: int) -> bytes:
    """Write a piece straight from the arrays' memory. Returns its header."""
    shapes = (piece.times.shape, piece.rows.shape, piece.erased.ndim)
    if shapes != (piece.ids.shape, (len(piece.ids), row_bytes), 1):
        # A reader finds its way by these numbers: others would lose the rows that follow.
        raise InvalidArgumentError(
            f"rows: expected [{len(piece.ids)}, {row_bytes}] and a time for each, got {piece.rows.shape}, {piece.times.shape}"
        )
    keys = (_memory(piece.ids, "<i8"), _memory(piece.erased, "<i8"), _memory(piece.times, "<u4"))
    rows, keys_crc = _memory(piece.rows, "u1"), 0
    for part in keys:
        keys_crc = _core.crc32c(part, keys_crc)
    header = pack_piece_header(
        PieceHeader(
            table=piece.table,
            rows=len(piece.ids),
            erased=len(piece.erased),
            keys_crc=keys_crc,
            rows_crc=_core.crc32c(rows),
        )
    )
    _write(descriptor, header, *keys, rows)
    return header


def _write_state(descriptor: int, state: PackedState) -> tuple[bytes, int]:
    tensors = state.tensor_bytes()
    crc = _core.crc32c(tensors, _core.crc32c(state.structure))
    header = pack_state_header(StateHeader(structure_size=len(state.structure), tensors_size=len(tensors), crc=crc))
    _write(descriptor, header, state.structure, tensors)
    return header, len(state.structure) + len(tensors)


def _memory(array: np.ndarray, dtype: str) -> np.ndarray:
    """View the bytes of `array`, which is copied only if it is not contiguous or of another type."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8)


def _write(descriptor: int, *parts: bytes | np.ndarray) -> None:
    waiting = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts if len(part)]
    while waiting:
        written = os.writev(descriptor, waiting)
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if written:
            waiting[0] = waiting[0][written:]
