"""Shards and front ends that follow a run: rows of their buckets, and dense weights, a moment behind training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from monolith.serve.follow import SILENT_SECS, RunFollower, RunWriters, set_followed_weights
from monolith.serve.predictor import Predictor
from monolith.serve.replica import Lag
from monolith.serve.shards.shard_server import ShardTables
from monolith.table.embedding_table import EmbeddingTable

if TYPE_CHECKING:
    from monolith.serve.shards.shard_group import ShardGroup

__all__ = ["FrontEndFollower", "ShardFollower"]


class _RowsOnly:
    """The tables of a shard, by the names they have in the run."""

    def __init__(self, shard: ShardTables) -> None:
        self._tables: dict[str, list[EmbeddingTable]] = {}
        for number, collection in enumerate(shard.collections):
            for table in collection.all():
                # A run with several stores puts their number before the name.
                self._tables.setdefault(table.name, []).append(table)
                if len(shard.collections) > 1:
                    self._tables.setdefault(f"{number}/{table.name}", []).append(table)

    def tables(self) -> Mapping[str, Sequence[EmbeddingTable]]:
        return self._tables

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Drop them: front ends have the dense part."""


class ShardFollower(RunFollower):
    """Keeps the rows of a shard at the state of a run, until `close`. Rows of other shards are not stored.

    Args:
        shard: What is kept up to date.
        run: The processes that hold the rows.
        silent_secs: Seconds without an answer of a writer after which what the run has saved is read.
    """

    def __init__(self, shard: ShardTables, run: RunWriters, *, silent_secs: float = SILENT_SECS) -> None:
        ((first, end),) = shard.description.ranges
        super().__init__(
            _RowsOnly(shard),
            run.writers(),
            find_writer=run.server,
            find_writers=run.writers,
            buckets=range(first, end),
            run=shard.run,
            step=shard.step,
            model_dir=run.model_dir,
            silent_secs=silent_secs,
        )


class _WeightsOnly:
    """The dense weights of a predictor whose rows are on shards."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def tables(self) -> Mapping[str, Sequence[EmbeddingTable]]:
        return {}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        set_followed_weights(self._predictor, weights)


class FrontEndFollower(RunFollower):
    """Keeps the dense weights of a front end at the state of a run. Its lag is the larger one of its own and that of its shards.

    Args:
        predictor: Its rows are on shards.
        run: The processes that hold the weights.
        shards: They follow the same run, and say in every answer how far they are.
        silent_secs: Seconds without an answer of a writer after which what the run has saved is read.
    """

    def __init__(
        self, predictor: Predictor, run: RunWriters, shards: ShardGroup, *, silent_secs: float = SILENT_SECS
    ) -> None:
        self._shards = shards
        origin = predictor.signature.run
        super().__init__(
            _WeightsOnly(predictor),
            run.writers(),
            find_writer=run.server,
            find_writers=run.writers,
            run="" if origin is None else origin.identity,
            step=predictor.signature.step,
            model_dir=run.model_dir,
            silent_secs=silent_secs,
        )

    def lag(self) -> Lag:
        """Return how far weights and rows are behind the run, whichever is further behind."""
        mine, rows = super().lag(), self._shards.lag()
        if rows is None:
            return mine
        return Lag(
            seconds=max(mine.seconds, rows.seconds),
            step=min(mine.step, rows.step),
            event_time=min(mine.event_time, rows.event_time),
            sequence=min(mine.sequence, rows.sequence),
            positions=mine.positions,
            connected=mine.connected and rows.connected,
            missing=mine.missing or rows.missing,
        )
