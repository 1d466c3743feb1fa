"""The raw rows of some buckets of a table: read, and removed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from monolith.table.embedding_table import EmbeddingTable
from monolith.table.table_file import read_rows_into

__all__ = ["BucketRows", "erase_bucket_rows", "read_bucket_rows"]


@dataclass(frozen=True, kw_only=True)
class BucketRows:
    """Rows with their optimizer state, as `EmbeddingTable.insert_rows` takes them."""

    ids: np.ndarray
    times: np.ndarray
    rows: np.ndarray


def read_bucket_rows(table: EmbeddingTable, buckets: range) -> BucketRows:
    """All rows of `buckets`.

    Example:
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(2, name="item"))
        >>> _ = table.reinitialize([0, 1, 2**62])  # in the buckets 3618, 2320 and 10
        >>> read_bucket_rows(table, range(0, 2400)).ids.tolist()
        [4611686018427387904, 1]
    """
    # Through a file: it is how the core walks over some buckets without walking over all rows.
    with tempfile.TemporaryDirectory(prefix="monolith-buckets-") as folder:
        path = Path(folder) / "rows.table"
        table.save(path, buckets=buckets)
        copy = EmbeddingTable(table.config.model_copy(update={"initial_capacity": 0}))
        copy.track_changes()
        read_rows_into(copy, path)
    pieces = list(copy.cut_changes())
    return BucketRows(
        ids=np.concatenate([np.empty(0, dtype=np.int64), *(piece.ids for piece in pieces)]),
        times=np.concatenate([np.empty(0, dtype=np.uint32), *(piece.times for piece in pieces)]),
        rows=np.concatenate([np.empty((0, copy.row_bytes), dtype=np.uint8), *(piece.rows for piece in pieces)]),
    )


def erase_bucket_rows(table: EmbeddingTable, buckets: range) -> None:
    """Remove all rows of `buckets`."""
    ids = read_bucket_rows(table, buckets).ids
    if len(ids):
        table.erase(ids)
