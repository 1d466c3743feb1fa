"""Replaying segments: into tables, or as the history of one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from monolith.errors import CorruptFileError
from monolith.log.reader import LogReader
from monolith.log.segment import LogSegment
from monolith.log.segment_format import SegmentInfo, SegmentTable, TableChanges
from monolith.table import EmbeddingTable, TableState, bucket_of

__all__ = ["RowChange", "history", "replay"]

IN_MEMORY_BYTES = 2**26
"""The largest segment that a replay holds in memory as a whole."""


def replay(
    segment: LogSegment, tables: Mapping[str, EmbeddingTable], *, buckets: range | Sequence[range] | None = None
) -> None:
    """Apply the changes of `segment` to `tables`, and set the state they had.

    Everything is verified before the first row is changed. Replaying a segment is idempotent.

    Args:
        segment: Replay the segments of a chain in their order.
        tables: By the name they have in the log. Changes of other tables are skipped.
        buckets: Only ids in this range of buckets, or in these, for a table that is one shard of several.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable
        >>> from monolith.log import ChangeLog, LogReader
        >>> from monolith.testing import sgd_table_config
        >>> table, copy = (EmbeddingTable(sgd_table_config(1)) for _ in range(2))
        >>> with tempfile.TemporaryDirectory() as folder, ChangeLog(folder, [table]) as log:
        ...     _ = table.reinitialize([7, 8])
        ...     replay(LogReader(folder).read(log.commit(step=1)), {"test": copy})
        >>> sorted(copy)
        [7, 8]
    """
    for part in segment.info.tables:
        if part.name in tables:
            _check_fits(segment, part, tables[part.name])
    # A small segment stays in memory between the check and the replay, a large one is read twice.
    pieces = list(segment) if segment.info.size <= IN_MEMORY_BYTES else segment
    if pieces is segment:
        segment.check()
    else:
        segment.dense()
    ranges = [buckets] if isinstance(buckets, range) else buckets
    for piece in pieces:
        if piece.table.name in tables:
            _apply(piece, tables[piece.table.name], segment.info.kind == "values", ranges)
    for name, table in tables.items():
        state = _table_state(segment, name)
        if state is not None and segment.info.kind == "rows":
            table.set_state(state)


def _table_state(segment: LogSegment, name: str) -> TableState | None:
    """Return the state of table `name` besides its rows. Of several shards, it is the newest."""
    states = [part.meta.state for part in segment.info.tables if part.name == name]
    if not states:
        return None
    newest = max(states, key=lambda state: state.updates)
    return TableState(
        max_event_time=max(state.max_event_time for state in states),
        updates=newest.updates,
        hashnet_scales=newest.hashnet_scales,
    )


def _check_fits(segment: LogSegment, part: SegmentTable, table: EmbeddingTable) -> None:
    if segment.info.kind == "values":
        fits, has, expected = part.row_bytes == 4 * table.dim, f"{part.row_bytes // 4} values", f"{table.dim} values"
    else:
        fits, has, expected = part.layout == table.layout, part.layout, table.layout
    if not fits:
        raise CorruptFileError(f"{segment.path}: rows of table {part.name!r} have {has}, expected {expected}")
    if len(part.meta.state.hashnet_scales) != len(table.config.segments):
        raise CorruptFileError(
            f"{segment.path}: the state of table {part.name!r} is not of {len(table.config.segments)} segments"
        )


def _apply(piece: TableChanges, table: EmbeddingTable, values: bool, buckets: Sequence[range] | None) -> None:
    ids, times, rows, erased = piece.ids, piece.times, piece.rows, piece.erased
    if buckets is not None:
        mine = _in_buckets(ids, buckets)
        ids, times, rows, erased = ids[mine], times[mine], rows[mine], erased[_in_buckets(erased, buckets)]
    if len(erased):
        table.erase(erased)
    if not len(ids):
        return
    if values:
        for time in np.unique(times):
            at = times == time
            table.assign(ids[at], rows[at].view(np.float32), event_time=int(time))
    else:
        table.insert_rows(ids, times, rows)


def _in_buckets(ids: np.ndarray, buckets: Sequence[range]) -> np.ndarray:
    bucket, found = bucket_of(ids), np.zeros(len(ids), dtype=np.bool_)
    for part in buckets:
        found |= (bucket >= part.start) & (bucket < part.stop)
    return found


@dataclass(frozen=True, kw_only=True)
class RowChange:
    """One row after the changes of one segment."""

    sequence: int
    """The number of the segment."""
    step: int
    """Its global step."""
    time: float
    """When its changes were cut, seconds since 1970."""
    table: str
    """The name of the table."""
    event_time: int | None
    """Of the row's last write, seconds since 1970. None if it was erased."""
    values: tuple[float, ...] | None
    """The stored weights. None if the row was erased, evicted or expired."""
    slots: dict[str, tuple[float, ...]]
    """Optimizer state by name, if the log has it."""

    @property
    def erased(self) -> bool:
        """Whether the row was removed."""
        return self.values is None

    @property
    def norm(self) -> float | None:
        """Euclidean norm of `values`."""
        return None if self.values is None else float(np.linalg.norm(np.array(self.values)))


