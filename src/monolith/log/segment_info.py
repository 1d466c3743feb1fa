"""What a segment is called, says of itself, and hands out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from monolith.errors import ConfigError, CorruptFileError
from monolith.log.segment_format import TableMeta
from monolith.table import TableConfig

__all__ = ["SegmentInfo", "SegmentTable", "TableChanges", "segment_name", "sequence_of"]

_ENDING = ".segment"


def segment_name(sequence: int) -> str:
    """The file of a sequence number.

    Example:
        >>> segment_name(7)
        '00000000000000000007.segment'
    """
    return f"{sequence:020d}{_ENDING}"


def sequence_of(name: str) -> int | None:
    """The sequence number of a file; None if it is not called like a segment.

    Example:
        >>> sequence_of("00000000000000000007.segment"), sequence_of("7.segment")
        (7, None)
    """
    digits = name.removesuffix(_ENDING)
    if len(digits) != 20 or not (digits.isascii() and digits.isdecimal()) or segment_name(int(digits)) != name:
        return None
    return int(digits)


@dataclass(frozen=True, kw_only=True)
class SegmentTable:
    """One table of a segment; several have the same name if the table is spread over shards."""

    name: str
    layout: str
    """Rows fit a table iff its `layout` is the same text."""
    row_bytes: int
    """Bytes of a row in this segment."""
    rows: int
    """Rows changed."""
    erased: int
    """Ids erased, evicted or expired."""
    meta: TableMeta
    """Its configuration and state as they were written."""

    def config(self) -> TableConfig:
        """The configuration the table had; `CorruptFileError` if this release cannot read it."""
        try:
            return TableConfig.from_json(json.dumps(self.meta.config))
        except ConfigError as error:
            raise CorruptFileError(
                f"table {self.name!r} of a segment: its configuration is unreadable: {error}"
            ) from None


@dataclass(frozen=True, kw_only=True)
class SegmentInfo:
    """What a segment says of itself, without its rows."""

    sequence: int
    """1, 2, 3, ...: never used twice in a folder."""
    parent: int
    """The sequence number this one continues; 0: it begins from nothing."""
    parent_checksum: int | None
    """The parent's `checksum`; None without a parent, or if its file had been removed already."""
    step: int
    """The global step of the commit."""
    time: float
    """When the changes were cut, seconds since 1970."""
    event_time: int
    """The newest event time trained by then, seconds since 1970."""
    kind: Literal["rows", "values"]
    """`rows`: whole rows, with optimizer state; `values`: float32 values alone."""
    complete: bool
    """Whether the tables were empty when this line of the log began, so that its chain from 0 has all their rows."""
    has_dense: bool
    """Whether the dense state is in it, so that a run can be restored to this moment."""
    has_source: bool
    """Whether the place in the data is in it."""
    tables: tuple[SegmentTable, ...]
    """All tables of the log, those without changes too."""
    path: Path
    """The file."""
    size: int
    """Bytes of the file."""
    checksum: int
    """CRC-32C that stands for the whole file: it covers the checksums of all parts."""

    @property
    def name(self) -> str:
        """The file's name within the log's folder."""
        return self.path.name

    @property
    def rows(self) -> int:
        """Rows changed in all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def erased(self) -> int:
        """Ids erased in all tables."""
        return sum(table.erased for table in self.tables)


@dataclass(frozen=True, kw_only=True)
class TableChanges:
    """A piece of a segment: at most 65,536 rows and as many erased ids of one table."""

    table: SegmentTable
    """Whose changes."""
    ids: np.ndarray
    """int64 [n]."""
    times: np.ndarray
    """uint32 [n]: event time of each row's last write."""
    rows: np.ndarray
    """uint8 [n, row_bytes]: whole rows, or what `values` shows."""
    erased: np.ndarray
    """int64 [m]."""

    @property
    def values(self) -> np.ndarray:
        """float32 [n, dim]: the rows of a segment of kind `values`."""
        return self.rows.view(np.float32)
