"""Reading files of serialized rows: what TFRecord files and the original's record files have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from monolith import _core
from monolith.data.sources.column import Column, checked_columns
from monolith.data.sources.file_source import FileSource
from monolith.data.sources.source import Position
from monolith.data.sources.streams import Compression, StreamDamage, compression_of, open_stream, read_stream
from monolith.errors import CorruptFileError, MonolithError, SchemaError
from monolith.features.batch import Batch

__all__ = ["RecordSource", "take_batch"]

_CHUNK_BYTES = 4 << 20
_log = logging.getLogger(__name__)


class RecordSource(FileSource):
    """Batches from files of framed, serialized rows; the base of `TFRecordSource` and `RecordFileSource`.

    Shards take whole files in turn; with fewer files than shards, records in turn.
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        columns: Iterable[Column],
        *,
        batch_size: int,
        format: _core.RecordFormat,  # noqa: A002 - the word of the file formats
        framing: _core.FramingOptions,
        by_header: bool,
        defaults: dict[str, float],
        compression: Compression,
        max_corrupt: int,
        drop_remainder: bool,
    ) -> None:
        self.columns = checked_columns(columns)
        self._specs = [
            column.to_core(None if column.shape is None else defaults.get(column.source)) for column in self.columns
        ]
        self._format, self._framing, self._by_header = format, framing, by_header
        self._new_parser()
        compression_of("", compression)
        self._compression = compression
        super().__init__(paths, batch_size=batch_size, drop_remainder=drop_remainder, max_corrupt=max_corrupt)

    @property
    def skipped(self) -> int:
        """Records left out so far because they were damaged or did not fit the columns."""
        return int(self._position["skipped"])

    def _start(self) -> Position:
        first, _, _ = self._share()
        return {"file": first, "url": "", "offset": 0, "record": 0, "row": 0, "skipped": 0}

    def _share(self) -> tuple[int, int, int]:
        """The first file of this shard, the step to its next one, and the step between its records."""
        by_record = len(self.files) < self._shard_count
        return (0, 1, self._shard_count) if by_record else (self._shard_index, self._shard_count, 1)

    def _new_parser(self) -> _core.RecordParser:
        return _core.RecordParser(self._format, self._by_header, self._specs)

    def _read(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        parser = self._new_parser()
        _, step, _ = self._share()
        at = dict(position)
        for index in range(int(position["file"]), len(self.files), step):
            if index != at["file"]:
                at.update(file=index, offset=0, record=0, row=0)
            at["url"] = self.files[index]
            for _ in self._fill(parser, at):
                yield take_batch(parser, self.columns), dict(at)
        if parser.rows() and not self._drop_remainder:
            yield take_batch(parser, self.columns), {**at, "file": len(self.files), "url": ""}

    def _fill(self, parser: _core.RecordParser, at: Position) -> Iterator[None]:
        """Read one file from `at` on, keeping `at` behind the last record used, and yield whenever a batch is full."""
        _, _, stride = self._share()
        record, row = int(at["record"]), int(at["row"])
        for start, chunk in self._chunks(at):
            frame = (self._shard_index - record) % stride if stride > 1 else 0
            while frame < len(chunk):
                frame, row, problem, message = parser.add(chunk, frame, row, self._batch_size, stride)
                at.update(offset=start + chunk.next_start(frame), record=record + min(frame, len(chunk)), row=row)
                if problem != _core.Problem.NONE:
                    self._skip(at, start + chunk.next_start(frame - stride), problem, message)
                elif parser.rows() == self._batch_size:
                    yield
            record += len(chunk)

    def _chunks(self, at: Position) -> Iterator[tuple[int, _core.Chunk]]:
        """Pieces of the current file, cut into frames, with the place each begins at."""
        start, data, needed = int(at["offset"]), b"", 0
        with open_stream(str(at["url"]), self._compression, start) as stream:
            while True:
                try:
                    piece = read_stream(stream, max(_CHUNK_BYTES, needed - len(data)))
                except StreamDamage as damage:
                    self._skip(at, start, _core.Problem.CORRUPT, f"{damage}; the rest of the file is lost")
                    return
                data += piece
                chunk = _core.split_frames(data, 0, self._framing, not piece)
                yield start, chunk
                if not piece or chunk.lost:
                    return
                start, needed, data = start + chunk.consumed, chunk.needed, data[chunk.consumed :]

    def _skip(self, at: Position, offset: int, problem: _core.Problem, message: str) -> None:
        at["skipped"] = int(at["skipped"]) + 1
        where = f"{at['url']}: record at byte {offset}: {message}"
        if int(at["skipped"]) > self._max_corrupt:
            error: type[MonolithError] = CorruptFileError if problem == _core.Problem.CORRUPT else SchemaError
            hint = f"{at['skipped']} bad records, max_corrupt is {self._max_corrupt}"
            raise error(f"{where} ({hint})")
        _log.warning("%s; skipped", where)


def take_batch(parser: _core.RecordParser, columns: Sequence[Column]) -> Batch:
    """The rows the parser holds, as a batch."""
    batch: Batch = {}
    for column, arrays in zip(columns, parser.take(), strict=True):
        batch.update(column.entries(*arrays))
    return batch