def history(reader: LogReader, id_: int, *, table: str | None = None, to: int | None = None) -> Iterator[RowChange]:
    """Yield every change of `id_` on the line that leads to `to` (None: the newest), oldest first, in one table or in all.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable
        >>> from monolith.log import ChangeLog
        >>> from monolith.testing import sgd_table_config
        >>> user = EmbeddingTable(sgd_table_config(1, name="user"))
        >>> with tempfile.TemporaryDirectory() as folder, ChangeLog(folder, [user]) as log:
        ...     user.assign([7], np.ones((1, 1), np.float32))
        ...     _ = log.commit(step=1)
        ...     _ = user.erase([7])
        ...     _ = log.commit(step=2)
        ...     [(change.step, change.values) for change in history(LogReader(folder), 7)]
        [(1, (1.0,)), (2, None)]
    """
    decoders: dict[str, EmbeddingTable] = {}
    wanted = np.array([id_], dtype=np.int64)
    for info in reader.line(to):
        with LogSegment(info.path) as segment:
            for piece in segment.select(wanted):
                if table in (None, piece.table.name):
                    yield _change(info, piece, decoders)


def _change(info: SegmentInfo, piece: TableChanges, decoders: dict[str, EmbeddingTable]) -> RowChange:
    values: np.ndarray | None = None
    slots: dict[str, tuple[float, ...]] = {}
    if len(piece.ids) and info.kind == "values":
        values = piece.values[0]
    elif len(piece.ids):
        entries = _decoder(piece, decoders).decode(piece.ids, piece.times, piece.rows)
        values = entries.values[0].numpy()
        slots = {name: tuple(slot[0].tolist()) for name, slot in entries.slots.items()}
    return RowChange(
        sequence=info.sequence,
        step=info.step,
        time=info.time,
        table=piece.table.name,
        event_time=int(piece.times[0]) if len(piece.ids) else None,
        values=None if values is None else tuple(values.tolist()),
        slots=slots,
    )


def _decoder(piece: TableChanges, decoders: dict[str, EmbeddingTable]) -> EmbeddingTable:
    """Return an empty table of the same layout, which can decode rows."""
    layout = piece.table.layout
    if layout not in decoders:
        config = piece.table.config().model_copy(update={"initial_capacity": 0})
        decoders[layout] = EmbeddingTable(config)
        if decoders[layout].layout != layout:
            raise CorruptFileError(
                f"table {piece.table.name!r} of a segment: its rows are of layout {layout!r}, its configuration makes "
                f"{decoders[layout].layout!r}"
            )
    return decoders[layout]
