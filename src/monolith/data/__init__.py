"""Data on the way to the model: sources of batches, transforms, synthetic data, shuffling and prefetching."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monolith.data.messages import BadMessage, MessageDecoder, MessageEncoder, decode_messages
    from monolith.data.prefetch import Prefetch, PrefetchQueue
    from monolith.data.sources.arrow import IteratorSource
    from monolith.data.sources.files import FileQueue, expand_pattern, gen_patterns
    from monolith.data.sources.history import HistoryThenStream, start_after
    from monolith.data.sources.records import (
        INVALID_LABEL,
        RecordFileSource,
        RecordHeader,
        RecordWriter,
        TFRecordSource,
        TFRecordWriter,
        data_source_key,
        parse_records,
    )
    from monolith.data.sources.source import Column, Source
    from monolith.data.sources.stream_source import StreamInput, StreamSource
    from monolith.data.sources.tables import CsvSource, ParquetSource
    from monolith.data.transforms.compose import Shuffle

__all__ = [
    "BadMessage",
    "Column",
    "CsvSource",
    "FileQueue",
    "HistoryThenStream",
    "INVALID_LABEL",
    "IteratorSource",
    "MessageDecoder",
    "MessageEncoder",
    "ParquetSource",
    "Prefetch",
    "PrefetchQueue",
    "RecordFileSource",
    "RecordHeader",
    "RecordWriter",
    "Shuffle",
    "Source",
    "StreamInput",
    "StreamSource",
    "TFRecordSource",
    "TFRecordWriter",
    "data_source_key",
    "decode_messages",
    "expand_pattern",
    "gen_patterns",
    "parse_records",
    "start_after",
]

# Loaded when first asked for: a joiner needs neither torch nor the readers of files.
_HOMES = {
    "BadMessage": "monolith.data.messages",
    "Column": "monolith.data.sources.source",
    "CsvSource": "monolith.data.sources.tables",
    "FileQueue": "monolith.data.sources.files",
    "HistoryThenStream": "monolith.data.sources.history",
    "INVALID_LABEL": "monolith.data.sources.records",
    "IteratorSource": "monolith.data.sources.arrow",
    "MessageDecoder": "monolith.data.messages",
    "MessageEncoder": "monolith.data.messages",
    "ParquetSource": "monolith.data.sources.tables",
    "Prefetch": "monolith.data.prefetch",
    "PrefetchQueue": "monolith.data.prefetch",
    "RecordFileSource": "monolith.data.sources.records",
    "RecordHeader": "monolith.data.sources.records",
    "RecordWriter": "monolith.data.sources.records",
    "Shuffle": "monolith.data.transforms.compose",
    "Source": "monolith.data.sources.source",
    "StreamInput": "monolith.data.sources.stream_source",
    "StreamSource": "monolith.data.sources.stream_source",
    "TFRecordSource": "monolith.data.sources.records",
    "TFRecordWriter": "monolith.data.sources.records",
    "data_source_key": "monolith.data.sources.records",
    "decode_messages": "monolith.data.messages",
    "expand_pattern": "monolith.data.sources.files",
    "gen_patterns": "monolith.data.sources.files",
    "parse_records": "monolith.data.sources.records",
    "start_after": "monolith.data.sources.history",
}

# Not for type checkers: to them it would mean that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
