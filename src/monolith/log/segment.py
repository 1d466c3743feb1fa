"""`LogSegment`: the changes of one commit, read from their file in pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from monolith import _core
from monolith.errors import ConfigError, CorruptFileError
from monolith.log.bounded_file import BoundedFile
from monolith.log.segment_format import (
    CRC_SIZE,
    HEAD_SIZE,
    PIECE_SIZE,
    STATE_SIZE,
    Footer,
    PieceHeader,
    SegmentMeta,
    StateHeader,
    add_to_digest,
    footer_size,
    meta_size,
    unpack_footer,
    unpack_piece_header,
    unpack_state_header,
    unseal,
)
from monolith.log.segment_info import SegmentInfo, SegmentTable, TableChanges, segment_name
from monolith.state_bytes import State, unpack_state

__all__ = ["LogSegment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    header: PieceHeader
    offset: int
    """Of its ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    """Where everything is; made only if headers, counts, lengths and digest agree with each other and with the footer."""

    pieces: list[_Piece]
    state: StateHeader | None
    state_offset: int


class LogSegment:
    """One commit of the change log. Iterating reads it piece by piece; nothing of a damaged piece is handed out.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable
        >>> from monolith.log import ChangeLog, LogReader
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(1, name="user"))
        >>> with tempfile.TemporaryDirectory() as folder, ChangeLog(folder, [table]) as log:
        ...     _ = table.reinitialize([7, 8])
        ...     sequence = log.commit(step=1)
        ...     for piece in LogReader(folder).read(sequence):
        ...         piece.table.name, sorted(piece.ids.tolist())
        ('user', [7, 8])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with BoundedFile(self.path) as file:
            meta, self._body = _read_meta(file)
            self._footer = _read_footer(file, meta, self._body)
        self.info = _info(self.path, file.size, meta, self._footer)

    def __iter__(self) -> Iterator[TableChanges]:
        with BoundedFile(self.path) as file:
            for piece in self._read_index(file).pieces:
                yield self._changes(file, piece)

    def select(self, ids: np.ndarray) -> Iterator[TableChanges]:
        """The changes of `ids` alone; rows are read only where a piece has one of them."""
        with BoundedFile(self.path) as file:
            for piece in self._read_index(file).pieces:
                found, erased, times = self._keys(file, piece)
                mine, gone = np.isin(found, ids), np.isin(erased, ids)
                if mine.any() or gone.any():
                    yield TableChanges(
                        table=self.info.tables[piece.header.table],
                        ids=found[mine],
                        times=times[mine],
                        rows=self._rows(file, piece)[mine],
                        erased=erased[gone],
                    )

    def dense(self) -> State | None:
        """The dense state given to `commit`, or None."""
        return self._state("dense")

    def source(self) -> State | None:
        """The place in the data given to `commit`, or None."""
        return self._state("source")

    def check(self) -> None:
        """Read everything and hold it against its checksums; `CorruptFileError` says what is wrong."""
        for _ in self:
            pass
        self._state("dense")

    def __repr__(self) -> str:
        return (
            f"LogSegment({self.info.sequence}, parent={self.info.parent}, step={self.info.step}, rows={self.info.rows})"
        )

    def _state(self, part: str) -> State | None:
        with BoundedFile(self.path) as file:
            index = self._read_index(file)
            if index.state is None:
                return None
            data = file.bytes(index.state_offset, index.state.structure_size + index.state.tensors_size)
        if _core.crc32c(data) != index.state.crc:
            raise CorruptFileError(f"{self.path}: the checksum of the nested state is wrong; the file is damaged")
        border = index.state.structure_size
        state = unpack_state(data[:border], data[border:], str(self.path))
        if not isinstance(state, dict) or set(state) != _state_parts(self.info):
            raise CorruptFileError(f"{self.path}: its nested state is not what its header promises")
        return state.get(part)

    def _changes(self, file: BoundedFile, piece: _Piece) -> TableChanges:
        ids, erased, times = self._keys(file, piece)
        table, rows = self.info.tables[piece.header.table], self._rows(file, piece)
        return TableChanges(table=table, ids=ids, times=times, rows=rows, erased=erased)

    def _keys(self, file: BoundedFile, piece: _Piece) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        header = piece.header
        keys = file.read(piece.offset, header.keys_size)
        if _core.crc32c(keys) != header.keys_crc:
            raise CorruptFileError(f"{self.path}: the checksum of {header.rows} ids at byte {piece.offset} is wrong")
        ids, erased, times = np.split(keys, [8 * header.rows, 8 * (header.rows + header.erased)])
        return ids.view("<i8"), erased.view("<i8"), times.view("<u4")

    def _rows(self, file: BoundedFile, piece: _Piece) -> np.ndarray:
        count, width = piece.header.rows, self.info.tables[piece.header.table].row_bytes
        offset = piece.offset + piece.header.keys_size
        rows = file.read(offset, count * width)
        if _core.crc32c(rows) != piece.header.rows_crc:
            raise CorruptFileError(f"{self.path}: the checksum of {count} rows at byte {offset} is wrong")
        return rows.reshape(count, width)

    def _read_index(self, file: BoundedFile) -> _Index:
        """Walk over all headers before the first row is used: what is read then is known to belong together."""
        where, widths = str(self.path), [table.row_bytes for table in self.info.tables]
        end = file.size - footer_size(len(widths))
        position, digest = self._body, _core.crc32c(file.bytes(self._body - CRC_SIZE, CRC_SIZE))
        pieces: list[_Piece] = []
        rows, erased = [0] * len(widths), [0] * len(widths)
        for _ in range(self._footer.pieces):
            head = file.bytes(position, PIECE_SIZE, end=end)
            header, digest = unpack_piece_header(head, where, tables=len(widths)), add_to_digest(head, digest)
            pieces.append(_Piece(header=header, offset=position + PIECE_SIZE))
            rows[header.table] += header.rows
            erased[header.table] += header.erased
            position += PIECE_SIZE + header.keys_size + header.rows * widths[header.table]
        state = None
        if self._footer.state_size:
            head = file.bytes(position, STATE_SIZE, end=end)
            state, digest = unpack_state_header(head, where), add_to_digest(head, digest)
            position += STATE_SIZE
        state_size = 0 if state is None else state.structure_size + state.tensors_size
        counted = Footer(
            pieces=len(pieces), state_size=state_size, rows=tuple(rows), erased=tuple(erased), digest=digest
        )
        if position + state_size != end or counted != self._footer:
            raise CorruptFileError(f"{where}: its parts and its footer do not belong together; the file is damaged")
        return _Index(pieces=pieces, state=state, state_offset=position)


def _state_parts(info: SegmentInfo) -> set[str]:
    return {part for part, there in (("dense", info.has_dense), ("source", info.has_source)) if there}


def _read_meta(file: BoundedFile) -> tuple[SegmentMeta, int]:
    """What the header says, and where it ends."""
    where = str(file.path)
    size = HEAD_SIZE + meta_size(file.bytes(0, min(HEAD_SIZE, file.size)), where) + CRC_SIZE
    header = unseal(file.bytes(0, size), where)
    try:
        meta = SegmentMeta.from_json(header[HEAD_SIZE:].decode())
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{where}: its header cannot be read: {error}") from None
    if segment_name(meta.sequence) != file.path.name:
        raise CorruptFileError(f"{where}: holds sequence {meta.sequence}; the file was renamed")
    if meta.parent >= meta.sequence:
        raise CorruptFileError(f"{where}: continues sequence {meta.parent}, which is not older")
    return meta, size


def _read_footer(file: BoundedFile, meta: SegmentMeta, body: int) -> Footer:
    size = footer_size(len(meta.tables))
    if file.size - size < body:
        raise CorruptFileError(f"{file.path}: ends before its footer; the file is damaged")
    footer = unpack_footer(file.bytes(file.size - size, size), str(file.path), tables=len(meta.tables))
    if (footer.state_size > 0) != (meta.has_dense or meta.has_source):
        raise CorruptFileError(f"{file.path}: its nested state is not what its header promises")
    return footer


def _info(path: Path, size: int, meta: SegmentMeta, footer: Footer) -> SegmentInfo:
    tables = [
        SegmentTable(name=t.name, layout=t.layout, row_bytes=t.row_bytes, rows=rows, erased=erased, meta=t)
        for t, rows, erased in zip(meta.tables, footer.rows, footer.erased, strict=True)
    ]
    return SegmentInfo(
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
        tables=tuple(tables),
        path=path,
        size=size,
        checksum=footer.checksum,
    )
