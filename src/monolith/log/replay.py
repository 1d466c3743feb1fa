"""Bringing the changes of a segment into tables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from monolith.errors import CorruptFileError
from monolith.log.segment import LogSegment
from monolith.log.segment_info import SegmentTable, TableChanges
from monolith.table import EmbeddingTable, TableState, bucket_of

__all__ = ["replay", "table_state"]


def replay(segment: LogSegment, tables: Mapping[str, EmbeddingTable], *, buckets: range | None = None) -> None:
    """Upsert and erase in `tables` what changed in `segment`, and give them the state they had.

    Everything is checked before the first row is changed. Replaying a segment twice is the same as once.

    Args:
        segment: what to bring in; replay the segments of a chain in their order.
        tables: by the name they have in the log; changes of other tables are passed over.
        buckets: only ids of these, for a table that is one shard of several.

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
    segment.check()
    for piece in segment:
        if piece.table.name in tables:
            _apply(piece, tables[piece.table.name], segment.info.kind == "values", buckets)
    for name, table in tables.items():
        state = table_state(segment, name)
        if state is not None and segment.info.kind == "rows":
            table.set_state(state)


def table_state(segment: LogSegment, name: str) -> TableState | None:
    """What table `name` knew beside its rows; of several shards, the newest of each."""
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


def _apply(piece: TableChanges, table: EmbeddingTable, values: bool, buckets: range | None) -> None:
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


def _in_buckets(ids: np.ndarray, buckets: range) -> np.ndarray:
    bucket = bucket_of(ids)
    return (bucket >= buckets.start) & (bucket < buckets.stop)
