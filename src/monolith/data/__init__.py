"""Data on its way to the model: sources of batches, transforms, synthetic data, prefetching."""

from monolith.data.file_queue import FileQueue
from monolith.data.nested import NestedTensors
from monolith.data.prefetch import Prefetch, PrefetchQueue
from monolith.data.shuffle import Shuffle
from monolith.data.sources import (
    INVALID_LABEL,
    Column,
    CsvSource,
    IteratorSource,
    ParquetSource,
    RecordFileSource,
    RecordHeader,
    RecordWriter,
    Source,
    TFRecordSource,
    TFRecordWriter,
    data_source_key,
    expand_pattern,
    gen_patterns,
    parse_records,
)

__all__ = [
    "Column",
    "CsvSource",
    "FileQueue",
    "INVALID_LABEL",
    "IteratorSource",
    "NestedTensors",
    "ParquetSource",
    "Prefetch",
    "PrefetchQueue",
    "RecordFileSource",
    "RecordHeader",
    "RecordWriter",
    "Shuffle",
    "Source",
    "TFRecordSource",
    "TFRecordWriter",
    "data_source_key",
    "expand_pattern",
    "gen_patterns",
    "parse_records",
]
