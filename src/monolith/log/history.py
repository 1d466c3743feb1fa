"""The history of one id: when its row changed, and to what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from monolith.errors import CorruptFileError
from monolith.log.log_reader import LogReader
from monolith.log.segment import LogSegment
from monolith.log.segment_info import SegmentInfo, TableChanges
from monolith.table import EmbeddingTable

__all__ = ["RowChange", "history"]


@dataclass(frozen=True, kw_only=True)
class RowChange:
    """One row after the changes of one segment."""

    sequence: int
    """The segment."""
    step: int
    """Its global step."""
    time: float
    """When it was cut, seconds since 1970."""
    table: str
    """Whose row."""
    event_time: int | None
    """Of the row's last write, seconds since 1970; None if it was erased."""
    values: tuple[float, ...] | None
    """The stored weights; None if the row was erased, evicted or expired."""
    slots: dict[str, tuple[float, ...]]
    """Optimizer state by name, if the log has it."""

    @property
    def erased(self) -> bool:
        """Whether the row was removed."""
        return self.values is None

    @property
    def norm(self) -> float | None:
        """Euclidean length of `values`."""
        return None if self.values is None else float(np.linalg.norm(np.array(self.values)))


def history(reader: LogReader, id_: int, *, table: str | None = None, to: int | None = None) -> Iterator[RowChange]:
    """Every change of `id_` on the line that leads to `to` (None: the newest), oldest first; of one table or of all.

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
        for piece in LogSegment(info.path).select(wanted):
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
    """An empty table of the same layout, which knows what the bytes of a row mean."""
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
