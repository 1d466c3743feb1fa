"""The bytes of a segment and what it says of itself, with every check that needs no more than one part. See docs/formats.md.

A reader trusts nothing: each length is compared with the size of the file before memory is allocated, and the footer's checksum
covers the checksum of every other part, so parts of two files never pass for one.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, JsonValue

from monolith import _core
from monolith.config import Config
from monolith.errors import ConfigError, CorruptFileError
from monolith.table import TableConfig
from monolith.table.table_file import FileEntry

__all__ = [
    "CRC_SIZE",
    "Footer",
    "HEAD_SIZE",
    "MAX_PIECE",
    "PIECE_SIZE",
    "PieceHeader",
    "STATE_SIZE",
    "SegmentInfo",
    "SegmentMeta",
    "SegmentTable",
    "StateHeader",
    "TableChanges",
    "TableMeta",
    "TableStateMeta",
    "add_to_digest",
    "footer_size",
    "meta_size",
    "pack_footer",
    "pack_header",
    "pack_piece_header",
    "pack_state_header",
    "segment_name",
    "sequence_of",
    "unpack_footer",
    "unpack_piece_header",
    "unpack_state_header",
    "unseal",
]

_ENDING = ".segment"
_NAME = re.compile(r"([0-9]{20})\.segment")
_VERSION = 1
_MAGIC, _PIECE_MAGIC, _STATE_MAGIC, _FOOTER_MAGIC = b"MONOSEGM", b"PIEC", b"STAT", b"LEND"

_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<8sII")  # magic, version, length of the meta
_PIECE = struct.Struct("<4sIIIII")  # magic, table, rows, erased, checksums of the keys and of the rows
_STATE = struct.Struct("<4sQQI")  # magic, length of the structure, length of the tensors, checksum of both

CRC_SIZE = _CRC.size
HEAD_SIZE = _HEAD.size
PIECE_SIZE = _PIECE.size + CRC_SIZE
STATE_SIZE = _STATE.size + CRC_SIZE
MAX_PIECE = 65536
"""The most rows, and the most erased ids, in one piece. A reader holds one piece in memory at a time."""


class TableStateMeta(Config):
    """The state of a table besides its rows."""

    max_event_time: int = Field(ge=0, lt=2**32)
    updates: int = Field(ge=0, lt=2**32)
    hashnet_scales: tuple[Annotated[float, Field(ge=0)], ...]


class TableMeta(Config):
    """A table, or one shard of it, as it was when its changes were cut."""

    name: str
    config: dict[str, JsonValue]
    """A `TableConfig`. It is not parsed as one here, so a segment stays readable when a field is removed."""
    layout: str
    row_bytes: int = Field(ge=1, lt=2**32)
    state: TableStateMeta


class SegmentMeta(Config):
    """The header of a segment, before its rows."""

    sequence: int = Field(ge=1, lt=2**63)
    parent: int = Field(ge=0, lt=2**63)
    parent_checksum: int | None = Field(ge=0, lt=2**32)
    step: int = Field(ge=0, lt=2**63)
    time: float = Field(ge=0, lt=2**37)
    event_time: int = Field(ge=0, lt=2**32)
    kind: Literal["rows", "values"]
    complete: bool
    has_dense: bool
    has_source: bool
    tables: tuple[TableMeta, ...]
    parts: tuple[FileEntry, ...] = ()
    """Written only if there are any, so earlier releases can read all other segments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceHeader:
    """The header of a run of changes of one table."""

    table: int
    rows: int
    erased: int
    keys_crc: int
    rows_crc: int

    @property
    def keys_size(self) -> int:
        """Bytes of ids, erased ids and times."""
        return 12 * self.rows + 8 * self.erased


@dataclass(frozen=True, kw_only=True, slots=True)
class StateHeader:
    """The header of the nested state, which is JSON followed by safetensors."""

    structure_size: int
    tensors_size: int
    crc: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer:
    """The totals that the parts before it must add up to."""

    pieces: int
    state_size: int
    """Bytes of the nested state. 0 if there is none."""
    rows: tuple[int, ...]
    """By table."""
    erased: tuple[int, ...]
    """By table."""
    digest: int
    """CRC-32C of the header's checksum and of the headers of all pieces and of the state, in their order."""
    checksum: int = field(default=0, compare=False)
    """CRC-32C of the footer, known once it is packed. It identifies the whole file."""


def _seal(data: bytes) -> bytes:
    """Append the checksum of `data`."""
    return data + _CRC.pack(_core.crc32c(data))


