"""The bytes of a segment: fixed parts, and every check that needs no more than them. docs/formats.md has the picture.

A reader trusts nothing: each length is held against the size of the file before memory is asked for, and the footer's checksum
covers the checksum of every other part, so that pieces of two files never pass for one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from monolith import _core
from monolith.config import Config
from monolith.errors import CorruptFileError

__all__ = [
    "CRC_SIZE",
    "Footer",
    "HEAD_SIZE",
    "MAX_PIECE",
    "PIECE_SIZE",
    "PieceHeader",
    "STATE_SIZE",
    "SegmentMeta",
    "StateHeader",
    "TableMeta",
    "TableStateMeta",
    "add_to_digest",
    "footer_size",
    "meta_size",
    "pack_footer",
    "pack_header",
    "pack_piece_header",
    "pack_state_header",
    "unpack_footer",
    "unpack_piece_header",
    "unpack_state_header",
    "unseal",
]

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
"""Most rows, and most erased ids, in one piece: what a reader holds in memory at a time."""


class TableStateMeta(Config):
    """What a table knows beside its rows."""

    max_event_time: int = Field(ge=0, lt=2**32)
    updates: int = Field(ge=0, lt=2**32)
    hashnet_scales: tuple[Annotated[float, Field(ge=0)], ...]


class TableMeta(Config):
    """A table, or one shard of it, as it was when its changes were cut."""

    name: str
    config: dict[str, JsonValue]
    """A `TableConfig`; not read as one here, so that a segment outlives a field of it."""
    layout: str
    row_bytes: int = Field(ge=1, lt=2**32)
    state: TableStateMeta


class SegmentMeta(Config):
    """What a segment says of itself before its rows."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceHeader:
    """A run of changes of one table."""

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
    """Where the nested state is: JSON, then safetensors."""

    structure_size: int
    tensors_size: int
    crc: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer:
    """What the parts before it must add up to."""

    pieces: int
    state_size: int
    """Bytes of the nested state; 0 where there is none."""
    rows: tuple[int, ...]
    """By table."""
    erased: tuple[int, ...]
    """By table."""
    digest: int
    """CRC-32C of the header's checksum and of the headers of all pieces and of the state, in their order."""
    checksum: int = field(default=0, compare=False)
    """CRC-32C of the footer, known once it is packed: stands for the whole file."""


def _seal(data: bytes) -> bytes:
    """`data` and its checksum."""
    return data + _CRC.pack(_core.crc32c(data))


def unseal(data: bytes, where: str) -> bytes:
    """`data` without its checksum, which must be right."""
    body = data[:-CRC_SIZE]
    if len(data) < CRC_SIZE or _CRC.unpack_from(data, len(body))[0] != _core.crc32c(body):
        raise CorruptFileError(f"{where}: its checksum is wrong; the file is damaged")
    return body


def add_to_digest(header: bytes, digest: int) -> int:
    """The digest of everything so far and of the sealed `header` of one more part.

    Its checksum is left out: a CRC over something and its own CRC is the same for everything.
    """
    return int(_core.crc32c(header[:-CRC_SIZE], digest))


def pack_header(meta: SegmentMeta) -> bytes:
    """The file's first part."""
    text = meta.model_dump_json().encode()
    return _seal(_HEAD.pack(_MAGIC, _VERSION, len(text)) + text)


def meta_size(data: bytes, where: str) -> int:
    """Length of the meta behind the first `HEAD_SIZE` bytes; a file of another kind or of a newer version is refused."""
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
    """What comes before the ids of a piece."""
    return _seal(_PIECE.pack(_PIECE_MAGIC, piece.table, piece.rows, piece.erased, piece.keys_crc, piece.rows_crc))


def unpack_piece_header(data: bytes, where: str, *, tables: int) -> PieceHeader:
    """The inverse, with its numbers within bounds."""
    magic, table, rows, erased, keys_crc, rows_crc = _PIECE.unpack(unseal(data, where))
    if magic != _PIECE_MAGIC:
        raise CorruptFileError(f"{where}: expected a piece, got {magic!r}")
    if table >= tables or max(rows, erased) > MAX_PIECE or rows + erased == 0:
        raise CorruptFileError(f"{where}: a piece of table {table} of {tables} with {rows} rows, {erased} erased ids")
    return PieceHeader(table=table, rows=rows, erased=erased, keys_crc=keys_crc, rows_crc=rows_crc)


def pack_state_header(state: StateHeader) -> bytes:
    """What comes before the nested state."""
    return _seal(_STATE.pack(_STATE_MAGIC, state.structure_size, state.tensors_size, state.crc))


def unpack_state_header(data: bytes, where: str) -> StateHeader:
    """The inverse."""
    magic, structure, tensors, crc = _STATE.unpack(unseal(data, where))
    if magic != _STATE_MAGIC:
        raise CorruptFileError(f"{where}: expected the nested state, got {magic!r}")
    return StateHeader(structure_size=structure, tensors_size=tensors, crc=crc)


def _footer(tables: int) -> struct.Struct:
    return struct.Struct(f"<4sIQQ{2 * tables}QI")


def footer_size(tables: int) -> int:
    """Bytes of the last part, checksum included."""
    return _footer(tables).size + CRC_SIZE


def pack_footer(footer: Footer) -> bytes:
    """The file's last part; its last four bytes are the checksum."""
    tables = len(footer.rows)
    fields = (_FOOTER_MAGIC, tables, footer.pieces, footer.state_size, *footer.rows, *footer.erased, footer.digest)
    return _seal(_footer(tables).pack(*fields))


def unpack_footer(data: bytes, where: str, *, tables: int) -> Footer:
    """The inverse."""
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
