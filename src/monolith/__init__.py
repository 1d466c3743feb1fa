"""Monolith for PyTorch: recommendation models on ids that never collide, trained in place."""

from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, MonolithError, StorageError
from monolith.table import EmbeddingTable, Segment, TableConfig, num_threads, set_num_threads

__all__ = [
    "ConfigError",
    "CorruptFileError",
    "EmbeddingTable",
    "InvalidArgumentError",
    "MonolithError",
    "Segment",
    "StorageError",
    "TableConfig",
    "num_threads",
    "set_num_threads",
]
