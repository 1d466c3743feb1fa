"""`LogSegment`: the changes of one commit, read from their file piece by piece."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from monolith import _core
from monolith.errors import ConfigError, CorruptFileError, LogGapError, StorageError
from monolith.log.segment_format import (
    CRC_SIZE,
    HEAD_SIZE,
    PIECE_SIZE,
    STATE_SIZE,
    Footer,
    PieceHeader,
    SegmentInfo,
    SegmentMeta,
    StateHeader,
    TableChanges,
    add_to_digest,
    footer_size,
    meta_size,
    segment_name,
    unpack_footer,
    unpack_piece_header,
    unpack_state_header,
    unseal,
)
from monolith.state_bytes import State, unpack_state

__all__ = ["BoundedFile", "LogSegment"]


class BoundedFile:
    """A file open for reading by offset and size, with sizes checked before memory is allocated.

    It is not mapped into memory, so a disk error is an exception and not a signal. It is closed when it is garbage-collected.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as temporary:
        ...     _ = temporary.write(b"abcdef")
        ...     temporary.flush()
        ...     BoundedFile(Path(temporary.name)).read(2, 3).tobytes()
        b'cde'
    """

    _descriptor = -1

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Without waiting: a pipe under this name may never have a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise LogGapError(f"{path}: is missing: it was removed by retention, or lost") from None
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        found = os.fstat(self._descriptor)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"{path}: is not a file")

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def read(self, offset: int, size: int, *, end: int | None = None) -> np.ndarray:
        """Read uint8 [size] from `offset`. Raises `CorruptFileError` if that reaches beyond `end` or the end of the file."""
        if offset < 0 or size < 0 or offset + size > (self.size if end is None else end):
            raise CorruptFileError(
                f"{self.path}: {size} bytes at byte {offset} reach beyond its end; the file is damaged"
            )
        buffer = np.empty(size, dtype=np.uint8)
        done = 0
        while done < size:
            try:
                got = os.preadv(self._descriptor, [buffer[done:].data], offset + done)
            except OSError as error:
                raise StorageError(f"{self.path}: cannot be read: {error.strerror}") from error
            if got == 0:
                raise CorruptFileError(f"{self.path}: became shorter while it was read")
            done += got
        return buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    header: PieceHeader
    offset: int
    """Of its ids."""
    rows: int
    """Offset of its rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    """The offsets of all parts. Made only if headers, counts, lengths and digest agree with each other and with the footer."""

    pieces: list[_Piece]
    state: StateHeader | None
    state_offset: int