def unseal(data: bytes, where: str) -> bytes:
    """Verify and remove the checksum at the end of `data`."""
    body = data[:-CRC_SIZE]
    if len(data) < CRC_SIZE or _CRC.unpack_from(data, len(body))[0] != _core.crc32c(body):
        raise CorruptFileError(f"{where}: its checksum is wrong; the file is damaged")
    return body


def add_to_digest(header: bytes, digest: int) -> int:
    """Extend `digest` by the sealed `header` of one more part.

    The checksum of the header is left out, because the CRC of any data followed by its own CRC is a constant.
    """
    return int(_core.crc32c(header[:-CRC_SIZE], digest))


def pack_header(meta: SegmentMeta) -> bytes:
    """Encode the first part of the file."""
    text = meta.model_dump_json(exclude=None if meta.parts else {"parts"}).encode()
    return _seal(_HEAD.pack(_MAGIC, _VERSION, len(text)) + text)


def meta_size(data: bytes, where: str) -> int:
    """Return the length of the header's JSON, which follows the first `HEAD_SIZE` bytes.

    Raises `CorruptFileError` for a file of another kind or of a newer version.
    """
    if len(data) < HEAD_SIZE:
        raise CorruptFileError(f"{where}: too short for a segment of a change log")
    magic, version, length = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise CorruptFileError(f"{where}: is not a segment of a change log")
    if version > _VERSION:
        raise CorruptFileError(
            f"{where}: version {version}, but this release reads up to {_VERSION}; upgrade to read it"
        )
    if version < 1:
        raise CorruptFileError(f"{where}: version {version} does not exist; the file is damaged")
    return int(length)


def pack_piece_header(piece: PieceHeader) -> bytes:
    """Encode the header of a piece."""
    return _seal(_PIECE.pack(_PIECE_MAGIC, piece.table, piece.rows, piece.erased, piece.keys_crc, piece.rows_crc))


def unpack_piece_header(data: bytes, where: str, *, tables: int) -> PieceHeader:
    """Decode the header of a piece and check its bounds."""
    magic, table, rows, erased, keys_crc, rows_crc = _PIECE.unpack(unseal(data, where))
    if magic != _PIECE_MAGIC:
        raise CorruptFileError(f"{where}: expected a piece, got {magic!r}")
    if table >= tables or max(rows, erased) > MAX_PIECE or rows + erased == 0:
        raise CorruptFileError(f"{where}: a piece of table {table} of {tables} with {rows} rows, {erased} erased ids")
    return PieceHeader(table=table, rows=rows, erased=erased, keys_crc=keys_crc, rows_crc=rows_crc)


def pack_state_header(state: StateHeader) -> bytes:
    """Encode the header of the nested state."""
    return _seal(_STATE.pack(_STATE_MAGIC, state.structure_size, state.tensors_size, state.crc))


def unpack_state_header(data: bytes, where: str) -> StateHeader:
    """Decode the header of the nested state."""
    magic, structure, tensors, crc = _STATE.unpack(unseal(data, where))
    if magic != _STATE_MAGIC:
        raise CorruptFileError(f"{where}: expected the nested state, got {magic!r}")
    return StateHeader(structure_size=structure, tensors_size=tensors, crc=crc)


def _footer(tables: int) -> struct.Struct:
    return struct.Struct(f"<4sIQQ{2 * tables}QI")


def footer_size(tables: int) -> int:
    """Return the size of the last part of the file, checksum included."""
    return _footer(tables).size + CRC_SIZE


def pack_footer(footer: Footer) -> bytes:
    """Encode the last part of the file. Its last four bytes are the checksum."""
    tables = len(footer.rows)
    fields = (_FOOTER_MAGIC, tables, footer.pieces, footer.state_size, *footer.rows, *footer.erased, footer.digest)
    return _seal(_footer(tables).pack(*fields))


def unpack_footer(data: bytes, where: str, *, tables: int) -> Footer:
    """Decode the last part of the file."""
    magic, said, pieces, state_size, *counts, digest = _footer(tables).unpack(unseal(data, where))
    if magic != _FOOTER_MAGIC or said != tables:
        raise CorruptFileError(f"{where}: the footer is not that of a segment with {tables} tables")
    return Footer(
        pieces=pieces,
        state_size=state_size,
        rows=tuple(counts[:tables]),
        erased=tuple(counts[tables:]),
        digest=digest,
        checksum=_CRC.unpack_from(data, len(data) - CRC_SIZE)[0],
    )


def segment_name(sequence: int) -> str:
    """Return the file name of a sequence number.

    Example:
        >>> segment_name(7)
        '00000000000000000007.segment'
    """
    return f"{sequence:020d}{_ENDING}"


