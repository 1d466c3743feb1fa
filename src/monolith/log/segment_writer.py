"""Writing a segment: it appears in the folder whole and durable, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from monolith import _core
from monolith.durable import sync_to_disk
from monolith.errors import InvalidArgumentError
from monolith.log.segment import LogSegment
from monolith.log.segment_format import (
    CRC_SIZE,
    MAX_PIECE,
    Footer,
    PieceHeader,
    SegmentMeta,
    StateHeader,
    add_to_digest,
    pack_footer,
    pack_header,
    pack_piece_header,
    pack_state_header,
)
from monolith.log.segment_info import SegmentInfo, segment_name
from monolith.state_bytes import PackedState

__all__ = ["Changes", "remove_unfinished", "write_segment"]

_UNFINISHED = ".unfinished"


class Changes(NamedTuple):
    """Changes of one table on their way into a file."""

    table: int
    """Its place in the meta's `tables`."""
    ids: np.ndarray
    times: np.ndarray
    rows: np.ndarray
    erased: np.ndarray

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        return self.ids.nbytes + self.times.nbytes + self.rows.nbytes + self.erased.nbytes


def write_segment(
    folder: Path, meta: SegmentMeta, changes: Iterable[Changes], state: PackedState | None = None
) -> SegmentInfo:
    """Write, fsync, rename, fsync the folder. Whatever fails, a new number is needed for the next attempt."""
    target = folder / segment_name(meta.sequence)
    temporary = folder / f".{target.name}.{secrets.token_hex(8)}{_UNFINISHED}"
    with _removed_on_failure(temporary):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_parts(descriptor, meta, changes, state)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(target)
    # Nobody was told of it yet, and its rows will come again under another number.
    with _removed_on_failure(target):
        sync_to_disk(folder)
        return LogSegment(target).info


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what writers left behind that were killed; only for who knows that no writer is alive."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def _write_parts(descriptor: int, meta: SegmentMeta, changes: Iterable[Changes], state: PackedState | None) -> None:
    header = pack_header(meta)
    _write(descriptor, header)
    digest = _core.crc32c(header[-CRC_SIZE:])
    pieces, rows, erased = 0, [0] * len(meta.tables), [0] * len(meta.tables)
    for piece in _bounded(changes):
        _check_shape(piece, meta.tables[piece.table].row_bytes)
        head = _write_piece(descriptor, piece)
        digest = add_to_digest(head, digest)
        pieces += 1
        rows[piece.table] += len(piece.ids)
        erased[piece.table] += len(piece.erased)
    state_size = 0
    if state is not None:
        head, state_size = _write_state(descriptor, state)
        digest = add_to_digest(head, digest)
    _write(
        descriptor,
        pack_footer(
            Footer(pieces=pieces, state_size=state_size, rows=tuple(rows), erased=tuple(erased), digest=digest)
        ),
    )


def _bounded(changes: Iterable[Changes]) -> Iterator[Changes]:
    """The same changes in pieces that are not empty and not too large."""
    for table, ids, times, rows, erased in changes:
        for begin in range(0, max(len(ids), len(erased)), MAX_PIECE):
            part = slice(begin, begin + MAX_PIECE)
            yield Changes(table, ids[part], times[part], rows[part], erased[part])


def _check_shape(piece: Changes, row_bytes: int) -> None:
    """A reader finds its way by these numbers: writing others would lose the rows behind them."""
    shapes = (piece.times.shape, piece.rows.shape, piece.erased.ndim)
    if shapes != (piece.ids.shape, (len(piece.ids), row_bytes), 1):
        raise InvalidArgumentError(
            f"rows: expected [{len(piece.ids)}, {row_bytes}] and a time for each, got {piece.rows.shape}, {piece.times.shape}"
        )


def _write_piece(descriptor: int, piece: Changes) -> bytes:
    """Write a piece straight from the arrays' memory; its header."""
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
    """The bytes of `array`, which is copied only if it is not contiguous or of another type."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8)


def _write(descriptor: int, *parts: bytes | np.ndarray) -> None:
    waiting = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts if len(part)]
    while waiting:
        written = os.writev(descriptor, waiting)
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if written:
            waiting[0] = waiting[0][written:]