class LogSegment:
    """One commit of the change log, as an open file. Iterating yields verified pieces.

    The file stays open until `close`, the end of a `with` block, or garbage collection. Retention may remove its name meanwhile.

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
        self._file = BoundedFile(self.path)
        meta, self._body = _read_meta(self._file)
        self._footer = _read_footer(self._file, meta, self._body)
        self.info = SegmentInfo.of(self.path, self._file.size, meta, self._footer)
        self._index: _Index | None = None

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        self._file.close()

    def __enter__(self) -> LogSegment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[TableChanges]:
        for piece in self._parts().pieces:
            ids, erased, times = self._keys(piece)
            table = self.info.tables[piece.header.table]
            yield TableChanges(table=table, ids=ids, times=times, rows=self._rows(piece), erased=erased)

    def changed_ids(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names of tables with the ids whose rows were written or removed. Rows are not read."""
        for piece in self._parts().pieces:
            ids, erased, _ = self._keys(piece)
            yield self.info.tables[piece.header.table].name, np.concatenate([ids, erased])

    def select(self, ids: np.ndarray) -> Iterator[TableChanges]:
        """Yield the changes of `ids` only. Rows are read only where a piece has one of them."""
        for piece in self._parts().pieces:
            found, erased, times = self._keys(piece)
            mine, gone = np.isin(found, ids), np.isin(erased, ids)
            if mine.any() or gone.any():
                yield TableChanges(
                    table=self.info.tables[piece.header.table],
                    ids=found[mine],
                    times=times[mine],
                    rows=self._rows(piece)[mine],
                    erased=erased[gone],
                )

    def dense(self) -> State | None:
        """Return the dense state given to `commit`, or None."""
        return self._state("dense")

    def source(self) -> State | None:
        """Return the position in the data given to `commit`, or None."""
        return self._state("source")

    def check(self) -> None:
        """Read everything and verify its checksums. Raises `CorruptFileError` if something is wrong."""
        for _ in self:
            pass
        self._state("dense")

    def __repr__(self) -> str:
        return (
            f"LogSegment({self.info.sequence}, parent={self.info.parent}, step={self.info.step}, rows={self.info.rows})"
        )

    def _state(self, part: str) -> State | None:
        index = self._parts()
        if index.state is None:
            return None
        border = index.state.structure_size
        data = self._file.read(index.state_offset, border + index.state.tensors_size).tobytes()
        if _core.crc32c(data) != index.state.crc:
            raise CorruptFileError(f"{self.path}: the checksum of the nested state is wrong; the file is damaged")
        state = unpack_state(data[:border], data[border:], str(self.path))
        promised = {part for part, there in (("dense", self.info.has_dense), ("source", self.info.has_source)) if there}
        if not isinstance(state, dict) or set(state) != promised:
            raise CorruptFileError(f"{self.path}: its nested state is not what its header promises")
        return state.get(part)

    def _keys(self, piece: _Piece) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        header = piece.header
        keys = self._file.read(piece.offset, piece.rows - piece.offset)
        if _core.crc32c(keys) != header.keys_crc:
            raise CorruptFileError(f"{self.path}: the checksum of {header.rows} ids at byte {piece.offset} is wrong")
        ids, erased, times = np.split(keys, [8 * header.rows, 8 * (header.rows + header.erased)])
        return ids.view("<i8"), erased.view("<i8"), times.view("<u4")

    def _rows(self, piece: _Piece) -> np.ndarray:
        count, width = piece.header.rows, self.info.tables[piece.header.table].row_bytes
        rows = self._file.read(piece.rows, count * width)
        if _core.crc32c(rows) != piece.header.rows_crc:
            raise CorruptFileError(f"{self.path}: the checksum of {count} rows at byte {piece.rows} is wrong")
        return rows.reshape(count, width)

    def _parts(self) -> _Index:
        if self._index is None:
            self._index = self._read_index()
        return self._index

    def _read_index(self) -> _Index:
        """Walk over all headers before the first row is used, so that what is read later is known to belong together."""
        file, where, widths = self._file, str(self.path), [table.row_bytes for table in self.info.tables]
        end = file.size - footer_size(len(widths))
        position, digest = self._body, _core.crc32c(file.read(self._body - CRC_SIZE, CRC_SIZE))
        pieces: list[_Piece] = []
        rows, erased = [0] * len(widths), [0] * len(widths)
        for _ in range(self._footer.pieces):
            head = file.read(position, PIECE_SIZE, end=end).tobytes()
            header, digest = unpack_piece_header(head, where, tables=len(widths)), add_to_digest(head, digest)
            rows[header.table] += header.rows
            erased[header.table] += header.erased
            begin, position = position + PIECE_SIZE, position + PIECE_SIZE + header.keys_size
            pieces.append(_Piece(header=header, offset=begin, rows=position))
            position += header.rows * widths[header.table]
        state = None
        if self._footer.state_size:
            head = file.read(position, STATE_SIZE, end=end).tobytes()
            state, digest = unpack_state_header(head, where), add_to_digest(head, digest)
            position += STATE_SIZE
        state_size = 0 if state is None else state.structure_size + state.tensors_size
        counted = Footer(
            pieces=len(pieces), state_size=state_size, rows=tuple(rows), erased=tuple(erased), digest=digest
        )
        if position + state_size != end or counted != self._footer:
            raise CorruptFileError(f"{where}: its parts and its footer do not belong together; the file is damaged")
        return _Index(pieces=pieces, state=state, state_offset=position)


def _read_meta(file: BoundedFile) -> tuple[SegmentMeta, int]:
    """Read the header. Returns it and the offset of what follows."""
    where = str(file.path)
    size = HEAD_SIZE + meta_size(file.read(0, min(HEAD_SIZE, file.size)).tobytes(), where) + CRC_SIZE
    header = unseal(file.read(0, size).tobytes(), where)
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
    footer = unpack_footer(file.read(file.size - size, size).tobytes(), str(file.path), tables=len(meta.tables))
    if (footer.state_size > 0) != (meta.has_dense or meta.has_source):
        raise CorruptFileError(f"{file.path}: its nested state is not what its header promises")
    return footer