def sequence_of(name: str) -> int | None:
    """Return the sequence number in a file name, or None if it is not the name of a segment.

    Example:
        >>> sequence_of("00000000000000000007.segment"), sequence_of("7.segment")
        (7, None)
    """
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


@dataclass(frozen=True, kw_only=True)
class SegmentTable:
    """One table of a segment. The shards of a table share its name."""

    name: str
    layout: str
    """Rows fit a table if and only if its `layout` is equal."""
    row_bytes: int
    """Bytes of a row in this segment."""
    rows: int
    """Rows changed."""
    erased: int
    """Ids erased, evicted or expired."""
    meta: TableMeta
    """Its configuration and state as they were written."""

    def config(self) -> TableConfig:
        """Parse the configuration of the table. Raises `CorruptFileError` if this release cannot read it."""
        try:
            return TableConfig.from_json(json.dumps(self.meta.config))
        except ConfigError as error:
            raise CorruptFileError(
                f"table {self.name!r} of a segment: its configuration is unreadable: {error}"
            ) from None


@dataclass(frozen=True, kw_only=True)
class SegmentInfo:
    """The header and footer of a segment, without its rows."""

    sequence: int
    """1, 2, 3, ... A number is never used twice in a folder."""
    parent: int
    """The sequence number this one continues. 0 means that it starts from nothing."""
    parent_checksum: int | None
    """The parent's `checksum`. None without a parent, or if its file had already been removed."""
    step: int
    """The global step of the commit."""
    time: float
    """When the changes were cut, seconds since 1970."""
    event_time: int
    """The newest event time trained by then, seconds since 1970."""
    kind: Literal["rows", "values"]
    """`rows` are whole rows with optimizer state, `values` are float32 values only."""
    complete: bool
    """Whether the tables were empty when this line of the log began, so its chain from 0 has all their rows."""
    has_dense: bool
    """Whether it has the dense state, so a run can be restored to this moment."""
    has_source: bool
    """Whether it has the position in the data."""
    tables: tuple[SegmentTable, ...]
    """All tables of the log, also those without changes."""
    path: Path
    """The file."""
    size: int
    """Bytes of the file."""
    checksum: int
    """CRC-32C that identifies the whole file, because it covers the checksums of all parts."""
    parts: tuple[FileEntry, ...] = ()
    """In the log of a run of ranks, the segments with the rows that each rank had at this moment, in the order of ranks. Named
    relative to the model_dir."""

    @classmethod
    def of(cls, path: Path, size: int, meta: SegmentMeta, footer: Footer) -> SegmentInfo:
        """Combine the header and the footer of the file at `path`."""
        tables = tuple(
            SegmentTable(name=t.name, layout=t.layout, row_bytes=t.row_bytes, rows=rows, erased=erased, meta=t)
            for t, rows, erased in zip(meta.tables, footer.rows, footer.erased, strict=True)
        )
        return cls(
            sequence=meta.sequence,
            parent=meta.parent,
            parent_checksum=meta.parent_checksum,
            step=meta.step,
            time=meta.time,
            event_time=meta.event_time,
            kind=meta.kind,
            complete=meta.complete,
            has_dense=meta.has_dense,
            has_source=meta.has_source,
            tables=tables,
            path=path,
            size=size,
            checksum=footer.checksum,
            parts=meta.parts,
        )

    @property
    def name(self) -> str:
        """The file's name within the log's folder."""
        return self.path.name

    def entry(self, folder: str) -> FileEntry:
        """Return the segment as a manifest, or another segment, names it. `folder` is that of the log, as seen from there."""
        return FileEntry(name=f"{folder}/{self.name}", size=self.size, checksum=f"crc32c:{self.checksum:08x}")

    @property
    def rows(self) -> int:
        """Rows changed, over all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def erased(self) -> int:
        """Ids erased, over all tables."""
        return sum(table.erased for table in self.tables)


@dataclass(frozen=True, kw_only=True)
class TableChanges:
    """A piece of a segment: at most 65,536 rows and as many erased ids of one table."""

    table: SegmentTable
    """Whose changes."""
    ids: np.ndarray
    """int64 [n]."""
    times: np.ndarray
    """uint32 [n], the event time of each row's last write."""
    rows: np.ndarray
    """uint8 [n, row_bytes], whole rows, or the bytes of `values`."""
    erased: np.ndarray
    """int64 [m]."""

    @property
    def values(self) -> np.ndarray:
        """float32 [n, dim], the rows of a segment of kind `values`."""
        return self.rows.view(np.float32)
