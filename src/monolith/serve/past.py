"""Earlier states of a run in a predictor: rows and weights of a checkpoint, or of a moment in the change log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.serve.predictor import Predictor
from monolith.state.restore_points import RestorePoint
from monolith.state.tables import TableSource, open_source
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS

__all__ = ["SavedState", "tables_of_predictor"]

CHUNK_ROWS = 2**22
"""About how many rows are read into memory at a time, besides those that are served."""


def tables_of_predictor(predictor: Predictor) -> dict[str, list[EmbeddingTable]]:
    """Return the tables of a predictor by the names they have in its run.

    Raises `InvalidArgumentError` if its rows are in other processes.
    """
    stores = predictor.stores
    found: dict[str, list[EmbeddingTable]] = {}
    for number, store in enumerate(stores.values()):
        if not store.tables and store.configs():
            raise InvalidArgumentError("the rows of this model are in other processes, which follow the run themselves")
        for name, table in store.tables.items():
            # A run with several stores puts their number before the name. Two collections may also share a store.
            found.setdefault(name, []).append(table)
            if len(stores) > 1:
                found.setdefault(f"{number}/{name}", []).append(table)
    return found


class SavedState:
    """A state of a run that was saved, checked and ready to be put into a predictor.

    Args:
        point: A checkpoint or a moment of the log.
        tables: The serving tables by the names they have in the run.

    Raises:
        CorruptFileError: Something of it is damaged.
        InvalidArgumentError: It does not fit the tables.
    """

    def __init__(self, point: RestorePoint, tables: Mapping[str, Sequence[EmbeddingTable]]) -> None:
        self.point = point
        self._source = open_source(point)
        self._tables = {name: copies for name, copies in tables.items() if name in self._source.tables}
        for name, copies in self._tables.items():
            saved = self._source.tables[name].config
            if saved.dim != copies[0].dim:
                raise InvalidArgumentError(
                    f"table {name!r}: {point.location} has rows of {saved.dim} values, the model has {copies[0].dim}"
                )
        state = point.state().get("model")
        if not isinstance(state, dict):
            raise CorruptFileError(f"{point.location}: has no dense weights")
        self._weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        # Every file is read and verified before the first row changes.
        for buckets in self._chunks():
            self._filled(buckets)

    def put_into(self, predictor: Predictor) -> None:
        """Replace all rows and weights. Requests are answered meanwhile, some of them with rows of both states."""
        for buckets in self._chunks():
            for name, saved in self._filled(buckets).items():
                entries = saved.entries()
                ids = entries.ids.numpy()
                for copy in self._tables[name]:
                    gone = np.setdiff1d(copy.rows_of_buckets(buckets).ids, ids)
                    if len(gone):
                        copy.erase(gone)
                    if len(ids):
                        copy.assign(ids, entries.values)
        predictor.set_weights(self._weights, ignore_unknown=True)

    def _chunks(self) -> list[range]:
        rows = sum(self._source.rows_in(name, range(NUM_BUCKETS)) for name in self._tables)
        step = max(1, NUM_BUCKETS * CHUNK_ROWS // max(CHUNK_ROWS, rows))
        return [range(first, min(first + step, NUM_BUCKETS)) for first in range(0, NUM_BUCKETS, step)]

    def _filled(self, buckets: range) -> dict[str, EmbeddingTable]:
        source: TableSource = self._source
        empty = {
            name: EmbeddingTable(source.tables[name].config.model_copy(update={"initial_capacity": 0}))
            for name in self._tables
        }
        source.fill(empty, buckets)
        return empty
