"""Data on the way to the model: sources of batches, transforms, synthetic data, shuffling and prefetching."""

from monolith.data.messages import BadMessage, MessageDecoder, MessageEncoder, decode_messages
from monolith.data.prefetch import Prefetch, PrefetchQueue
from monolith.data.sources.arrow import IteratorSource
from monolith.data.sources.files import FileQueue, expand_pattern, gen_patterns
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
]
