"""The calls of embedding shards, and their messages."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from monolith.config import Config
from monolith.ps.protocol.messages import DeclaredTable, Lookup
from monolith.ps.protocol.ownership import BucketRanges
from monolith.transport.calls import CallNumber, WireInt

__all__ = ["ExportId", "ServedCollection", "ShardCall", "ShardDescription", "ShardLookup", "ShardRead"]

ExportId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""The identity of an export: the checksum of its manifest."""


class ShardCall(CallNumber):
    """The calls of an embedding shard, all of which only read. A number never changes its meaning. 176..191 are reserved."""

    DESCRIBE = 176
    LOOKUP = 177
    STATS = 178
    READ_ROWS = 179
    READ_ENTRIES = 180
    COUNT_SLOTS = 181


class ServedCollection(Config):
    """The tables of one `EmbeddingBagCollection` of the export."""

    path: str
    """Where the collection was in the model."""
    tables: tuple[DeclaredTable, ...]


class ShardDescription(Config):
    """Answer to `DESCRIBE`: what a shard holds."""

    version: WireInt
    """Version of the export."""
    export: ExportId
    shard: WireInt
    """Number of the shard."""
    shards: WireInt
    """How many shards there are."""
    ranges: BucketRanges
    """The buckets whose rows it holds."""
    collections: tuple[ServedCollection, ...]


class ShardLookup(Lookup):
    """Bags of tables of one collection. Arrays and answer are those of `Lookup`."""

    export: ExportId
    """The export that the client serves. A shard of another one refuses the request."""
    collection: WireInt
    """Index of the collection in `ShardDescription.collections`."""


class ShardRead(Config):
    """STATS, READ_ROWS (answer: ids int64 [n], float32 [n, dim]), READ_ENTRIES (arrays: ids int64 [n]) and COUNT_SLOTS."""

    export: ExportId
    collection: WireInt
    table: str = ""
    """Not used by STATS."""
    ranges: BucketRanges = ()
    """Buckets of READ_ROWS."""
