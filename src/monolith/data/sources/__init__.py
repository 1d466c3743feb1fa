"""Sources of batches: TFRecord, the original's record files, Parquet, CSV, standard input, Python iterators."""

from monolith.data.sources.column import Column
from monolith.data.sources.csv import CsvSource
from monolith.data.sources.files import expand_pattern, gen_patterns
from monolith.data.sources.iterator import IteratorSource
from monolith.data.sources.parquet import ParquetSource
from monolith.data.sources.record_file import (
    INVALID_LABEL,
    RecordFileSource,
    RecordHeader,
    RecordWriter,
    data_source_key,
    parse_records,
)
from monolith.data.sources.source import Source
from monolith.data.sources.tfrecord import TFRecordSource, TFRecordWriter

__all__ = [
    "Column",
    "CsvSource",
    "INVALID_LABEL",
    "IteratorSource",
    "ParquetSource",
    "RecordFileSource",
    "RecordHeader",
    "RecordWriter",
    "Source",
    "TFRecordSource",
    "TFRecordWriter",
    "data_source_key",
    "expand_pattern",
    "gen_patterns",
    "parse_records",
]
