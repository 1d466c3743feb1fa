"""What changed in a table: a cut, read in chunks during training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from monolith import _core

__all__ = ["CutPiece", "FeedPiece", "RawRows", "TableCut"]


@dataclass(frozen=True, kw_only=True)
class RawRows:
    """Rows as they lie in a table, with their optimizer state."""

    ids: np.ndarray
    """int64 [n]."""
    times: np.ndarray
    """uint32 [n]: event time of the last write, seconds."""
    rows: np.ndarray
    """uint8 [n, row_bytes], in the table's layout."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class CutPiece(RawRows):
    """Some of the ids of a cut: rows as they were when it was made, and ids that had been removed by then."""

    erased: np.ndarray
    """int64 [m]: removed, evicted or cleared."""

    def __len__(self) -> int:
        return len(self.ids) + len(self.erased)


class TableCut:
    """The changes of a table up to one moment, made by `EmbeddingTable.cut_changes`.

    Iterate over it once, on any thread: each id comes once at most, as a row or as erased. Rows are as they were at the cut,
    whatever is written meanwhile. Then `commit` when the changes are safe, so that the table forgets them, or `rollback` when
    they are not, so that they come again with the next cut. Until one of the two, the table makes no other cut.

    Example:
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> table = EmbeddingTable(TableConfig(name="item", segments=(Segment(dim=2),)))
        >>> table.track_changes()
        >>> _ = table.reinitialize([5, 6])
        >>> cut = table.cut_changes()
        >>> _ = table.erase([5])
        >>> sorted(id_ for piece in cut for id_ in piece.ids.tolist())
        [5, 6]
        >>> cut.commit()
        >>> [piece.erased.tolist() for piece in table.cut_changes()]
        [[5]]
    """

    def __init__(self, table: _core.Table) -> None:
        self._table = table
        self._number = table.cut_changes()

    def __iter__(self) -> Iterator[CutPiece]:
        while (arrays := self._table.read_changes(self._number)) is not None:
            ids, times, rows, erased = arrays
            yield CutPiece(ids=ids, times=times, rows=rows, erased=erased)

    def commit(self) -> None:
        """Forget the changes: they are safe elsewhere. Refused until all pieces have been read."""
        self._table.commit_changes(self._number)

    def rollback(self) -> None:
        """Return the changes to the table, merged with newer ones, whether they were read or not."""
        self._table.rollback_changes(self._number)


@dataclass(frozen=True, kw_only=True)
class FeedPiece:
    """Some rows of a table that changed since its feed was last read, as they are now, and ids that have no row any more."""

    ids: np.ndarray
    """int64 [n]."""
    times: np.ndarray
    """uint32 [n]: event time of the last write, seconds."""
    values: np.ndarray
    """float32 [n, dim]: stored weights."""
    erased: np.ndarray
    """int64 [m]."""
