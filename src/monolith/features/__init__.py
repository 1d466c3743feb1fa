"""Features on their way to the table: ragged batches, deduplication, splits by shard."""

from monolith.features.ragged import Ragged

__all__ = ["Ragged"]
