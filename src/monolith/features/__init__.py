"""Features, from columns of a batch to requests of tables: ids, ragged batches, declarations, deduplication, splits by shard."""

from monolith.features.batch import Batch, BatchColumn, as_batch, num_rows
from monolith.features.declaration import Declaration, TableDeclaration, declare_tables
from monolith.features.feature import Feature
from monolith.features.ids import (
    FidLayout,
    fid_v1,
    fid_v1_to_v2,
    fid_v2,
    fid_v2_to_v1,
    hash_ids,
    hash_strings,
    to_fids,
)
from monolith.features.ragged import Ragged

__all__ = [
    "Batch",
    "BatchColumn",
    "Declaration",
    "Feature",
    "FidLayout",
    "Ragged",
    "TableDeclaration",
    "as_batch",
    "declare_tables",
    "fid_v1",
    "fid_v1_to_v2",
    "fid_v2",
    "fid_v2_to_v1",
    "hash_ids",
    "hash_strings",
    "num_rows",
    "to_fids",
]
